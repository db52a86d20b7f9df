"""Ctrl-C where no command is at work yet, or any more: it ends the process, and says nothing.

Commands themselves hear of it as KeyboardInterrupt, and may have something to bring to an end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT


def end_with(code: int) -> None:
    """From now on Ctrl-C ends the process at once, with that exit code, unless it is ignored."""

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
    """Ctrl-C ends the process meanwhile: modules that are half loaded cannot raise in order."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    end_with(EXIT_INTERRUPTED)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
