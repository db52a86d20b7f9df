"""The scaler's health and metrics, as a process of its own; no instance has to be there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import ClientSession

from services.scaler.stubs import externalscaler_pb2
from services.scaler.stubs.externalscaler_pb2_grpc import ExternalScalerStub

pytestmark = pytest.mark.slow

START_S = 60.0


def command(*arguments: str) -> list[str]:
    begin = [sys.executable, "-m", "services.scaler", "--endpoint", "127.0.0.1:1"]
    return [*begin, "--parent-pid", str(os.getpid()), *arguments]


@asynccontextmanager
async def running(folder: Path, *arguments: str) -> AsyncIterator[dict[str, str]]:
    """Its addresses."""
    ready = folder / "ready"
    process = await asyncio.create_subprocess_exec(*command("--ready-file", str(ready), *arguments))
    try:
        async with asyncio.timeout(START_S):
            while not ready.exists():
                assert process.returncode is None, "ended while starting"
                await asyncio.sleep(0.01)
        yield json.loads(ready.read_text())
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_it_measures_its_calls_where_it_has_a_port_for_that(tmp_path: Path) -> None:
    async with running(tmp_path, "--http-port", "0") as addresses, ClientSession() as session:
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
    assert ['rpc_method="IsActive"' in one and 'failed="true"' in one for one in calls] == [True]
    assert re.search(r"^slatemq_serving 1\.0$", text, re.M)
    assert re.search(r"^process_memory_usage_bytes [1-9]", text, re.M)


async def test_it_opens_no_such_port_unless_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as addresses:
        assert list(addresses) == ["address"]


async def test_a_port_that_is_taken_ends_the_start_and_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *command("--http-port", port), stderr=asyncio.subprocess.PIPE
        )
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert "cannot listen" in errors.decode()
    assert port in errors.decode()
