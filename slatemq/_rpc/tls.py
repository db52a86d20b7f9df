"""TLS of a client or a service: its certificates as files, read again when they change."""

from __future__ import annotations

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

        Raises:
            InvalidArgument: One cannot be read or is not PEM; names which.
        """
        return _pem("ca", self.ca), _pem("cert", self.cert), _pem("key", self.key)


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
        self._credentials = FilesValue(
            lambda: _channel_credentials(files), files.ca, files.cert, files.key
        )
        self.options = (("grpc.ssl_target_name_override", server_name),) if server_name else ()

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials of the newest files that were good."""
        return self._credentials.value

    @property
    def version(self) -> int:
        """Grows with each change.

        A channel that was opened with an earlier version goes on, but connects again with
        certificates that may have expired: open another one for new calls.
        """
        return self._credentials.version


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


def _channel_credentials(files: CertificateFiles) -> grpc.ChannelCredentials:
    ca, cert, key = files.read()
    return grpc.ssl_channel_credentials(ca, key, cert)


def _pem(name: str, file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        data = read_secret(file) if name == "key" else file.read_bytes()
    except OSError as error:
        raise InvalidArgument(name, f"cannot read {file}: {error.strerror}") from error
    if b"-----BEGIN " not in data or b"-----END " not in data:
        raise InvalidArgument(name, f"{file} is not PEM")
    return data
