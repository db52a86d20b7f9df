"""Secrets: checked, read from their files, and left out of what is logged and answered."""

from __future__ import annotations

import logging
import re
import stat
from pathlib import Path
from typing import Final

from slatemq.errors import InvalidArgument

log = logging.getLogger(__name__)

KEY_HEADER: Final = "slatemq-key"
"""The header of an encrypted message that names the key."""

_warned: Final[set[Path]] = set()

_SECRET: Final = re.compile(
    r"(?P<scheme>://)[^/\s\"']+(?=@)"  # the login of a URL, in which a password can have an @
    r"|(?P<name>"
    r"[?&;][\w.-]*(?:secret|password|token|signature|credential|(?:access|api|account)_?key)[\w.-]*="
    r"|[?&;]sig="  # the signature of a URL of Azure
    r"|\bbearer(?:\s|%20)+"
    r"|\bauthorization\W{1,4}basic(?:\s|%20)+"
    r")[^\s@&;\"']+"
    r"|\bsmq_[a-z0-9]+_[\w-]+"
    r"|\beyJ[\w-]+\.eyJ[\w-]+\.[\w-]*",  # a JSON Web Token
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """A text without the secrets that libraries put into errors: logins of URLs, and tokens."""
    return _SECRET.sub(lambda found: f"{found['scheme'] or found['name'] or ''}***", text)


def check_both_given(cert: object, key: object) -> None:
    """Raises InvalidArgument where a certificate has no key, or a key no certificate."""
    if (cert is None) != (key is None):
        has, lacks = ("cert", "key") if key is None else ("key", "cert")
        raise InvalidArgument(lacks, f"`{has}` is given, so the file of its {lacks} is needed")


def read_secret(file: Path) -> bytes:
    """The content of a file; warns once where every user of the machine can read it.

    Raises OSError.
    """
    warn_if_readable(file)
    return file.read_bytes()


def warn_if_readable(file: Path) -> None:
    """Warn once where every user of the machine can read a file. Raises OSError."""
    if file.stat().st_mode & stat.S_IROTH and file not in _warned:
        _warned.add(file)
        log.warning("every user of this machine can read %s: chmod 600 %s", file, file)
