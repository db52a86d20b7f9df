"""Ctrl-C before a command starts and after it ends: it ends the process without a message.

Commands themselves get KeyboardInterrupt, and may have work to finish.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT


def end_with(code: int) -> None:
    """From now on Ctrl-C ends the process with this exit code, unless it is ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)


def raised() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ending() -> Iterator[None]:
    """Ctrl-C ends the process meanwhile: a half-loaded module cannot handle KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    end_with(EXIT_INTERRUPTED)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
