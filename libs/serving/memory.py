"""Keeps glibc from holding on to memory: a service stays under 400 MB resident.

glibc gives each thread an arena of its own, up to eight for each core, and what is freed in one is
of no use to the others. SlateDB's threads allocate and free whole tables; measured while 200,000
messages of 1 KiB went through: 399 MB at the peak with the default, 346 MB with two arenas
(`python -m benchmarks.memory_probe` shows it for a running stack).
"""

from __future__ import annotations

import ctypes
import logging
from typing import Final

log = logging.getLogger(__name__)


M_ARENA_MAX: Final = -8
ARENAS: Final = 2


def bound_arenas() -> bool:
    """Limits the arenas of this process; call it before threads start. False where libc cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    done = mallopt is not None and mallopt(M_ARENA_MAX, ARENAS) == 1
    if not done:
        log.debug("this libc takes no bound on arenas")
    return done
