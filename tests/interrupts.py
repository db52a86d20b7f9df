"""Interrupting the main thread by a signal while it waits for the result of a future."""

from __future__ import annotations

import concurrent.futures
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def interrupts(error: type[BaseException]) -> Iterator[None]:
    """Within it, `interrupt` raises this in the main thread."""

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise error

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    """Interrupts the main thread, from another one, once it waits for a result."""
    waiter = threading.main_thread().ident
    assert waiter is not None
    while concurrent.futures.Future.result.__code__ not in _codes(waiter):
        time.sleep(0.001)
    signal.pthread_kill(waiter, signal.SIGUSR1)


def _codes(thread: int) -> Iterator[object]:
    """What a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
