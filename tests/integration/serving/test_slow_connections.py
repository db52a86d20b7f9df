"""A server that is far away, or busy, takes a while to answer a new connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from libs.serving import limits
from slatemq._rpc.peers import Peers

SLOW_S = 0.4


@asynccontextmanager
async def slowly(port: int) -> AsyncIterator[str]:
    """The address of a server on this port whose first answer on each connection takes a while."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(SLOW_S)
        behind_reader, behind = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(
                pass_on(reader, behind), pass_on(behind_reader, writer), return_exceptions=True
            )
        finally:
            behind.close()
            writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("who", ["client", "service"])
async def test_it_is_waited_for(who: str) -> None:
    # Given a server that is slow to answer connections
    server = grpc.aio.server()
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)

    async with slowly(port) as address:
        # When it is called for the first time
        peers = Peers([address])
        channel = (
            peers.at(address)
            if who == "client"
            else grpc.aio.insecure_channel(address, options=limits.channel_options())
        )
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)

        # Then the connection comes about
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await channel.close()
        await peers.close()
    await server.stop(0)
