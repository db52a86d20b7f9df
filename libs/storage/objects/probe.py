"""Two questions to a store before it is trusted: does it keep its promises, and what time is it.

SlateDB claims manifests and WAL objects by create-if-absent. A store that ignores the condition
lets a fenced writer's commit be confirmed and then lost, so such a store is refused at start.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

from libs.storage.errors import ClockAhead, UnsafeStore
from libs.storage.objects.small_objects import Objects

__all__ = ["MAX_AHEAD_MS", "probe_store"]

MAX_AHEAD_MS: Final = 60_000
"""A clock further ahead than this would stamp records that no later process may follow."""


async def probe_store(objects: Objects, wall: Callable[[], float] = time.time) -> None:
    """Raises UnsafeStore, ClockAhead (both: do not start) or StoreUnavailable; else all is well.

    Leaves nothing behind. `wall` gives seconds since the epoch. Repeatable: what is written is
    random, so the object that a try with a lost answer left is recognized as our own.
    """
    path = f"probe/{secrets.token_hex(16)}"
    first, second = secrets.token_bytes(16), secrets.token_bytes(16)
    before_ms = int(wall() * 1000)
    if not await objects.put_if_absent(path, first):
        raise UnsafeStore(
            f"the store says that {path}, a fresh random name, exists already with other bytes"
        )
    try:
        ahead_ms = before_ms - await objects.modified_ms(path)
        if await objects.put_if_absent(path, second) or await objects.get(path) != first:
            raise UnsafeStore(
                "the store overwrote an object that was to be created only if absent: it ignores "
                "If-None-Match, so two writers could both believe that they own a database"
            )
        # Stores round their times down to whole seconds, which makes us look ahead by up to one.
        if ahead_ms > MAX_AHEAD_MS:
            raise ClockAhead(ahead_ms)
    finally:
        await objects.delete(path)
