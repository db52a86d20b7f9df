"""Time and chance of a simulated world, in place of the machine's.

`install` replaces the functions of `time`, `os` and `random` that the services read clocks and
draw chances with. Call it before anything of the services is imported: default arguments such as
`clock=time.monotonic` are bound then. It cannot be undone: a simulation has a process of its own.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final, Protocol

BEGIN_S: Final = 1_750_000_000.0
"""The wall clock of a world that begins, in seconds since the epoch."""

READING_NS: Final = 2_000
"""What reading the processor's clock takes: work that looks at it sees time pass."""


class Clock(Protocol):
    """The clocks of one machine."""

    def wall_s(self) -> float:
        """Seconds since the epoch; may jump."""

    def monotonic_s(self) -> float:
        """Seconds since the world began."""


class _NoMachine:
    """The clocks of code that runs on no machine of the world."""

    def wall_s(self) -> float:
        return BEGIN_S

    def monotonic_s(self) -> float:
        return 0.0


CLOCK: Final[ContextVar[Clock]] = ContextVar("clock")
"""The clocks of the machine that the running code is on."""

_NO_MACHINE: Final = _NoMachine()

_WORK_CLOCKS: Final = ("perf_counter", "thread_time", "process_time")
"""What the services measure their own work with: no reading may tell of this machine's load."""

_work_ns = 0


def _work_clock_ns() -> int:
    """Time that the running code has taken: it grows with each look, as no loop's time does."""
    global _work_ns
    _work_ns += READING_NS
    return _work_ns


def install(seed: str) -> None:
    """Give this process the clocks of `CLOCK`, and chances that follow from `seed`."""
    random.seed(f"{seed}/services")
    drawn = random.Random(f"{seed}/secrets")

    def urandom(size: int, /) -> bytes:
        return drawn.randbytes(size)

    replaced: dict[str, Callable[..., object]] = {
        "time": lambda: CLOCK.get(_NO_MACHINE).wall_s(),
        "time_ns": lambda: int(CLOCK.get(_NO_MACHINE).wall_s() * 1e9),
        "monotonic": lambda: CLOCK.get(_NO_MACHINE).monotonic_s(),
        "monotonic_ns": lambda: int(CLOCK.get(_NO_MACHINE).monotonic_s() * 1e9),
        "clock_gettime": lambda _: CLOCK.get(_NO_MACHINE).monotonic_s(),
        "clock_gettime_ns": lambda _: int(CLOCK.get(_NO_MACHINE).monotonic_s() * 1e9),
        **{name: lambda: _work_clock_ns() / 1e9 for name in _WORK_CLOCKS},
        **{f"{name}_ns": _work_clock_ns for name in _WORK_CLOCKS},
    }
    for name, function in replaced.items():
        setattr(time, name, function)
    os.urandom = urandom
    # What `secrets` and SystemRandom draw from.
    random._urandom = urandom  # type: ignore[attr-defined]
    # The memory of this process, and its processor, say nothing of the world's machines.
    memory: Any = import_module("libs.serving.process.memory")
    memory.resident_bytes = lambda: 0
    change_pace: Any = import_module("services.broker.shard.change_pace")
    change_pace.thread_busy_ns = lambda: 0
