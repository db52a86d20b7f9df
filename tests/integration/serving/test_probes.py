"""Watches of health, which anyone may open, as often as they like."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.access.principals import PLACE_RETRY_MS
from libs.serving import limits
from libs.serving.peers.channels import open_channel
from libs.serving.requests.gate import NewestGate
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import ResourceExhausted
from tests.integration.serving.echo_service import EchoService
from tests.integration.serving.test_server import running


async def watching(channel: grpc.aio.Channel) -> Any:
    """A watch of health that has begun."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=3_600)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    return watch


async def test_a_watch_too_many_ends_the_oldest_of_its_port_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "PROBE_STREAMS_MAX", 2)
    service = EchoService()
    async with running(service) as stack:
        await stack.until_healthy()
        peer_address = service.peer_address
        async with open_channel(peer_address) as peers:
            of_services = [await watching(peers) for _ in range(2)]
            first = await watching(stack.channel)
            second = await watching(stack.channel)

            # When others watch at the port for clients
            third = await watching(stack.channel)

            # Then the oldest one there ends, and knows why
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await first.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            problem = from_rpc_error(caught.value)
            assert isinstance(problem, ResourceExhausted)
            assert (problem.reason, problem.retry_after_ms) == ("TOO_MANY_CALLS", PLACE_RETRY_MS)
            assert not any(one.done() for one in (second, third, *of_services))
            # And those that their clients leave make room
            third.cancel()
            second.cancel()
            for _ in range(5):
                last = await watching(stack.channel)
                last.cancel()
            for watch in of_services:
                watch.cancel()


async def test_a_stream_that_is_closed_elsewhere_keeps_no_place() -> None:
    gate = NewestGate(1)

    async def stream() -> Any:
        with gate.place(None):
            yield 1
            yield 2

    async def begin() -> Any:
        opened = stream()
        await anext(opened)
        return opened

    # Given one that was begun by a task that has ended
    left = await asyncio.create_task(begin())

    # Then it neither counts, nor does its late end harm another one
    async with asyncio.timeout(60):
        other = stream()
        await anext(other)
        await left.aclose()
        assert await anext(other) == 2
        await other.aclose()
