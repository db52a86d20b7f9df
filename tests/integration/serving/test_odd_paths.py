"""A call whose path is no text ends gRPC's server, and not the port."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.faults.hostile.floods import connected
from tests.faults.hostile.http2 import (
    END_HEADERS,
    HEADERS,
    Port,
    answer_of,
    block,
    call_fields,
    frame,
)
from tests.integration.broker.rig import running
from tests.integration.stack.processes import Service

AGAIN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


async def served(stub: Any) -> None:
    """Ask until there is an answer, as clients do: calls that wait for the server are cancelled."""
    async with asyncio.timeout(60):
        while True:
            try:
                request = health_pb2.HealthCheckRequest()
                answer = await stub.Check(request, timeout=60, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() not in AGAIN:
                    raise
            else:
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                return


@pytest.mark.parametrize("door", ["clients", "services"])
async def test_after_a_path_that_is_no_text_the_port_serves_on(tmp_path: Path, door: str) -> None:
    ingest = Service(tmp_path, "ingest")
    try:
        await ingest.start()
        address = ingest.address if door == "clients" else ingest.peer_address
        port = Port("ingest", door, address)
        for _ in range(3):
            # When such a call comes
            async with connected(port) as (reader, writer):
                path = block(call_fields(b"/\xff\xfe"))
                assert await writer.send(frame(HEADERS, END_HEADERS, 1, path))
                await answer_of(reader, 1)

            # Then others are served, by the same process
            async with grpc.aio.insecure_channel(address) as other:
                await served(health_pb2_grpc.HealthStub(other))
        assert ingest.process.returncode is None
    finally:
        await ingest.close()


async def test_no_method_is_registered_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    # The core writes into memory that an ended server has freed, for each method registered with it
    registered: list[str] = []
    monkeypatch.setattr(
        type(grpc.aio.server()),
        "add_registered_method_handlers",
        lambda _, service, methods: registered.append(service),
    )

    async with running() as rig:
        stub: Any = health_pb2_grpc.HealthStub(rig.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())

    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert registered == []
