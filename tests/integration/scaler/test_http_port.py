"""The scaler's health and metrics, as a process of its own; no instance has to be there."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import ClientSession

from services.scaler.stubs import externalscaler_pb2
from services.scaler.stubs.externalscaler_pb2_grpc import ExternalScalerStub
from tests.integration.lone_service import running

pytestmark = pytest.mark.slow


async def test_it_measures_its_calls_where_it_has_a_port_for_that(tmp_path: Path) -> None:
    async with (
        running("scaler", tmp_path, "--http-port", "0") as addresses,
        ClientSession() as session,
    ):
        # Given a call that is refused
        async with grpc.aio.insecure_channel(addresses["address"]) as channel:
            stub: Any = ExternalScalerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.IsActive(externalscaler_pb2.ScaledObjectRef(name="worker"))

        # Then its metrics have it, and its health
        http = f"http://{addresses['http_address']}"
        async with session.get(f"{http}/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        async with session.get(f"{http}/metrics") as answer:
            text = await answer.text()

    calls = re.findall(r"^rpc_server_duration_milliseconds_count\{(.*)\} 1\.0$", text, re.M)
    status = 'rpc_response_status_code="INVALID_ARGUMENT"'
    assert ['rpc_method="IsActive"' in one and status in one for one in calls] == [True]
    assert re.search(rf'service_instance_id="{socket.gethostname()}/scaler-\d+"', text)
    assert re.search(r"^slatemq_serving 1\.0$", text, re.M)
    assert re.search(r"^process_memory_usage_bytes [1-9]", text, re.M)
