"""The console's health and metrics, as a process of its own; no instance has to be there."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from aiohttp import ClientSession

from tests.integration.lone_service import refused, running

pytestmark = pytest.mark.slow


async def test_it_measures_its_pages_where_it_has_a_port_for_that(tmp_path: Path) -> None:
    async with (
        running("console", tmp_path, "--http-port", "0") as addresses,
        ClientSession() as session,
    ):
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
    assert re.search(rf'service_instance_id="{socket.gethostname()}/console-\d+"', text)
    assert re.search(r"^slatemq_serving 1\.0$", text, re.M)
    assert re.search(r"^process_memory_usage_bytes [1-9]", text, re.M)
    assert re.search(r"^slatemq_console_streams 0\.0$", text, re.M)


async def test_it_names_variables_that_nothing_reads() -> None:
    environ = {"SLATEMQ_SESION_S": "60"}
    code, errors = await refused("console", "--tls-cert", "cert", environ=environ)
    assert code == 2
    assert "SLATEMQ_SESION_S (did you mean SLATEMQ_SESSION_S?)" in errors
