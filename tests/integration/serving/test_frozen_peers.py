"""A peer that stands still: its connection stays open, and nothing is answered any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from libs.serving import limits
from slatemq._rpc import peers
from tests.integration.serving.echo_service import METHODS, EchoServicer
from tests.integration.waiting import WAIT_SECONDS

QUICKER: Final = 50
"""The times of keepalive are divided by this, and by nothing else: 30 s become 0.6 s."""

KEEPALIVE: Final = {
    "grpc.keepalive_time_ms",
    "grpc.keepalive_timeout_ms",
    "grpc.http2.ping_timeout_ms",
}

BOUND_S: Final = 30
"""Fifty times as long as it takes, and half of what gRPC waits for if one of the times is left out.
"""

Options = list[tuple[str, int]]


def quicker(options: Options) -> Options:
    return [
        (name, value // QUICKER if name in KEEPALIVE else value)
        for name, value in options
        if name != "grpc.http2.min_recv_ping_interval_without_data_ms"
    ] + [("grpc.http2.min_recv_ping_interval_without_data_ms", 1)]


@asynccontextmanager
async def freezing(port: int) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An address that leads to this port, until the event is set: then nothing passes any more."""
    frozen = asyncio.Event()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not frozen.is_set():
                writer.write(data)
                await writer.drain()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(
                forward(reader, behind), forward(behind_reader, writer), return_exceptions=True
            )
        finally:
            behind.close()
            writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", frozen


async def idle_stream(channel: grpc.aio.Channel, servicer: EchoServicer) -> Any:
    """A stream that is open and idle; another one where a stall of this process ended the first."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            servicer.waiting.clear()
            servicer.cancelled.clear()
            call: Any = channel.unary_stream(
                METHODS["us"], StringValue.SerializeToString, StringValue.FromString
            )(StringValue(value="first wait"), wait_for_ready=True)
            with suppress(grpc.aio.AioRpcError):
                assert await call.read() == StringValue(value="first")
                while not (servicer.waiting.is_set() or call.done()):
                    await asyncio.sleep(0.001)
            if not call.done():
                return call
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "options", [limits.channel_options(), peers._OPTIONS], ids=["service", "client"]
)
async def test_a_stream_from_a_frozen_peer_ends_at_either_side_by_keepalive(
    options: Options,
) -> None:
    # Given a stream that is open and idle
    server = grpc.aio.server(options=quicker(limits.server_options()))
    servicer = EchoServicer()
    servicer.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with (
        freezing(port) as (address, frozen),
        grpc.aio.insecure_channel(address, options=quicker(options)) as channel,
    ):
        call = await idle_stream(channel, servicer)

        # When nothing comes through any more, though the connection is open
        frozen.set()

        # Then the one who reads learns of it, and so does the one who serves
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            await servicer.cancelled.wait()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


@pytest.mark.parametrize(
    "options",
    [limits.channel_options(), limits.server_options(), peers._OPTIONS],
    ids=["service", "server", "client"],
)
def test_a_frozen_peer_is_found_within_30_s(options: Options) -> None:
    found = dict(options)
    assert found["grpc.keepalive_time_ms"] + found["grpc.http2.ping_timeout_ms"] <= 30_000
    assert found["grpc.keepalive_timeout_ms"] == found["grpc.http2.ping_timeout_ms"]
