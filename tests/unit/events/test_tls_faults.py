"""What is wrong with TLS to a server, and what only looks like it."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from libs.events import tls_faults
from libs.events.tls_faults import find_tls_fault
from tests.ports import free_ports

HELLO = b"hello"
PATIENCE_S = 60.0
"""Only for servers that are not silent: a probe waits so long for one that is."""


def certify(folder: Path, *, is_expired: bool) -> Path:
    """A certificate of 127.0.0.1 that signs itself, with its key in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=-1 if is_expired else 1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - datetime.timedelta(days=2))
        .not_valid_after(end)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    own_key = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + own_key)
    return file


@asynccontextmanager
async def answering(answer: bytes, certificate: Path | None = None) -> AsyncIterator[int]:
    """A server that answers the first bytes it gets with these; its port."""
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(100):
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(answered, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("is_expired", [True, False])
async def test_a_certificate_that_has_expired_is_the_servers_matter(
    tmp_path: Path, is_expired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certify(tmp_path, is_expired=is_expired)
    trusting = ssl.create_default_context(cafile=str(file))
    untrusting = ssl.create_default_context()
    async with answering(b"yes", file) as port:
        assert await find_tls_fault("127.0.0.1", port, trusting, HELLO) is None
        monkeypatch.setattr(tls_faults, "PROBE_S", PATIENCE_S)
        fault = await find_tls_fault("127.0.0.1", port, untrusting, HELLO)
        assert fault is not None
        assert not fault.is_own
        assert "is refused" in fault.description


async def test_a_server_of_the_other_kind_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_faults, "PROBE_S", PATIENCE_S)
    async with (
        answering(b"yes") as plain,
        answering(b"", certify(tmp_path, is_expired=False)) as tls,
    ):
        context = ssl.create_default_context()
        for port, of_client, words in (
            (plain, context, "speaks no TLS"),
            (tls, None, "speaks TLS"),
        ):
            fault = await find_tls_fault("127.0.0.1", port, of_client, HELLO)
            assert fault is not None
            assert words in fault.description
        assert await find_tls_fault("127.0.0.1", plain, None, HELLO) is None


async def test_a_server_that_is_down_or_says_nothing_has_no_fault_of_tls() -> None:
    (closed,) = free_ports(1)
    async with answering(b"") as silent:
        for port in (closed, silent):
            for context in (None, ssl.create_default_context()):
                assert await find_tls_fault("127.0.0.1", port, context, HELLO) is None
    assert await find_tls_fault("host.invalid", closed, None, HELLO) is None
