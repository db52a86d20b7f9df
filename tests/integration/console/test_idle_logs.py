"""A connection that its server ends, since it is idle, leaves no line of gRPC in a log."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession

from tests.integration.lone_service import running

pytestmark = pytest.mark.slow

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

IDLE = b"connection idle"

FRAMES = b"".join(
    (
        bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),  # Settings that change nothing.
        bytes([0, 0, 8 + len(IDLE), 7, 0, 0, 0, 0, 0]),  # GOAWAY, as gRPC's own servers send it.
        bytes([0, 0, 0, 0, 0, 0, 0, 2]),
        IDLE,
    )
)


class IdleServer:
    """Ends each connection as an idle one. `ended` is set once a client has seen that."""

    def __init__(self) -> None:
        self.address = ""
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(PREFACE))
        writer.write(FRAMES)
        while await reader.read(1 << 16):
            pass
        self.ended.set()
        writer.close()


@asynccontextmanager
async def idle_server() -> AsyncIterator[IdleServer]:
    server = IdleServer()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        server.address = f"{host}:{port}"
        yield server


@pytest.mark.parametrize(
    ("environ", "is_asked_for"), [({}, False), ({"GRPC_VERBOSITY": "INFO"}, True)]
)
async def test_each_line_of_a_json_log_is_json_unless_lines_of_grpc_are_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    is_asked_for: bool,
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    errors = tmp_path / "errors"
    async with asyncio.timeout(60), idle_server() as server:
        given = ("--endpoint", server.address, "--log-format", "json", "--log-level", "debug")
        async with (
            running("console", tmp_path, *given, environ=environ, errors=errors) as addresses,
            ClientSession() as session,
        ):
            async with session.get(f"http://{addresses['address']}/processes") as answer:
                assert answer.status == 503
            await server.ended.wait()

    lines = errors.read_text().splitlines()
    others = [line for line in lines if not line.startswith("{")]
    assert len([json.loads(line) for line in lines if line not in others]) > 0
    assert any("Got goaway [2]" in line for line in others) == is_asked_for
    assert bool(others) == is_asked_for


async def test_a_command_says_nothing_of_a_connection_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    async with asyncio.timeout(60), idle_server() as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slatemq.cli", "queue", "ls", "--endpoint", server.address),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        await server.ended.wait()

    assert errors.startswith(b"slatemq: ")
    assert b"goaway" not in errors
