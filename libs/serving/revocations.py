"""Certificates that their authorities revoked before they expired: a file of revocation lists.

gRPC's handshake looks at no lists. So the connection of a revoked certificate comes about, and each
of its calls is refused; those that are open end.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPublicKeyTypes

from libs.access.reloading import ReloadedFile
from libs.serving.tls import AuthContext
from slatemq.errors import InvalidArgument, Unauthenticated

log = logging.getLogger(__name__)

FIELD: Final = "tls_crl"

KEPT_MAX: Final = 10_000
"""Certificates that were looked up and are not parsed again, which takes longer than to judge the
rest of a call."""

_PEM = re.compile(rb"-----BEGIN ([^-]*)-----.*?-----END \1-----", re.DOTALL)

_Name: TypeAlias = tuple[frozenset[tuple[str, str | bytes]], ...]
"""What the name of an authority means, however it is encoded (RFC 5280, section 7.1)."""


class RevokedCertificates:
    """What the lists of a file name: certificates by their authority and number."""

    def __init__(self, lists: Iterable[x509.CertificateRevocationList]) -> None:
        self._serials = {
            (issuer, entry.serial_number)
            for one in lists
            for issuer in [_meaning(one.issuer)]
            for entry in one
        }
        self._known: dict[bytes, bool] = {}

    def check(self, auth: AuthContext) -> None:
        """Raises Unauthenticated where a client's certificate is among them.

        Or one that it has sent with it, of an authority between it and ours.
        """
        sent = (*auth.get("x509_pem_cert", ()), *auth.get("x509_pem_cert_chain", ()))
        if any(map(self._has, filter(None, sent))):
            raise Unauthenticated(
                "the certificate of this connection was revoked: get a new one",
                reason="CERTIFICATE_REVOKED",
            )

    def _has(self, pem: bytes) -> bool:
        digest = hashlib.sha256(pem).digest()  # Clients can send long chains.
        known = self._known.get(digest)
        if known is None:
            if len(self._known) >= KEPT_MAX:
                self._known.clear()
            try:
                known = any(
                    (_meaning(one.issuer), one.serial_number) in self._serials
                    for one in x509.load_pem_x509_certificates(pem)
                )
            except (ValueError, x509.InvalidVersion):
                known = True  # What cannot be read cannot be looked up.
            self._known[digest] = known
        return known


Revocations: TypeAlias = ReloadedFile[RevokedCertificates]
"""The lists of a file, read again when it changes."""


def revocations_of(file: Path, authorities: Path) -> Revocations:
    """The lists of a file, each of which must be signed by one of the authorities.

    Raises:
        InvalidArgument: A file is not usable.
    """
    return ReloadedFile(file, lambda path: _read(path, authorities), authorities)


def _read(file: Path, authorities: Path) -> RevokedCertificates:
    try:
        data = file.read_bytes()
        blocks = [one for one in _PEM.finditer(data) if one[1] == b"X509 CRL"]
        lists = [x509.load_pem_x509_crl(block[0]) for block in blocks]
    except OSError as error:
        raise InvalidArgument(FIELD, f"cannot read {file}: {error.strerror}") from error
    except (ValueError, x509.InvalidVersion) as error:
        raise InvalidArgument(FIELD, f"{file} has a revocation list that is damaged") from error
    if b"-----BEGIN " in _PEM.sub(b"", data):
        raise InvalidArgument(FIELD, f"{file} is cut off: it has a BEGIN without its END")
    if not lists:
        raise InvalidArgument(FIELD, f"{file} has no revocation list in PEM (X509 CRL)")
    signers = _authorities(authorities)
    for one in lists:
        name = one.issuer.rfc4514_string()
        issuer = _meaning(one.issuer)
        if not any(_is_signed(one, key) for signer, key in signers if signer == issuer):
            raise InvalidArgument(
                FIELD, f"the list of {name!r} in {file} is not signed by an authority of --tls-ca"
            )
        _check_extensions(one, f"the list of {name!r} in {file}")
        until = one.next_update_utc
        if until is not None and until < datetime.now(UTC):
            log.warning(
                "a revocation list is out of date, and what it names stays revoked: replace it",
                extra={"file": str(file), "issuer": name, "until": until.isoformat()},
            )
    return RevokedCertificates(lists)


def _authorities(file: Path) -> list[tuple[_Name, CertificateIssuerPublicKeyTypes]]:
    try:
        found = x509.load_pem_x509_certificates(file.read_bytes())
        return [(_meaning(one.subject), one.public_key()) for one in found]  # type: ignore[misc]
    except OSError as error:
        raise InvalidArgument("tls_ca", f"cannot read {file}: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise InvalidArgument("tls_ca", f"{file}: {error}") from error


def _meaning(name: x509.Name) -> _Name:
    def value(one: x509.NameAttribute[str | bytes]) -> str | bytes:
        text = one.value
        return " ".join(text.lower().split()) if isinstance(text, str) else text

    return tuple(
        frozenset((one.oid.dotted_string, value(one)) for one in part) for part in name.rdns
    )


def _is_signed(one: x509.CertificateRevocationList, key: CertificateIssuerPublicKeyTypes) -> bool:
    try:
        return one.is_signature_valid(key)
    except (InvalidSignature, UnsupportedAlgorithm, TypeError):
        return False


def _check_extensions(one: x509.CertificateRevocationList, name: str) -> None:
    """Raise for a list that does not mean what a whole list of its authority would."""
    try:
        extensions = list(one.extensions)
    except ValueError as error:
        raise InvalidArgument(FIELD, f"{name}: {error}") from error
    for extension in extensions:
        value = extension.value
        is_partial = isinstance(value, x509.IssuingDistributionPoint) and (
            value.indirect_crl
            or value.only_some_reasons is not None
            or value.only_contains_attribute_certs
        )
        is_known = isinstance(value, x509.IssuingDistributionPoint | x509.CRLNumber)
        if is_partial or (extension.critical and not is_known):
            raise InvalidArgument(
                FIELD,
                f"{name} is not a complete list of its authority alone (delta, indirect or of some "
                f"reasons, by its extension {extension.oid.dotted_string}): give a complete one",
            )
