"""A throwaway authority, and certificates that it signs: for development, not for production."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVICE_NAME: Final = "slatemq-service"
"""The name by which services know each other's certificates."""

AUTHORITY_NAME: Final = "SlateMQ development, not for production"

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")

_DNS_NAME: Final = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?=[A-Za-z0-9_]))*")

_CLOCK_SKEW: Final = timedelta(minutes=5)


def make_certificates(
    folder: Path,
    *,
    hosts: Sequence[str] = (),
    client: str = "dev-client",
    days: int = 30,
    authority: Authority | None = None,
) -> list[Path]:
    """Write an authority's certificate, and a service's and a client's with their keys.

    ::

        ca.crt        what all of them trust; its key is thrown away
        service.crt   of servers on this machine and `hosts`, and among services
        client.crt    of the client that policies call `client`

    Each `.crt` but the first has a `.key` beside it, with mode 0600.

    Args:
        folder: Made if it is not there, with mode 0700.
        hosts: Further names and IP addresses of servers.
        client: The client's name.
        days: How long they are valid.
        authority: Signs them; None makes one.

    Returns:
        The files.

    Raises:
        FileExistsError: One of the files is there.
        OSError: One cannot be written.
        ValueError: The client has the services' name: its certificate would be that of a service.
            Or a host is neither a DNS name nor an address, or the client's name does not print.
    """
    for host in hosts:
        if not _is_address(host) and not _DNS_NAME.fullmatch(host):
            raise ValueError(f"{host!r} is neither a DNS name nor an IP address")
    if not client or not client.isprintable():
        raise ValueError(f"{client!a} is not a name: it needs characters that print")
    if client == SERVICE_NAME:
        raise ValueError(f"{client} is the name of the services: give the client another one")
    names = ("ca.crt", "service.crt", "service.key", "client.crt", "client.key")
    files = [folder / name for name in names]
    for file in files:
        if file.exists():
            raise FileExistsError(f"{file} exists already")
    authority = authority or Authority(days)
    service = authority.sign(SERVICE_NAME, (SERVICE_NAME, *LOOPBACK, *hosts))
    own = authority.sign(client, (client,))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file, data in zip(files, (authority.pem, *service, *own), strict=True):
        write_new(file, data)
    return files


def write_new(file: Path, data: bytes) -> None:
    """Write a file that is not there; a `.key` for its user alone. Raises OSError."""
    mode = 0o600 if file.suffix == ".key" else 0o644
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(data)


class Authority:
    """Signs certificates.

    Attributes:
        name, key: Its name, and its private key, which lives as long as this object.
        pem: Its certificate.
    """

    def __init__(self, days: int, name: str = AUTHORITY_NAME) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._from = datetime.now(UTC) - _CLOCK_SKEW
        self._until = datetime.now(UTC) + timedelta(days=days)
        self.name = _name(name)
        builder = self._builder(self.name, self.key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        self.pem = _pem(builder.sign(self.key, hashes.SHA256()))

    def sign(self, name: str, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """A certificate and its private key, for servers and clients of these names."""
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            self._builder(_name(name), key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(map(_host, hosts)), critical=False)
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return _pem(builder.sign(self.key, hashes.SHA256())), private

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._from)
            .not_valid_after(self._until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False
            )
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    if _is_address(text):
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    return x509.DNSName(text)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
