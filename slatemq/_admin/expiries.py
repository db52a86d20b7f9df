"""When certificates expire. Needs the package cryptography."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cryptography import x509

from slatemq._admin.examining import CertificateExpiry


def expiries_of(files: Iterable[Path]) -> list[CertificateExpiry]:
    """Of each file in PEM, the certificate that expires first; none of one that cannot be read.

    Such a file is being replaced, or an error elsewhere.
    """
    found = []
    for file in files:
        try:
            certificates = x509.load_pem_x509_certificates(file.read_bytes())
        except (OSError, ValueError, x509.InvalidVersion):
            continue
        first = min(certificates, key=lambda one: one.not_valid_after_utc)
        expires_at_ms = int(first.not_valid_after_utc.timestamp() * 1000)
        found.append(CertificateExpiry(str(file), first.subject.rfc4514_string(), expires_at_ms))
    return found
