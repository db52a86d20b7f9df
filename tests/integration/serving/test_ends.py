"""Processes whose OTLP collector takes connections and answers nothing end all the same."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from libs.serving.process.exits import EXIT_CLEAN, EXIT_FAILED, EXIT_FENCED, EXIT_USAGE
from tests.forms import proof
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow
"""Each starts processes, some 0.7 s each."""

END_S: Final = 20.0
"""OpenTelemetry's SDK alone waits 30 s for the metrics here, and as long for spans."""


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of such a collector."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@asynccontextmanager
async def started(
    url: str, service: str, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """A process of a service, and what it logs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"services.{service}", "--port", "0"),
        *("--parent-pid", str(os.getpid()), *arguments),
        env={**os.environ, "SLATEMQ_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TIMEOUT": "3600"},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        yield process, process.stderr
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def logged(log: asyncio.StreamReader, text: str) -> None:
    """Read until a line has this text."""
    async with asyncio.timeout(WAIT_SECONDS):
        while text not in (line := (await log.readline()).decode()):
            assert line, f"it ended without {text}"


async def code_of(process: asyncio.subprocess.Process, log: asyncio.StreamReader) -> int:
    async with asyncio.timeout(END_S):
        await log.read()
        return await process.wait()


ROUTER = ("router", "--root=memory:///")
CONSOLE = ("console", "--endpoint=127.0.0.1:1")

TIMEOUT = ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s")
COMPRESSION = ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd")
BATCH_SIZE = ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000")


@pytest.mark.parametrize(
    ("service", "place", "variable", "value"),
    [
        (*ROUTER, *TIMEOUT),
        (*CONSOLE, *COMPRESSION),
        (*ROUTER, *BATCH_SIZE),
        *(proof(*CONSOLE, *TIMEOUT), proof(*ROUTER, *COMPRESSION), proof(*CONSOLE, *BATCH_SIZE)),
    ],
)
def test_a_wrong_variable_of_opentelemetry_is_named_as_a_wrong_setting(
    silent: str, service: str, place: str, variable: str, value: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--port", "0", place],
        env={**os.environ, "SLATEMQ_OTLP_ENDPOINT": silent, variable: value},
        stderr=subprocess.PIPE,
        check=False,
    )
    assert ended.returncode == EXIT_USAGE
    (line,) = [one for one in ended.stderr.decode().splitlines() if "telemetry cannot" in one]
    assert variable in line
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("service", "arguments"),
    [
        ("ingest", ["--root"]),
        ("scaler", ["--endpoint", "127.0.0.1:1"]),
        ("console", ["--endpoint", "127.0.0.1:1"]),
    ],
)
async def test_a_process_that_is_asked_to_stop_does_not_wait_for_its_collector(
    tmp_path: Path, silent: str, service: str, arguments: list[str]
) -> None:
    if service == "ingest":
        arguments = [*arguments, tmp_path.as_uri()]
    async with started(silent, service, *arguments) as (process, log):
        await logged(log, " serving ")
        process.terminate()

        assert await code_of(process, log) == EXIT_CLEAN


async def test_a_process_that_fails_does_not_wait_for_its_collector(
    tmp_path: Path, silent: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["--root", tmp_path.as_uri(), "--http-port", port]
        async with started(silent, "ingest", *arguments) as (process, log):
            await logged(log, f"HTTP on 127.0.0.1:{port}")

            assert await code_of(process, log) == EXIT_FAILED


async def test_a_process_that_is_fenced_does_not_wait_for_its_collector(
    tmp_path: Path, silent: str
) -> None:
    root = ["--root", tmp_path.as_uri()]
    async with started(silent, "ingest", *root) as (first, log):
        await logged(log, " serving ")
        async with started(silent, "ingest", *root):
            await logged(log, "another process owns the shard now")

            assert await code_of(first, log) == EXIT_FENCED
