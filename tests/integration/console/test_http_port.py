"""The console's health and metrics, as a process of its own; no instance has to be there."""

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

import pytest
from aiohttp import ClientSession

pytestmark = pytest.mark.slow

START_S = 60.0


def command(*arguments: str) -> list[str]:
    begin = [sys.executable, "-m", "services.console", "--endpoint", "127.0.0.1:1"]
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
        await process.wait()


async def test_it_measures_its_pages_where_it_has_a_port_for_that(tmp_path: Path) -> None:
    async with running(tmp_path, "--http-port", "0") as addresses, ClientSession() as session:
        pages, http = (f"http://{addresses[name]}" for name in ("address", "http_address"))
        for path in ("/login", "/static/console.css", "/absent"):
            async with session.get(pages + path) as answer:
                await answer.read()
        for method in ("PUT", "ANYTHING"):
            async with session.request(method, f"{pages}/login") as answer:
                await answer.read()
        async with session.get(f"{http}/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        async with session.get(f"{http}/metrics") as answer:
            text = await answer.text()
        async with session.get(f"{pages}/metrics") as answer:
            assert answer.status == 404

    counts = re.findall(r"^http_server_request_duration_seconds_count\{(.*)\} (.*)$", text, re.M)
    routes = {
        tuple(
            found[f"http_{name}"] for name in ("request_method", "route", "response_status_code")
        ): count
        for labels, count in counts
        if (found := dict(re.findall(r'(\w+)="([^"]*)"', labels)))
    }
    assert routes == {
        ("GET", "/login", "200"): "1.0",
        ("GET", "/static", "200"): "1.0",
        ("GET", "none", "404"): "1.0",
        ("_OTHER", "/login", "404"): "2.0",
    }
    assert re.search(r"^slatemq_serving 1\.0$", text, re.M)
    assert re.search(r"^process_memory_usage_bytes [1-9]", text, re.M)
    assert re.search(r"^slatemq_console_streams 0\.0$", text, re.M)


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
    assert f"cannot listen on 127.0.0.1:{port}" in errors.decode()


async def test_it_names_variables_that_nothing_reads() -> None:
    process = await asyncio.create_subprocess_exec(
        *command("--tls-cert", "cert"),
        env={**os.environ, "SLATEMQ_SESION_S": "60"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert "SLATEMQ_SESION_S (did you mean SLATEMQ_SESSION_S?)" in errors.decode()
