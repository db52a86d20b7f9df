import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from libs.serving.peers import channels as channels_module
from libs.serving.peers.channels import Channels, open_channel
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.serving.tls import ServerTls
from libs.storage.database.roots import open_root
from slatemq import _file_status
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq._rpc.tls import CertificateFiles, ChannelTls
from slatemq.cli.access.dev_certificates import SERVICE_NAME, make_certificates
from slatemq.errors import DeadlineExceeded, Unavailable
from tests.integration.serving.echo_service import METHODS, EchoServicer
from tests.manual_clock import ManualSeconds
from tests.ports import free_ports


@pytest.fixture
def clock() -> ManualSeconds:
    return ManualSeconds()


@pytest.fixture
async def directory(clock: ManualSeconds) -> AsyncIterator[TopologyDirectory]:
    made = TopologyDirectory(open_root("memory:///").objects, clock)
    yield made
    await made.close()


@pytest.fixture
async def channels(directory: TopologyDirectory) -> AsyncIterator[Channels]:
    made = Channels(directory, call_deadline_ms=60_000)
    yield made
    await made.close()


async def serve() -> tuple[grpc.aio.Server, EchoServicer, str]:
    server, servicer = grpc.aio.server(), EchoServicer()
    servicer.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, servicer, f"127.0.0.1:{port}"


async def echo(channel: grpc.aio.Channel, text: str, timeout: float | None = None) -> str:
    method: Any = channel.unary_unary(METHODS["uu"], StringValue.SerializeToString)
    with raising_slatemq_errors():
        answer = await method(StringValue(value=text), timeout=timeout)
    return StringValue.FromString(answer).value


async def test_a_peer_has_one_channel(directory: TopologyDirectory, channels: Channels) -> None:
    server, _, address = await serve()
    await directory.announce(Peer("broker", 0, address))

    first = await channels.to("broker", 0)

    assert await echo(first, "hello") == "hello"
    assert await channels.to("broker", 0) is first
    await server.stop(0)


async def test_an_unknown_peer_is_unavailable(channels: Channels) -> None:
    with pytest.raises(Unavailable) as caught:
        await channels.to("broker", 7)

    assert caught.value.reason == "PEER_UNKNOWN"


async def test_a_peer_that_moved_is_found_at_its_new_place(
    directory: TopologyDirectory, channels: Channels, clock: ManualSeconds
) -> None:
    # Given a peer that was called and then went away
    server, _, address = await serve()
    await directory.announce(Peer("broker", 0, address))
    old = await channels.to("broker", 0)
    assert await echo(old, "hello") == "hello"
    await server.stop(0)
    with pytest.raises(Unavailable):
        await echo(old, "hello")
    async with asyncio.timeout(60):
        while old.get_state() is grpc.ChannelConnectivity.READY:
            await old.wait_for_state_change(grpc.ChannelConnectivity.READY)

    # When it comes back elsewhere
    server, _, address = await serve()
    await directory.announce(Peer("broker", 0, address))
    clock.now_s = 1.0

    # Then the next call finds it
    assert await echo(await channels.to("broker", 0), "again") == "again"
    await server.stop(0)


async def test_a_call_without_a_deadline_gets_one() -> None:
    server, servicer, address = await serve()

    async with open_channel(address, deadline_seconds=0.05) as channel:
        with pytest.raises(DeadlineExceeded):
            await echo(channel, "wait")
        # And one that states its own keeps it
        servicer.waiting.clear()
        call = asyncio.create_task(echo(channel, "wait", timeout=60))
        await servicer.waiting.wait()
        servicer.release.set()
        assert await call == "wait"
    await server.stop(0)


async def test_a_peer_that_is_down_fails_at_once_and_is_soon_back() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"

    async with open_channel(address) as channel:
        # Given several calls while the peer is down, which raise the backoff
        for _ in range(5):
            with pytest.raises(Unavailable):
                await echo(channel, "hello")

        # When it is back on its port
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        EchoServicer().add_to(server)
        server.add_insecure_port(address)
        await server.start()

        # Then the same channel reaches it, long before gRPC's own two minutes
        async with asyncio.timeout(60):
            await channel.channel_ready()
        assert await echo(channel, "back") == "back"
    await server.stop(0)


async def test_a_call_whose_channel_is_closed_says_that_the_peer_has_moved() -> None:
    server, servicer, address = await serve()
    async with open_channel(address) as channel:
        call = asyncio.create_task(echo(channel, "wait"))
        await servicer.waiting.wait()

    [error] = await asyncio.gather(call, return_exceptions=True)
    await server.stop(0)

    assert isinstance(error, Unavailable)
    assert error.reason == "PEER_MOVED"


async def test_a_task_that_is_cancelled_in_a_call_ends_as_cancelled() -> None:
    server, servicer, address = await serve()
    async with open_channel(address) as channel:
        call = asyncio.create_task(echo(channel, "wait"))
        await servicer.waiting.wait()

        call.cancel()
        await asyncio.wait([call])
    await server.stop(0)

    assert call.cancelled()


@dataclass
class Renewable:
    """Channels with TLS to a peer, and a stream that was opened before the files were renewed."""

    channels: Channels
    directory: TopologyDirectory
    files: CertificateFiles
    clock: ManualSeconds
    stream: Any

    async def renew(self) -> grpc.aio.Channel:
        """The channel after new files."""
        former = await self.channels.to("broker", 0)
        assert self.files.cert is not None
        os.utime(self.files.cert)
        channel = await self.channels.to("broker", 0)
        assert channel is not former
        assert await echo(channel, "new") == "new"
        return channel


async def echoed(stream: Any, text: str) -> str:
    with raising_slatemq_errors():
        await stream.write(StringValue(value=text))
        answer = await stream.read()
    return StringValue.FromString(answer).value


@pytest.fixture
async def renewable(
    directory: TopologyDirectory,
    clock: ManualSeconds,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Renewable]:
    monkeypatch.setattr(_file_status, "LOOK_S", 0.0)
    monkeypatch.setattr(channels_module, "CLOSE_GRACE_SECONDS", 0.0)
    make_certificates(tmp_path / "made")
    names = ("ca.crt", "service.crt", "service.key")
    files = CertificateFiles(*(tmp_path / "made" / name for name in names))
    server = grpc.aio.server()
    EchoServicer().add_to(server)
    credentials = ServerTls(files, needs_client_certificate=True).credentials()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    await directory.announce(Peer("broker", 0, f"127.0.0.1:{port}"))
    channels = Channels(directory, tls=ChannelTls(files, SERVICE_NAME))
    channel = await channels.to("broker", 0)
    stream: Any = channel.stream_stream(METHODS["ss"], StringValue.SerializeToString)()
    assert await echoed(stream, "first") == "first"
    yield Renewable(channels, directory, files, clock, stream)
    await channels.close()
    await server.stop(0)


async def test_a_stream_outlives_the_certificates_that_it_was_opened_with(
    renewable: Renewable,
) -> None:
    for text in ("second", "third"):
        await renewable.renew()

        assert await echoed(renewable.stream, text) == text


async def test_a_stream_from_before_new_certificates_ends_once_its_peer_has_moved(
    renewable: Renewable,
) -> None:
    await renewable.renew()

    await renewable.directory.announce(Peer("broker", 0, "127.0.0.1:1"))
    renewable.clock.now_s = 1.0
    renewable.channels.doubt("broker", 0)
    await renewable.channels.to("broker", 0)

    with pytest.raises(Unavailable) as caught, raising_slatemq_errors():
        await renewable.stream.read()
    assert caught.value.reason == "PEER_MOVED"
