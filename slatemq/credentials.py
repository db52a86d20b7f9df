"""Who a client is, and how its connections are protected: TLS, certificates, tokens."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from slatemq._checks import check_flag, check_kind, check_text
from slatemq._file_status import FilesValue
from slatemq._secrets import check_both_given, path_of, read_secret, redacted, warn_if_readable
from slatemq.errors import InvalidArgument

__all__ = ["Credentials"]

PROFILES_FILE: Final = Path("~/.config/slatemq/profiles.toml")

VARIABLES: Final = {
    "ca": "SLATEMQ_CA",
    "cert": "SLATEMQ_CERT",
    "key": "SLATEMQ_KEY",
    "token": "SLATEMQ_TOKEN",
    "token_file": "SLATEMQ_TOKEN_FILE",
    "server_name": "SLATEMQ_SERVER_NAME",
    "encryption_keys": "SLATEMQ_ENCRYPTION_KEYS",
}

TOKEN_LENGTH_MAX: Final = 7_168
"""gRPC refuses calls with more than 8 KiB of metadata at random (1.85); they have others, too."""


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """What a client proves, and whom it trusts.

    Files of certificates and tokens are read again when they change, that of the encryption keys is
    read once, when the client connects.

    Attributes:
        tls: Whether connections are TLS; so they are, too, with `ca`, `cert` or `server_name`.
        ca: A file in PEM: the authorities that servers' certificates must be signed by; None: those
            that gRPC comes with.
        cert: A file in PEM: the client's certificate, and those between it and its authority.
        key: A file in PEM: its private key.
        token: What proves who calls: `smq_…`, or a JSON Web Token.
        token_file: A file that holds it.
        server_name: The name that servers' certificates have; empty: that of the address.
        encryption_keys: A file of the keys that payloads are encrypted with (`slatemq.encryption`).
    """

    tls: bool = False
    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    token: str = ""
    token_file: str | Path | None = None
    server_name: str = ""
    encryption_keys: str | Path | None = None

    def __post_init__(self) -> None:
        """Raises InvalidArgument for parts that are wrong, or do not go together."""
        check_flag("tls", self.tls)
        check_text("token", self.token)
        check_text("server_name", self.server_name)
        for name in ("ca", "cert", "key", "token_file", "encryption_keys"):
            _check_file(name, getattr(self, name))
        check_both_given(self.cert, self.key)
        if self.token and self.token_file is not None:
            problem = "give the token (SLATEMQ_TOKEN) or its file (SLATEMQ_TOKEN_FILE), not both"
            raise InvalidArgument("token", problem)

    def __repr__(self) -> str:
        """Without the token: it is a secret."""
        shown = [f"{one.name}={getattr(self, one.name)!r}" for one in fields(self)[:4]]
        return f"Credentials({', '.join(shown)}, has_token={bool(self.token or self.token_file)})"

    @property
    def is_tls(self) -> bool:
        return self.tls or bool(self.ca or self.cert or self.server_name)

    @classmethod
    def load(
        cls,
        parts: Mapping[str, str | None] | None = None,
        environ: Mapping[str, str] | None = None,
        profile: str | None = None,
    ) -> Credentials:
        """Credentials from options, the environment, and a profile, each part from the first.

        The profile is a table of `~/.config/slatemq/profiles.toml` (or of SLATEMQ_PROFILES):
        the one named, else by SLATEMQ_PROFILE, else `default` where there is one::

            [default]
            ca = "/etc/slatemq/ca.crt"
            token_file = "/etc/slatemq/token"

        Args:
            parts: Parts by name, which come first; one that is None is left out.
            environ: `SLATEMQ_CA`, `_CERT`, `_KEY`, `_TOKEN`, `_TOKEN_FILE`, `_SERVER_NAME`,
                `_ENCRYPTION_KEYS`, and `SLATEMQ_TLS=1`; None takes those of this process.
            profile: The name of the profile.

        Raises:
            InvalidArgument: A part is wrong, or there is no such profile.
        """
        environ = os.environ if environ is None else environ
        check_kind("environ", environ, Mapping)
        check_kind("parts", {} if parts is None else parts, Mapping)
        unknown = set(parts or {}) - {one.name for one in fields(cls)}
        if unknown:
            raise InvalidArgument("parts", f"has no part {unknown.pop()!r} of credentials")
        if profile is not None:
            check_text("profile", profile)
        parts = {name: value for name, value in (parts or {}).items() if value is not None}
        stated = {name: environ[var] for name, var in VARIABLES.items() if environ.get(var)}
        tls = environ.get("SLATEMQ_TLS", "")
        if tls in ("1", "true"):
            stated["tls"] = tls
        elif tls not in ("", "0", "false"):
            raise InvalidArgument("tls", "SLATEMQ_TLS must be 1, true, 0 or false")
        values: dict[str, Any] = {}
        for source in (parts, stated, _profile(profile, environ)):
            # A token of one source replaces a token file of the next, and the other way round.
            has_token = "token" in values or "token_file" in values
            for name, value in source.items():
                if not (has_token and name in ("token", "token_file")):
                    values.setdefault(name, value)
        values["tls"] = bool(values.get("tls"))
        return cls(**values)


def _check_file(name: str, file: str | Path | None) -> None:
    """Raises InvalidArgument for what cannot be the path of a file."""
    if file is None:
        return
    check_kind(name, file, str | Path, "the path of a file")
    try:
        has_end = b"\0" in os.fsencode(file)
    except UnicodeEncodeError as error:
        raise InvalidArgument(name, f"is not a path: {error}") from None
    if has_end:
        raise InvalidArgument(name, "is not a path: it has a null character")


class TokenSource:
    """The token of credentials, as call metadata."""

    def __init__(self, credentials: Credentials) -> None:
        """Raises InvalidArgument where the token's file cannot be read."""
        self._metadata = _authorization(credentials.token) if credentials.token else ()
        self._of_file: FilesValue[tuple[tuple[str, str], ...]] | None = None
        if credentials.token_file is not None:
            file = path_of(credentials.token_file)
            self._of_file = FilesValue(lambda: _authorization(_read_token(file)), file)

    @property
    def version(self) -> int:
        """Grows with each new token."""
        return 0 if self._of_file is None else self._of_file.version

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """`authorization`, or nothing."""
        return self._metadata if self._of_file is None else self._of_file.value


def is_loopback(address: str) -> bool:
    """Whether `host:port` is on this machine, so that no network carries what is sent."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _authorization(token: str) -> tuple[tuple[str, str], ...]:
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument("token", "must be printable ASCII without spaces")
    if len(token) > TOKEN_LENGTH_MAX:
        raise InvalidArgument("token", f"must have at most {TOKEN_LENGTH_MAX} characters")
    return (("authorization", f"Bearer {token}"),)


def _read_token(file: Path) -> str:
    try:
        token = read_secret(file).decode().strip()
    except OSError as error:
        problem = f"cannot read {redacted(str(file))}: {error.strerror}"
        raise InvalidArgument("token_file", problem) from error
    except UnicodeDecodeError:
        raise InvalidArgument("token_file", f"{file} is not a token: it is not text") from None
    if not token:
        raise InvalidArgument("token_file", f"{file} is empty")
    return token


def _profile(name: str | None, environ: Mapping[str, str]) -> Mapping[str, Any]:
    """The parts of a profile; empty where none is named and there is no default."""
    named = name or environ.get("SLATEMQ_PROFILE") or ""
    stated = environ.get("SLATEMQ_PROFILES")
    file = Path(stated) if stated else path_of(PROFILES_FILE)
    try:
        text = file.read_text(encoding="utf-8")
        import tomllib  # Only where there is a file.

        profiles = tomllib.loads(text)
        if any(isinstance(one, dict) and "token" in one for one in profiles.values()):
            warn_if_readable(file)
    except FileNotFoundError:
        if named or stated:
            raise InvalidArgument("profile", f"there is no file {file}") from None
        return {}
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument("profile", f"cannot read {file}: {problem}") from error
    found = profiles.get(named or "default")
    if found is None:
        if named:
            raise InvalidArgument("profile", f"{file} has no profile {named!r}")
        return {}
    known = {one.name for one in fields(Credentials)}
    for part, value in found.items() if isinstance(found, dict) else [("", found)]:
        if part not in known or not isinstance(value, bool if part == "tls" else str):
            expected = ", ".join(sorted(known))
            problem = f"{file}: each part is a text of {expected} (`tls` is true or false)"
            raise InvalidArgument(f"profile.{part}".rstrip("."), problem)
    return dict(found)
