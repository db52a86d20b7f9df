"""TLS of a server: its certificate, read again when the files change, and what clients prove.

gRPC asks for the certificate at each handshake, in a thread of its own. So a new one serves from
the next connection on, and connections that are open stay open.

gRPC's credentials cannot refuse TLS 1.2 by themselves; the guard of calls refuses those of such a
connection.
"""

from __future__ import annotations

import logging
import math
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import grpc
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from libs.serving.process.logs import AUDIT_LOGGER
from libs.serving.process.process_config import ProcessConfig
from slatemq._file_status import FilesValue, LoadedFiles
from slatemq._rpc.tls import CertificateFiles, load_pair
from slatemq.errors import InvalidArgument, Unauthenticated

if TYPE_CHECKING:
    from slatemq._admin.examining import CertificateExpiry

log = logging.getLogger(__name__)

OLDEST_TLS: Final = b"TLSv1.3"

AuthContext = Mapping[str, Iterable[bytes]]
"""What gRPC says of a connection: `context.auth_context()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFiles(CertificateFiles):
    """Those of a service, which shows its certificate to clients and to other services alike.

    Attributes:
        identity: Must be among the certificate's DNS names; empty: any will do.
    """

    identity: str = ""

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """As of any files; raises InvalidArgument for a certificate that no one would take, too."""
        ca, cert, key = CertificateFiles.read(self)
        problem = "" if cert is None else _problem(cert, self.identity)
        if problem:
            raise InvalidArgument("cert", f"{self.cert} {problem}")
        return ca, cert, key

    def check_time(self, loaded: tuple[object, bytes | None]) -> None:
        """Raise InvalidArgument where the certificate has expired, or is not valid yet."""
        _, cert = loaded
        problem = "" if cert is None else _problem_of_time(cert)
        if problem:
            raise InvalidArgument("cert", f"{self.cert} {problem}")


def _problem_of_time(cert: bytes) -> str:
    """Why the other side would refuse a usable certificate now; empty: it would not."""
    # Loaded where there is TLS.
    from cryptography import x509

    certificate = x509.load_pem_x509_certificates(cert)[0]
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc <= now:
        return f"has expired, at {certificate.not_valid_after_utc.isoformat()}"
    if certificate.not_valid_before_utc > now:
        return f"is not valid before {certificate.not_valid_before_utc.isoformat()}"
    return ""


def _problem(cert: bytes, identity: str) -> str:
    """Why the other side would refuse a certificate at any time; empty: it would not."""
    # Loaded where there is TLS.
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import PublicKeyAlgorithmOID

    try:
        certificate = x509.load_pem_x509_certificates(cert)[0]
        key = certificate.public_key()
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = found.value.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        names = []
    except (
        ValueError,
        UnsupportedAlgorithm,
        x509.DuplicateExtension,
        x509.InvalidVersion,
    ) as error:
        return f"cannot be used: {error}"
    if isinstance(key, ec.EllipticCurvePublicKey):
        is_offered = isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1)
    else:
        kind = certificate.public_key_algorithm_oid
        is_offered = kind == PublicKeyAlgorithmOID.RSAES_PKCS1_v1_5
    if not is_offered:
        return (
            "has a key that gRPC does not take: use RSA (not RSA-PSS), or ECDSA on P-256 or P-384"
        )
    if identity and identity not in names:
        return f"does not have the name {identity} among its DNS names (--service-identity)"
    return ""


def certificate_files(config: ProcessConfig, identity: str = "") -> ServiceFiles | None:
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
    return ServiceFiles(*(Path(value) for value in stated.values()), identity=identity)


def setting_of(field: str) -> str:
    """The setting that an error of TLS is about."""
    return f"tls_{field}" if field in ("ca", "cert", "key") else field


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


def https_context(files: ServiceFiles | None) -> ssl.SSLContext | None:
    """What HTTP is served with: TLS 1.3, each handshake by the newest files; None: without TLS.

    Raises:
        InvalidArgument: A file is not usable.
    """
    if files is None or files.cert is None or files.key is None:
        return None
    cert, key = files.cert, files.key

    def read() -> tuple[ssl.SSLContext, bytes | None]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["http/1.1"])
        _, data, _ = files.read()
        load_pair(context, cert, key)
        return context, data

    certificate = FilesValue(read, files.ca, cert, key, check=files.check_time)

    def choose(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = certificate.value[0]

    first = certificate.value[0]
    first.sni_callback = choose
    return first


def certificates_in_force(
    config: ProcessConfig, identity: str = ""
) -> Callable[[], Sequence[CertificateExpiry]]:
    """When those of a process and of whom it trusts expire: of each file the first; none without.

    Files that are refused as they are now count as they were before.

    Raises:
        InvalidArgument: A file is not usable.
    """
    files = certificate_files(config, identity)
    if files is None or files.cert is None or files.ca is None:
        return tuple
    named = [files.cert, files.ca]
    module: Any = import_module("slatemq._admin.expiries")  # loaded where there is TLS

    def read() -> tuple[Sequence[CertificateExpiry], bytes | None]:
        _, cert, _ = files.read()
        return module.expiries_of(named), cert

    loaded = FilesValue(read, files.ca, files.cert, files.key, check=files.check_time)
    return lambda: loaded.value[0]


def measure_certificates(meter: Meter, config: ProcessConfig, identity: str = "") -> None:
    """Registers when the certificates of a process expire, if it has any.

    Raises as `certificates_in_force`.
    """
    if not config.tls_cert:
        return
    expiries = certificates_in_force(config, identity)

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for one in expiries():
            yield Observation(one.expires_at_ms / 1000, {"slatemq.file": one.file})

    meter.create_observable_gauge(
        "slatemq.certificate.expiry",
        callbacks=[observe],
        unit="s",
        description="When the first certificate of a file expires, in s since 1970",
    )


class ServerTls:
    """The credentials of one port.

    Attributes:
        refused: The file that was refused at the last handshake, while those before stay in force;
            None: there is none.
    """

    def __init__(self, files: CertificateFiles, *, needs_client_certificate: bool) -> None:
        """Read the files.

        Args:
            files: Certificate and key of the server; `ca` is what clients' are signed by.
            needs_client_certificate: Whether clients without one are refused in the handshake.

        Raises:
            InvalidArgument: A file is not usable; names it.
        """
        self.refused: Path | None = None
        self._files = files
        self._needs_client_certificate = needs_client_certificate
        self._lock = threading.Lock()
        self._loaded = LoadedFiles(
            self._configuration, files.ca, files.cert, files.key, check=files.check_time
        )

    def credentials(self) -> grpc.ServerCredentials:
        changed = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._changed)
        with self._lock:
            first = self._loaded.value[0]
        return grpc.dynamic_ssl_server_credentials(first, changed, self._needs_client_certificate)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The configuration, if the files have changed and are good; else None."""
        with self._lock:
            try:
                if not self._loaded.reload():
                    return None
            except InvalidArgument as error:
                self.refused = getattr(self._files, error.field)
                log.warning("keeping the certificate before: %s", error.message)
                return None
            self.refused = None
            log.info("certificate read again", extra={"file": str(self._files.cert)})
            return self._loaded.value[0]

    def _configuration(self) -> tuple[grpc.ServerCertificateConfiguration, bytes]:
        ca, cert, key = self._files.read()
        if cert is None or key is None:
            raise InvalidArgument("cert", "a server needs a certificate and its key")
        if self._needs_client_certificate and ca is None:
            raise InvalidArgument("ca", "needed to check the certificates of clients")
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca), cert


class ClientCertificate(NamedTuple):
    """What a certificate says of its holder.

    Attributes:
        names: Subject alternative names of all kinds that are texts or addresses, and the common
            name.
        dns_names: Those of DNS among the alternative names. By one of them a service is known:
            authorities check them, while many take the common name as it is asked for.
        expires_at_s: When it expires, in seconds since the Unix epoch.
    """

    names: frozenset[str]
    dns_names: frozenset[str]
    expires_at_s: float


_NO_CERTIFICATE: Final = ClientCertificate(frozenset(), frozenset(), math.inf)

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def client_certificate(auth: AuthContext) -> ClientCertificate:
    """That of a connection's client; without one there are no names, and nothing expires.

    Raises:
        Unauthenticated: It cannot be read, or a name has a control character. Who may sign names
            that end with `.example` could else sign one that is cut at a NUL before that.
    """
    # Not by the names that gRPC lists: it has cut them.
    sent = filter(None, auth.get("x509_pem_cert", ()))
    found = next(map(_read, sent), _NO_CERTIFICATE)
    if found is None or any(map(_CONTROL.search, found.names)):
        raise Unauthenticated(
            "the certificate of this connection cannot be read"
            if found is None
            else "a name in the certificate of this connection has a control character",
            reason="CERTIFICATE_UNREADABLE",
        )
    return found


@lru_cache(maxsize=1_000)
def _read(pem: bytes) -> ClientCertificate | None:
    """None: it cannot be read."""
    # Loaded where there is TLS.
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(pem)
        subject, extensions = certificate.subject, certificate.extensions
    except (
        TypeError,
        ValueError,
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    ):
        return None
    alternatives: list[x509.GeneralName] = []
    with suppress(x509.ExtensionNotFound):
        alternatives += extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    kinds = (x509.DNSName, x509.RFC822Name, x509.UniformResourceIdentifier, x509.IPAddress)
    common = subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[:1]
    named = (*common, *(one for one in alternatives if isinstance(one, kinds)))
    return ClientCertificate(
        frozenset(str(one.value) for one in named if one.value),
        frozenset(one.value for one in alternatives if isinstance(one, x509.DNSName)),
        certificate.not_valid_after_utc.timestamp(),
    )


def is_old(auth: AuthContext) -> bool:
    """Whether a connection is TLS, of a version before 1.3."""
    versions = auth.get("ssl_tls_version")
    return versions is not None and list(versions) != [OLDEST_TLS]
