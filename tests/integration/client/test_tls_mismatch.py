"""A client with TLS and a server without, or the other way round: the error says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

import slatemq
from libs.serving.tls import ServerTls
from slatemq._rpc.tls import CertificateFiles
from slatemq.cli.access.dev_certificates import make_certificates
from slatemq.errors import InvalidArgument, Unavailable
from tests.integration.client.peers import Instance
from tests.integration.client.test_addresses import served


@pytest.fixture
async def instance() -> AsyncIterator[Instance]:
    async with Instance() as running:
        yield running


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certs"
    make_certificates(folder)
    return folder


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_error_of_a_client_without_tls_says_that_the_server_speaks_it(
    certificates: Path, mutual: bool
) -> None:
    names = ("ca.crt", "service.crt", "service.key")
    files = CertificateFiles(*(certificates / name for name in names))
    server = grpc.aio.server()
    credentials = ServerTls(files, needs_client_certificate=mutual).credentials()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        with pytest.raises(InvalidArgument, match=r"speaks TLS, .*--ca FILE") as raised:
            async with slatemq.connect(f"127.0.0.1:{port}"):
                pass
    finally:
        await server.stop(None)

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
