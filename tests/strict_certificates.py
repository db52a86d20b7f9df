"""Certificates that OpenSSL refuses by default from Python 3.13 on, and gRPC takes."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from slatemq.cli.access.dev_certificates import Authority


def strict_as_of_python_3_13(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let contexts that are made by default be as strict, whatever this Python."""
    make = ssl.create_default_context

    def strict(*args: Any, **settings: Any) -> ssl.SSLContext:
        context = make(*args, **settings)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)


def plain_authority() -> Authority:
    """One whose certificate states no key usage, as that of `openssl req -x509`."""
    authority = Authority(days=1)
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(authority.name)
        .issuer_name(authority.name)
        .public_key(authority.key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority.key, hashes.SHA256())
    )
    authority.pem = certificate.public_bytes(serialization.Encoding.PEM)
    return authority
