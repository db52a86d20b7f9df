"""How a process treats its memory: what glibc holds on to, and how often Python looks for cycles.

glibc holds on to memory, and yet a service stays under 400 MB resident.

glibc gives each thread an arena of its own, up to eight for each core, and what is freed in one is
of no use to the others. SlateDB's threads allocate and free whole tables; measured while 200,000
messages of 1 KiB went through: 399 MB at the peak with the default, 346 MB with two arenas
(`python -m benchmarks.memory_probe` shows it for a running stack).

Python's collector of cycles walks the young objects after every 700 that were made, and messages in
hand are young objects, thousands of them, that are in no cycle: a broker spent a fifth of its time
there. A look after 50,000 costs a hundredth, and what is kept meanwhile by cycles is small: errors
and their frames, mostly. Measured with 100,000 messages of 100 B, claimed and acked: 52,000/s with
Python's thresholds, 60,000/s with a look after 10,000 or 20,000, 69,000/s after 50,000.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)


M_ARENA_MAX: Final = -8
ARENAS: Final = 2


def bound_arenas() -> bool:
    """Limit malloc's arenas; call it before threads start. Returns False where libc cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    done = mallopt is not None and mallopt(M_ARENA_MAX, ARENAS) == 1
    if not done:
        log.debug("this libc takes no bound on arenas")
    return done


YOUNG_MAX: Final = 50_000
"""Objects made, less those freed, before the collector looks at those made since."""

MIDDLE_EVERY: Final = 20
OLD_EVERY: Final = 10
"""A look at the old ones after 10 million: never for long under load, and soon enough for a leak
of a few objects an error."""


def calm_collector() -> None:
    """Let the garbage collector run more rarely, for processes that hold many messages."""
    gc.set_threshold(YOUNG_MAX, MIDDLE_EVERY, OLD_EVERY)


STEP_S: Final = 0.1
STEP_MIN: Final = 2_000
STEP_MAX: Final = 20_000
"""A look at so few young objects takes a millisecond or some: less than callers notice."""

PAUSE_SHARE: Final = 200
"""The pause after a look is at least so many times as long as the look. Old objects that are freed
count as young ones, so there may be many more young objects than the count says: messages."""


async def collect_in_steps(every_s: float = STEP_S) -> None:
    """Look at the young objects while they are few, for ever.

    Calls leave cycles, so that a process with few messages in memory reaches `YOUNG_MAX` by what
    they left, and that look, and freeing it all at once, holds up every call for 15 to 60 ms. Where
    many messages are in memory, there is seldom a moment with few young objects, and so hardly a
    look.
    """
    looks_count, took_s = 0, 0.0
    while True:
        await asyncio.sleep(max(every_s, took_s * PAUSE_SHARE))
        if not STEP_MIN <= gc.get_count()[0] <= STEP_MAX:
            continue
        looks_count += 1
        began_s = time.thread_time()
        gc.collect(0 if looks_count % MIDDLE_EVERY else 1)
        took_s = time.thread_time() - began_s


def keep_for_good() -> None:
    """Exempt all objects that exist now from garbage collection."""
    gc.collect()
    gc.freeze()


_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """The physical memory that this process takes; 0 where it is unknown, as on macOS."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


_UNLIMITED_BYTES: Final = 1 << 60
"""cgroup v1 means "no limit" by a limit from here on."""


def memory_limit_bytes(
    process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What the tightest cgroup of this process may take, as a container's; None: any amount.

    In a container the path of its group may be that of the machine, which is not to be seen there:
    the container's own group is at the root then.
    """
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = folder / path.lstrip("/")
        inside = [one for one in (own, *own.parents) if one.is_relative_to(folder)]
        limits += filter(None, (_limit_in(one / name) for one in inside))
    return min(limits, default=None)


def _limit_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None


_trim: Final[Callable[[int], int] | None] = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Returns to the system what is free in pieces; glibc alone has it. In a thread: it walks all that
is free, some milliseconds for each 100 MB."""

TRIM_BYTES: Final = 1 << 20
"""From here on what was freed is worth giving back: it is in pieces that nothing else fills."""

TRIM_S: Final = 1.0
"""Between what was freed and giving it back: under load it is taken again meanwhile."""


class Trimmer:
    """Returns memory to the system as soon as much was freed, which glibc would keep."""

    def __init__(self) -> None:
        self._freed_bytes = 0
        self._due: asyncio.TimerHandle | None = None

    def freed(self, size_bytes: int) -> None:
        """Note that this many bytes were freed, or are about to be."""
        self._freed_bytes += size_bytes
        if self._due is None and self._freed_bytes >= TRIM_BYTES and _trim is not None:
            self._due = asyncio.get_running_loop().call_later(TRIM_S, self._release)

    def _release(self) -> None:
        self._due = None
        self._freed_bytes = 0
        if _trim is not None:
            asyncio.get_running_loop().run_in_executor(None, _trim, 0)


RETURN_S: Final = 5.0
RETURN_S_MAX: Final = 40.0


async def return_memory(*, has_few_objects: bool = False, every_s: float = RETURN_S) -> None:
    """Return to the system, for ever, what gRPC, TLS, SlateDB and caches have freed.

    Tries every few seconds, and more rarely while that frees little. A process that has few objects
    looks for cycles before; others do that in small steps (`collect_in_steps`).
    """
    if _trim is None:
        return
    pause_s = every_s
    while True:
        await asyncio.sleep(pause_s)
        if has_few_objects:
            gc.collect()
        before_bytes = resident_bytes()
        await asyncio.to_thread(_trim, 0)
        is_worth_it = before_bytes - resident_bytes() >= TRIM_BYTES
        pause_s = every_s if is_worth_it else min(pause_s * 2, max(every_s, RETURN_S_MAX))
