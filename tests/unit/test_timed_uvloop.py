"""A time limit ends a test on uvloop that waits for what never comes."""

import asyncio
import os
import signal
import threading

import pytest

from tests.timed_uvloop import Loop


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
