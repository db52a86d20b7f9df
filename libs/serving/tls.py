"""TLS of a server: its certificate, read again when the files change, and what clients prove.

gRPC asks for the certificate at each handshake, in a thread of its own. So a new one serves from
the next connection on, and connections that are open stay open.

gRPC's credentials cannot refuse TLS 1.2 by themselves; the guard of calls refuses those of such a
connection.
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import grpc
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from libs.serving.process.logs import AUDIT_LOGGER
from libs.serving.process.process_config import ProcessConfig
from slatemq._file_status import FilesValue, LoadedFiles
from slatemq._rpc.tls import CertificateFiles
from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from slatemq._admin.examining import CertificateExpiry

log = logging.getLogger(__name__)

OLDEST_TLS: Final = b"TLSv1.3"

AuthContext = Mapping[str, Iterable[bytes]]
"""What gRPC says of a connection: `context.auth_context()`."""


def certificate_files(config: ProcessConfig) -> CertificateFiles | None:
    """The files that the settings of a process name; None without TLS.

    Raises:
        InvalidArgument: One is missing.
    """
    stated = {name: getattr(config, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    if not any(stated.values()):
        return None
    for name, value in stated.items():
        if not value:
            raise InvalidArgument(name, "needed, since other files of TLS are stated")
    return CertificateFiles(*(Path(value) for value in stated.values()))


def require_tls(config: ProcessConfig, page: str) -> None:
    """Check that a process without a policy has TLS where others can reach it; `page` says how.

    One that is said to be insecure is warned about.

    Raises:
        InvalidArgument: It has none, and is not said to be insecure.
    """
    if not config.is_exposed or config.tls_cert:
        return
    if not config.insecure:
        raise InvalidArgument(
            "host",
            f"other machines can reach {config.host}, and there is no TLS: set --tls-cert, "
            f"--tls-key and --tls-ca ({page}), listen on 127.0.0.1, or say --insecure",
        )
    logging.getLogger(AUDIT_LOGGER).warning("open to other machines without TLS")


def https_context(config: ProcessConfig) -> ssl.SSLContext | None:
    """What HTTP is served with: TLS 1.3, each handshake by the newest files; None: without TLS.

    Raises:
        InvalidArgument: A file is not usable.
    """
    if not config.tls_cert:
        return None
    cert, key = Path(config.tls_cert), Path(config.tls_key)

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument("tls_cert", f"{cert} with {key}: {error}") from error
        return context

    certificate = FilesValue(read, cert, key)

    def choose(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = certificate.value

    first = certificate.value
    first.sni_callback = choose
    return first


def expiring_files(config: ProcessConfig) -> list[Path]:
    """The files with the certificates of a process and of whom it trusts."""
    return [Path(file) for file in (config.tls_cert, config.tls_ca) if file]


def certificate_expiries(files: Sequence[Path]) -> Sequence[CertificateExpiry]:
    """Of each file that can be read, the certificate that expires first."""
    module: Any = import_module("slatemq._admin.expiries")  # loaded where there is TLS
    found: Sequence[CertificateExpiry] = module.expiries_of(files)
    return found


def measure_certificates(meter: Meter, config: ProcessConfig) -> None:
    """Registers when the certificates of a process expire, if it has any."""
    files = expiring_files(config)
    if not files:
        return

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for one in certificate_expiries(files):
            yield Observation(one.expires_at_ms / 1000, {"slatemq.file": one.file})

    meter.create_observable_gauge(
        "slatemq.certificate.expiry",
        callbacks=[observe],
        unit="s",
        description="When the first certificate of a file expires, in s since 1970",
    )


class ServerTls:
    """The credentials of one port."""

    def __init__(self, files: CertificateFiles, *, needs_client_certificate: bool) -> None:
        """Read the files.

        Args:
            files: Certificate and key of the server; `ca` is what clients' are signed by.
            needs_client_certificate: Whether clients without one are refused in the handshake.

        Raises:
            InvalidArgument: A file is not usable; names it.
        """
        self._files = files
        self._needs_client_certificate = needs_client_certificate
        self._lock = threading.Lock()
        self._loaded = LoadedFiles(self._configuration, files.ca, files.cert, files.key)

    def credentials(self) -> grpc.ServerCredentials:
        changed = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._changed)
        with self._lock:
            first = self._loaded.value
        return grpc.dynamic_ssl_server_credentials(first, changed, self._needs_client_certificate)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The configuration, if the files have changed and are good; else None."""
        with self._lock:
            try:
                if not self._loaded.reload():
                    return None
            except InvalidArgument as error:
                log.warning("keeping the certificate before: %s", error.message)
                return None
            log.info("certificate read again", extra={"file": str(self._files.cert)})
            return self._loaded.value

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        ca, cert, key = self._files.read()
        if cert is None or key is None:
            raise InvalidArgument("cert", "a server needs a certificate and its key")
        if self._needs_client_certificate and ca is None:
            raise InvalidArgument("ca", "needed to check the certificates of clients")
        check_pair(cert, key)
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


def check_pair(cert: bytes, key: bytes) -> None:
    """Check that a key belongs to a certificate: gRPC would refuse every connection without a word.

    Raises:
        InvalidArgument: It does not, or one of them cannot be read.
    """
    # Loaded where there is TLS.
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificates(cert)[0]
    except ValueError as error:
        raise InvalidArgument("cert", f"is not a certificate: {error}") from error
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise InvalidArgument("key", f"is not a private key without a password: {error}") from error
    if private.public_key() != certificate.public_key():
        raise InvalidArgument("key", "does not belong to the certificate")


def identities(auth: AuthContext) -> frozenset[str]:
    """The names in the certificate that the client of a connection has proven; empty without one.

    Subject alternative names of all kinds and the common name.
    """
    found = [*auth.get("x509_subject_alternative_name", ()), *auth.get("x509_common_name", ())]
    return frozenset(name.decode(errors="replace") for name in found)


def expires_at_s(auth: AuthContext) -> float:
    """When the certificate of a connection's client expires, in seconds since the Unix epoch.

    Without one, never; of one that cannot be read, long ago.
    """
    sent = filter(None, auth.get("x509_pem_cert", ()))
    return min(map(_expiry_s, sent), default=math.inf)


@lru_cache(maxsize=1_000)
def _expiry_s(pem: bytes) -> float:
    # Loaded where there is TLS.
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    except ValueError:
        return 0.0


def is_old(auth: AuthContext) -> bool:
    """Whether a connection is TLS, of a version before 1.3."""
    versions = auth.get("ssl_tls_version")
    return versions is not None and list(versions) != [OLDEST_TLS]
