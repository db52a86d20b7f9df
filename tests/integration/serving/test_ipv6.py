"""Processes that listen on an address of IPv6, which may be given with brackets."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import ClientSession

from libs.serving.process.healthprobe import probe, probe_pages
from tests.integration.lone_service import running
from tests.integration.stack.processes import Service

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6"),
]


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_service_serves_grpc_and_http_there(tmp_path: Path, host: str) -> None:
    service = Service(tmp_path, "ingest", "--host", host, "--http-port", "0")
    try:
        await service.start()
        for address in (service.address, service.peer_address):
            assert address.startswith("[::1]:")
            assert await asyncio.to_thread(probe, address) == ""
        assert await health(service.http_address) == 200
    finally:
        await service.close()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_the_console_serves_its_pages_there(tmp_path: Path, host: str) -> None:
    async with running("console", tmp_path, "--host", host, "--http-port", "0") as addresses:
        assert await asyncio.to_thread(probe_pages, addresses["address"]) == ""
        assert await health(addresses["http_address"]) == 200


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_the_scaler_serves_there(tmp_path: Path, host: str) -> None:
    async with running("scaler", tmp_path, "--host", host, "--http-port", "0") as addresses:
        assert await asyncio.to_thread(probe, addresses["address"]) == ""
        assert await health(addresses["http_address"]) == 200


async def health(address: str) -> int:
    async with ClientSession() as session, session.get(f"http://{address}/health") as answer:
        return answer.status
