"""Kafka by TLS: a real broker behind an end of TLS that asks for a client certificate."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from libs.events import tls_faults
from libs.events.backends import open_backend
from libs.events.kafka.connection import tls_context
from libs.events.settings import KafkaSettings
from slatemq.cli.access.dev_certificates import make_certificates
from slatemq.errors import InvalidArgument, Unavailable
from tests.integration.events.backends.kafka_server import kafka_server
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import created
from tests.ports import free_ports


@asynccontextmanager
async def tls_end(port: int, behind: int, folder: Path) -> AsyncIterator[None]:
    """Takes connections of TLS on one port, and passes what they carry to another."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "service.crt", folder / "service.key")
    context.verify_mode = ssl.CERT_REQUIRED
    passing = set[asyncio.Task[None]]()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", behind)
        for ends in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(copy(*ends))
            passing.add(task)
            task.add_done_callback(passing.discard)

    server = await asyncio.start_server(passed, "127.0.0.1", port, ssl=context)
    try:
        yield
    finally:
        server.close()
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)


@pytest.mark.slow
async def test_brokers_are_reached_by_tls_with_a_client_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_faults, "PROBE_S", 8.0)
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    (port,) = free_ports(1)
    with running(kafka_server(tmp_path, port)) as server:
        settings = msgspec.structs.replace(
            server.settings("slatemq"),
            brokers=(f"127.0.0.1:{port}",),
            tls_ca=str(certificates / "ca.crt"),
            tls_cert=str(certificates / "client.crt"),
            tls_key=str(certificates / "client.key"),
        )
        async with tls_end(port, server.port, certificates):
            backend = open_backend("kafka")
            await backend.connect(settings)
            await backend.publish_batch([created("a", bucket="photos")])
            await backend.ping()
            await backend.close()

            # Neither without a certificate, nor by an authority that did not sign the broker's
            make_certificates(tmp_path / "others")
            # (this end says nothing to those without one, as a broker would)
            without = {"tls_cert": "", "tls_key": ""}
            for key, changes in (
                ("tls_ca", {"tls_ca": str(tmp_path / "others" / "ca.crt")}),
                ("tls_ca", {"tls_ca": "", **without}),
                ("tls_ca", {"brokers": (f"127.0.0.1:{server.port}",)}),
            ):
                backend = open_backend("kafka")
                with pytest.raises(InvalidArgument) as refused:
                    await backend.connect(msgspec.structs.replace(settings, **changes))
                await backend.close()
                assert refused.value.field == f"queue.kafka.{key}"
            backend = open_backend("kafka")
            with pytest.raises(Unavailable):
                await backend.connect(msgspec.structs.replace(settings, **without))
            await backend.close()


@pytest.mark.parametrize(
    ("files", "key", "problem"),
    [
        ({"tls_cert": "client.crt", "tls_key": "client.key"}, "tls_cert", "no effect"),
        ({"tls_ca": "ca.crt", "tls_cert": "client.crt"}, "tls_key", "needed"),
        ({"tls_ca": "absent.crt"}, "tls_ca", "cannot be used"),
        ({"tls_ca": "client.key"}, "tls_ca", "cannot be used"),
        ({"tls_ca": "ca.crt", "tls_cert": "client.crt", "tls_key": "ca.crt"}, "tls_cert", "cannot"),
    ],
)
def test_files_of_tls_that_cannot_be_used_are_named_by_their_key(
    tmp_path: Path, files: dict[str, str], key: str, problem: str
) -> None:
    make_certificates(tmp_path / "made")
    stated = {name: str(tmp_path / "made" / file) for name, file in files.items()}

    with pytest.raises(InvalidArgument, match=problem) as caught:
        tls_context(KafkaSettings(**stated))  # type: ignore[arg-type]

    assert caught.value.field == f"queue.kafka.{key}"
