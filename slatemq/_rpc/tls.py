"""TLS of a client or a service: its certificates as files, read again when they change."""

from __future__ import annotations

import codecs
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from slatemq._file_status import FilesValue
from slatemq._secrets import check_both_given, read_secret
from slatemq.credentials import is_loopback
from slatemq.errors import InvalidArgument

_NO_PROXY: Final = ("grpc.enable_http_proxy", 0)

_OF_ANOTHER: Final = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""What OpenSSL says of a key of another certificate, whose kind may be another one, too."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Files in PEM.

    Attributes:
        ca: Certificates of the authorities that the other side's must be signed by.
        cert: The own certificate, followed by those between it and its authority.
        key: Its private key.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        """Raises InvalidArgument where a certificate has no key, or a key no certificate."""
        check_both_given(self.cert, self.key)

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The contents of the three; None for one that is not given.

        What does not fit together is refused: gRPC would fail every connection, without its reason.
        Pipes, as of a shell's `<(…)`, can be read once, so those are left to gRPC.

        Raises:
            InvalidArgument: One cannot be read, is damaged, or does not fit another; names which.
        """
        ca = _certificates("ca", self.ca)
        cert, key = pair = _certificates("cert", self.cert), _pem("key", self.key)
        if self.cert and self.key and self.cert.is_file() and self.key.is_file():
            load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.cert, self.key)
            if pair != (_pem("cert", self.cert), _pem("key", self.key)):
                raise InvalidArgument("cert", f"{self.cert} is being replaced, or {self.key} is")
        return ca, cert, key

    def check_time(self, loaded: tuple[object, bytes | None]) -> None:
        """Raise InvalidArgument where a certificate is known to be good at another time alone.

        In `loaded` it is behind what was made of the files.
        """


class ChannelTls:
    """What channels are opened with: the credentials of the files as they are now.

    Attributes:
        options: What channels need besides the credentials.
    """

    def __init__(self, files: CertificateFiles, server_name: str = "") -> None:
        """Read the files.

        Args:
            files: The certificates; without `ca` those of the system are trusted.
            server_name: The name that servers' certificates must have; empty: that of the address.

        Raises:
            InvalidArgument: A file is not usable.
        """

        def read() -> tuple[grpc.ChannelCredentials, bytes | None]:
            ca, cert, key = files.read()
            return grpc.ssl_channel_credentials(ca, key, cert), cert

        self._loaded = FilesValue(read, files.ca, files.cert, files.key, check=files.check_time)
        self.options = (("grpc.ssl_target_name_override", server_name),) if server_name else ()

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials of the newest files that were good."""
        return self._loaded.value[0]

    @property
    def version(self) -> int:
        """Grows with each change.

        A channel that was opened with an earlier version goes on, but connects again with
        certificates that may have expired: open another one for new calls.
        """
        return self._loaded.version


def channel_to(
    address: str, options: Sequence[tuple[str, int]], tls: ChannelTls | None
) -> grpc.aio.Channel:
    """A channel to `host:port`; None: without TLS.

    One to this machine goes through no proxy, whatever `http_proxy` says: a proxy elsewhere would
    read the tokens that are sent on loopback without TLS.
    """
    if is_loopback(address):
        options = (*options, _NO_PROXY)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials, (*options, *tls.options))


def load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Let a context prove the certificate of one file by the private key of another.

    Raises:
        InvalidArgument: The key cannot be used for it, or needs a password.
    """

    def no_password() -> str:
        raise InvalidArgument("key", f"{key} needs a password: give a key that needs none")

    try:
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        if error.reason in _OF_ANOTHER:
            problem = f"{key} does not belong to the certificate {cert}"
        else:
            problem = f"{key} cannot be used for the certificate {cert}: {error.reason}"
        raise InvalidArgument("key", problem) from error
    except OSError as error:
        raise InvalidArgument("key", f"cannot read {cert} or {key}: {error.strerror}") from error


def _pem(name: str, file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        data = read_secret(file) if name == "key" else file.read_bytes()
    except OSError as error:
        raise InvalidArgument(name, f"cannot read {file}: {error.strerror}") from error
    if b"-----BEGIN " not in data or b"-----END " not in data:
        raise InvalidArgument(name, f"{file} is not PEM")
    if data.startswith(codecs.BOM_UTF8):
        raise InvalidArgument(name, f"{file} begins with a byte order mark: store it without one")
    return data


def _certificates(name: str, file: Path | None) -> bytes | None:
    data = _pem(name, file)
    if data is None:
        return None
    text = data.decode("ascii", "replace").replace("\ufffd", "?")  # There can be names beside them.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except ssl.SSLError as error:
        raise InvalidArgument(name, f"{file} has no certificate, or a damaged one") from error
    return data
