"""Calls to each process that are under way while their client is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

import slatemq
from slatemq.errors import Unavailable
from slatemq.v1 import topology_pb2_grpc
from tests.integration.client.peers import Broker, Directory, Instance
from tests.integration.waiting import eventually


class Silent(grpc.GenericRpcHandler):
    """Takes every call, and never answers."""

    def __init__(self) -> None:
        self.asked, self._never = asyncio.Event(), asyncio.Event()

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._wait)

    async def _wait(self, request: bytes, context: Any) -> bytes:
        self.asked.set()
        await self._never.wait()
        return b""


@pytest.mark.parametrize("name", ["status", "events_status", "examine", "get_callers"])
async def test_a_call_to_each_process_says_that_the_client_was_closed(name: str) -> None:
    directory, silent, server = Directory(), Silent(), grpc.aio.server()
    topology_pb2_grpc.add_TopologyServiceServicer_to_server(directory, server)
    server.add_generic_rpc_handlers((silent,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    for service in ("ingests", "brokers", "routers", "janitors"):
        directory.put(service, 0, address)
    await server.start()
    client = slatemq.connect(address)
    call: asyncio.Task[object] = asyncio.create_task(getattr(client, name)())
    await silent.asked.wait()

    await client.close()
    [error] = await asyncio.gather(call, return_exceptions=True)
    await server.stop(0)

    assert isinstance(error, Unavailable)
    assert error.reason == "CLIENT_CLOSED"


class Releasing(Broker):
    """Releases when it is to.

    Attributes:
        releases: Nacks wait for it before they take effect.
        nacks: How many were asked for.
    """

    nacks = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.releases = asyncio.Event()

    async def Nack(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.nacks += 1
        await self.report()
        await self.releases.wait()
        return await super().Nack(request, context)


@pytest.mark.parametrize("kind", ["messages", "batches"])
async def test_a_consumer_whose_closing_is_cancelled_gives_back_what_was_not_taken(
    kind: str,
) -> None:
    make: Any = Releasing
    broker = make()
    async with Instance(broker=broker) as instance, slatemq.connect(instance.endpoint) as client:
        # Given a consumer with messages that were not taken
        broker.available.extend((b"%d" % number, 0) for number in range(4))
        consumer: Any = (
            client.consume("q") if kind == "messages" else client.consume_batches("q", 2)
        )
        await anext(consumer)
        held = consumer._buffer if kind == "messages" else consumer._ready
        await eventually(lambda: len(held) == (3 if kind == "messages" else 1))

        # When the task is cancelled that closes it
        closing = asyncio.create_task(consumer.close())
        await broker.until(lambda: broker.nacks)
        closing.cancel()
        await asyncio.wait([closing])
        broker.releases.set()

        # Then they go back all the same, and closing it again waits for that
        await consumer.close()
        assert {(payload, release) for payload, _, release in broker.nacked} == (
            {(b"1", True), (b"2", True), (b"3", True)}
            if kind == "messages"
            else {(b"2", True), (b"3", True)}
        )
