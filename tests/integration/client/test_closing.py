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
from tests.integration.client.peers import Directory


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
