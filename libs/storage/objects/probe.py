"""Tests of a store before it is used: conditional writes, listings, and its clock.

SlateDB claims manifests and WAL objects by create-if-absent. With a store that ignores the
condition a fenced writer's commit could be confirmed and then lost, so it is refused at start. So
is one whose listings lag: SlateDB finds its newest manifest and the end of its WAL by listing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

from libs.storage.errors import ClockAhead, UnsafeStore
from libs.storage.objects.small_objects import Objects

MAX_AHEAD_MS: Final = 60_000
"""The clock of records never goes back, so one further ahead than this is refused."""


async def probe_store(objects: Objects, wall: Callable[[], float] = time.time) -> int:
    """By how many ms our clock is ahead of the store's; stores round down to whole seconds.

    Raises UnsafeStore or ClockAhead (do not start), or StoreUnavailable. Removes what it writes,
    which is random, so that an object left by an attempt whose response was lost is recognized as
    our own. `wall` returns seconds since the epoch.
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
        if path not in await objects.list("probe"):
            raise UnsafeStore(
                f"a listing does not show {path}, which was created before it: the store's "
                "listings lag, so an owner that starts could miss what was committed"
            )
        # Stores round times down to whole seconds, so we seem ahead by up to one.
        if ahead_ms > MAX_AHEAD_MS:
            raise ClockAhead(ahead_ms)
        return ahead_ms
    finally:
        await objects.delete(path)
