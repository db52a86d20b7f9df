"""Time limits end what waits for ever: a test on uvloop, and last of all its process."""

import asyncio
import os
import re
import signal
import threading
import tomllib
from pathlib import Path

import pytest

from tests.timed_uvloop import Loop

TESTS = Path(__file__).parents[1]


def test_no_limit_of_a_test_is_above_the_one_that_ends_its_process() -> None:
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    options = settings["tool"]["pytest"]["ini_options"]
    limits = [
        float(found)
        for path in TESTS.rglob("test_*.py")
        for found in re.findall(r"mark\.timeout\((\d+)\)", path.read_text())
    ]

    assert len(limits) > 3
    assert max(limits) < options["faulthandler_timeout"]


def test_a_limit_that_ends_amid_a_wait_ends_the_test() -> None:
    # Given a limit as pytest-timeout has it, but by another signal
    def end(*_: object) -> None:
        pytest.fail("Timeout (>0.1s)")

    before = signal.signal(signal.SIGUSR1, end)
    limit = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    limit.start()
    try:
        # When the test waits for ever, then it fails for that reason
        with (
            asyncio.Runner(loop_factory=Loop) as runner,
            pytest.raises(asyncio.CancelledError, match="Timeout"),
        ):
            runner.run(asyncio.Event().wait())
    finally:
        limit.join()
        signal.signal(signal.SIGUSR1, before)
