"""Every service on its HTTP port, as a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from aiohttp import ClientSession

from tests.integration.stack.processes import Service

pytestmark = pytest.mark.slow
"""Each starts a process, 0.8 s."""


@pytest.mark.parametrize("name", ["ingest", "broker", "router", "janitor"])
async def test_every_service_shows_its_health_and_its_metrics(tmp_path: Path, name: str) -> None:
    service = Service(tmp_path, name, "--http-port", "0")
    try:
        await service.start()
        async with ClientSession(f"http://{service.http_address}") as session:
            async with session.get("/health") as answer:
                assert (answer.status, await answer.json()) == (200, {"status": "ok"})
            async with session.get("/metrics") as answer:
                text = await answer.text()
        assert service.http_address.startswith("127.0.0.1:")
        assert f'service_name="slatemq-{name}"' in text
        assert f'service_instance_id="{socket.gethostname()}/{name}-0"' in text
        assert re.search(r"^slatemq_serving 1\.0$", text, re.MULTILINE)
        if name in ("ingest", "broker"):
            assert re.search(r"^slatemq_store_waiting_milliseconds \d", text, re.MULTILINE)
    finally:
        await service.close()


async def test_a_port_that_is_taken_ends_the_start_and_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.ingest", "--root", tmp_path.as_uri()),
            *("--http-port", port, "--parent-pid", str(os.getpid())),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert f"HTTP on 127.0.0.1:{port}" in errors.decode()
