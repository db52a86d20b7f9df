"""The port for health and metrics of a console or scaler, which has it where it is asked for."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.integration.lone_service import refused, running

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("service", ["console", "scaler"])]


async def test_it_opens_no_such_port_unless_asked(service: str, tmp_path: Path) -> None:
    async with running(service, tmp_path) as addresses:
        assert list(addresses) == ["address"]


async def test_a_port_that_is_taken_ends_the_start_and_is_named(service: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, errors = await refused(service, "--http-port", port)
    assert code == 1
    assert re.search(rf"cannot listen.*127\.0\.0\.1.*{port}", errors)
