"""Secrets: checked, read from their files, and left out of what is logged and answered."""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path
from typing import Final

from slatemq.errors import InvalidArgument

log = logging.getLogger(__name__)

KEY_HEADER: Final = "slatemq-key"
"""The header of an encrypted message that names the key."""

_warned: Final[set[Path]] = set()

_NEXT_URL: Final = re.compile(r"(?=\n|[\s('\"]\w+://)")

_USER: Final = r"[^\s/:@\"'\[\]]*"

_LOGIN: Final = re.compile(
    rf"://(?:{_USER}:(?!\d{{1,5}}(?:\W|$)|\s).*"  # no port: a password, which can have anything
    rf"|{_USER}:\d+/[^\s\"':]*"  # that, or a port and a path
    rf"|{_USER}:\d+\s+\S+"  # with a blank: before several words, a port
    r"|[^/\s\"]+"
    r")@"
)
"""The login of a URL, as libraries print it: some of them do not encode what it has."""

_SECRET: Final = re.compile(
    r"(?P<name>"
    # A name is read once, however many such words or hyphens it has; so is a token.
    r"[?&;](?=[\w.-]*(?:secret|password|token|signature|credential|(?:access|api|account)_?key))"
    r"[\w.-]*+="
    r"|[?&;]sig="  # the signature of a URL of Azure
    r"|\bbearer(?:\s|%20)+"
    r"|\bauthorization\W{1,4}basic(?:\s|%20)+"
    r")[^\s@&;\"']+"
    r"|\bsmq_[a-z0-9]{4,32}_[\w-]{20,}"  # a token: names of queues can begin as one
    r"|(?<![\w-])(?=[\w-]*\beyJ)[\w-]++\.eyJ[\w-]+\.[\w-]*"  # a JSON Web Token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^\"]*",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """A text without the secrets that libraries put into errors: logins of URLs, and tokens.

    Where it is not clear how far a login goes, it is the longest: give it one text, not a line of
    several.
    """
    if "://" in text:
        text = "".join(map(_without_login, _NEXT_URL.split(text)))
    return _SECRET.sub(lambda found: f"{found['name'] or ''}***", text)


def _without_login(text: str) -> str:
    head, at, tail = text.rpartition("@")
    # Up to the last @: so no search runs on to the end of a text in vain.
    return _LOGIN.sub("://***@", head + at) + tail


def check_both_given(cert: object, key: object) -> None:
    """Raises InvalidArgument where a certificate has no key, or a key no certificate."""
    if (cert is None) != (key is None):
        has, lacks = ("cert", "key") if key is None else ("key", "cert")
        raise InvalidArgument(lacks, f"`{has}` is given, so the file of its {lacks} is needed")


def path_of(file: str | Path) -> Path:
    """A path whose `~` is a home folder; it stays where there is none: then no such file is found.

    Path.expanduser would raise RuntimeError.
    """
    return Path(os.path.expanduser(file))


def read_secret(file: Path) -> bytes:
    """The content of a file; warns once where every user of the machine can read it.

    Raises OSError.
    """
    warn_if_readable(file)
    return file.read_bytes()


def warn_if_readable(file: Path) -> None:
    """Warn once where every user of the machine can read a file. Raises OSError.

    Not of a folder, as of one that is named by mistake: it needs other rights.
    """
    mode = file.stat().st_mode
    if mode & stat.S_IROTH and not stat.S_ISDIR(mode) and file not in _warned:
        _warned.add(file)
        log.warning("every user of this machine can read %s: chmod 600 %s", file, file)
