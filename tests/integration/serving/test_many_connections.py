"""More connections than a process may have files."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from slatemq.v1 import ingest_pb2, ingest_pb2_grpc
from tests.integration.waiting import eventually

FILES = 256
CONNECTIONS = 2 * FILES


@asynccontextmanager
async def ingest(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    """An ingest that may have few files open, and its addresses."""
    ready = folder / "ready"
    command = ["sh", "-c", f'ulimit -n {FILES} && exec "$0" "$@"', sys.executable]
    command += ["-m", "services.ingest", "--root", (folder / "data").as_uri()]
    command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid()), "--http-port", "0"]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await eventually(ready.exists)
        yield process, json.loads(ready.read_text())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("port", ["address", "peer_address", "http_address"])
async def test_connections_that_say_nothing_leave_files_for_the_store_and_end(
    tmp_path: Path, port: str
) -> None:
    async with ingest(tmp_path) as (process, addresses):
        # Given more connections than there may be files
        host, _, number = addresses[port].rpartition(":")
        with ExitStack() as opened:
            for _n in range(CONNECTIONS):
                opened.enter_context(socket.create_connection((host, int(number))))

            # When a client publishes, for which the store needs files
            address = addresses["peer_address" if port == "address" else "address"]
            async with grpc.aio.insecure_channel(address) as other:
                stub: Any = ingest_pb2_grpc.IngestServiceStub(other)
                for _n in range(20):
                    await publish(stub)

            # Then it is stored; and the port itself has room again soon
            address = addresses["address" if port == "http_address" else port]
            async with grpc.aio.insecure_channel(address) as same:
                await publish(ingest_pb2_grpc.IngestServiceStub(same))
        assert process.returncode is None


async def publish(stub: Any) -> None:
    runs = [ingest_pb2.PublishRun(payloads=[b"x" * 100_000])]
    answer = await stub.Publish(
        ingest_pb2.PublishRequest(runs=runs), timeout=60, wait_for_ready=True
    )
    assert len(answer.message_ids) == 1
