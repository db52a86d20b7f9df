"""A client and a server of which one wants TLS, or a certificate, and the other has none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import slatemq
from libs.serving.tls import ServerTls
from slatemq._rpc.tls import CertificateFiles
from slatemq.cli.access.dev_certificates import make_certificates
from slatemq.cli.failures import advice
from slatemq.errors import InvalidArgument, Unavailable
from tests.integration.client.peers import Instance
from tests.integration.client.test_addresses import served


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certs"
    make_certificates(folder)
    return folder


@asynccontextmanager
async def serving_by_tls(certificates: Path, *, mutual: bool) -> AsyncIterator[str]:
    """The address of a server without any service."""
    names = ("ca.crt", "service.crt", "service.key")
    files = CertificateFiles(*(certificates / name for name in names))
    server = grpc.aio.server()
    credentials = ServerTls(files, needs_client_certificate=mutual).credentials()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_error_of_a_client_without_tls_says_that_the_server_speaks_it(
    certificates: Path, mutual: bool
) -> None:
    async with serving_by_tls(certificates, mutual=mutual) as address:
        with pytest.raises(InvalidArgument, match=r"speaks TLS, .*--ca FILE") as raised:
            async with slatemq.connect(address):
                pass

    assert raised.value.reason == "TLS_MISMATCH"


async def test_the_error_of_a_client_with_tls_says_that_the_server_speaks_none(
    instance: Instance, certificates: Path
) -> None:
    credentials = slatemq.Credentials(ca=certificates / "ca.crt", token="secret")

    with pytest.raises(InvalidArgument, match=r"speaks no TLS, .* --tls-cert") as raised:
        async with slatemq.connect(instance.endpoint, credentials=credentials):
            pass

    assert raised.value.reason == "TLS_MISMATCH"
    assert "secret" not in raised.value.message


async def test_a_server_that_closes_connections_without_a_word_may_require_a_certificate(
    certificates: Path,
) -> None:
    credentials = slatemq.Credentials(ca=certificates / "ca.crt")

    async with serving_by_tls(certificates, mutual=True) as address:
        # It does so while it stops, too: programs that wait for it go on to do so.
        with pytest.raises(Unavailable, match=r"requires a certificate .*--cert") as raised:
            async with slatemq.connect(address, credentials=credentials, call_timeout=1):
                pass

    assert raised.value.reason == "UNREACHABLE"


@pytest.mark.parametrize("wrong", ["ca", "server_name"])
async def test_the_advice_about_a_server_that_is_not_trusted_is_about_the_trust(
    certificates: Path, tmp_path: Path, wrong: str
) -> None:
    make_certificates(tmp_path / "other")
    parts: Any = {"ca": certificates / "ca.crt"}
    parts[wrong] = tmp_path / "other" / "ca.crt" if wrong == "ca" else "other"

    async with serving_by_tls(certificates, mutual=False) as address:
        with pytest.raises(Unavailable) as raised:
            async with slatemq.connect(
                address, credentials=slatemq.Credentials(**parts), call_timeout=5
            ):
                pass

    assert "--server-name" in advice(raised.value)


async def test_a_server_without_the_service_is_not_said_to_require_a_certificate(
    certificates: Path,
) -> None:
    credentials = slatemq.Credentials(ca=certificates / "ca.crt")

    async with serving_by_tls(certificates, mutual=False) as address:
        with pytest.raises(InvalidArgument) as raised:
            async with slatemq.connect(address, credentials=credentials):
                pass

    assert raised.value.reason == "NOT_SLATEMQ"


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_server_that_says_nothing_is_not_called_a_mismatch(
    certificates: Path, is_tls: bool
) -> None:
    credentials = slatemq.Credentials(ca=certificates / "ca.crt") if is_tls else None

    async with served(say_nothing) as silent:
        with pytest.raises(Unavailable):
            async with slatemq.connect(silent, credentials=credentials, call_timeout=1):
                pass


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Waits until the client hangs up."""
