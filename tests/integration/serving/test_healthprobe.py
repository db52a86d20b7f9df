"""The probe of container health checks, against real servers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from libs.serving.process import healthprobe
from libs.serving.process.healthprobe import probe
from tests.acceptance.local_stack import REPOSITORY

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


TRIES = 5
"""A program waits two seconds for a server, and a machine may stand still for as long."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthprobe, "DEADLINE_SECONDS", 60.0)


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, health.aio.HealthServicer]]:
    servicer = health.aio.HealthServicer()
    running = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    yield f"127.0.0.1:{port}", servicer
    await running.stop(0)


async def _probed(address: str) -> str:
    return await asyncio.to_thread(probe, address)


async def test_a_server_is_healthy_while_it_says_that_it_serves(
    server: tuple[str, health.aio.HealthServicer],
) -> None:
    address, servicer = server
    for status, said in ((SERVING, ""), (NOT_SERVING, f"{address}: NOT_SERVING"), (SERVING, "")):
        await servicer.set("", status)
        assert await _probed(address) == said


async def test_many_probes_at_once_are_answered(
    server: tuple[str, health.aio.HealthServicer],
) -> None:
    address, servicer = server
    await servicer.set("", SERVING)
    assert await asyncio.gather(*(_probed(address) for _ in range(20))) == [""] * 20


async def test_a_server_without_health_or_without_grpc_or_none_at_all_is_not_healthy() -> None:
    bare = grpc.aio.server()
    port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    assert await _probed(f"127.0.0.1:{port}") == f"127.0.0.1:{port}: the server refused the call"
    await bare.stop(0)

    async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    web = await asyncio.start_server(answer_http, "127.0.0.1", 0)
    async with web:
        assert await _probed(f"127.0.0.1:{web.sockets[0].getsockname()[1]}") != ""

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert "refused" in await _probed(f"127.0.0.1:{closed.getsockname()[1]}")


async def test_the_command_says_why_and_imports_no_grpc(
    server: tuple[str, health.aio.HealthServicer],
) -> None:
    address, servicer = server
    await servicer.set("", SERVING)
    # As in the Dockerfile.
    program = "libs/serving/process/healthprobe.py"
    command = [sys.executable, "-X", "importtime", "-S", "-E", program]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )

    for _ in range(TRIES):
        healthy = await asyncio.to_thread(run, address)
        if healthy.returncode == 0:
            break
    assert healthy.returncode == 0
    assert "asyncio" not in healthy.stderr
    assert "grpc" not in healthy.stderr
    unreachable = await asyncio.to_thread(run, "127.0.0.1:1")
    assert unreachable.returncode == 1
    assert "127.0.0.1:1: " in unreachable.stderr


async def test_alive_is_a_server_that_answers_whether_it_serves_or_not(
    server: tuple[str, health.aio.HealthServicer],
) -> None:
    address, servicer = server
    program = str(REPOSITORY / "libs/serving/process/healthprobe.py")
    for status in (NOT_SERVING, SERVING):
        await servicer.set("", status)
        for _ in range(TRIES):
            probing = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-E", program, "--alive", address
            )
            if await probing.wait() == 0:
                break
        assert probing.returncode == 0

    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"127.0.0.1:{free.getsockname()[1]}"
    probing = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", program, "--alive", nowhere, stderr=subprocess.PIPE
    )
    assert await probing.wait() == 1
