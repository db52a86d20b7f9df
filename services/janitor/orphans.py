"""When a payload object that nothing names may go: by the store's clock, of before all snapshots.

No commit names an object that is older than an hour. So what is older than a day when the snapshots
are begun, and is named in none of them, will never be named, however long they are read.
"""

from __future__ import annotations

import secrets
from typing import Final

from libs.storage.objects.small_objects import Objects

ORPHAN_AGE_MS: Final = 24 * 3600 * 1000
"""How old an object is by the store that nothing names, before it goes."""

_PROBES: Final = "janitor/probe"
_PROBE_AGE_MS: Final = 3600 * 1000


async def store_time_ms(objects: Objects) -> int:
    """The time by the store's own clock, which dates the objects."""
    path = f"{_PROBES}/{secrets.token_hex(16)}"
    await objects.put(path, b"")
    try:
        now_ms = await objects.modified_ms(path)
        for left in await objects.describe(_PROBES):  # by a process that was killed here
            if left.modified_ms < now_ms - _PROBE_AGE_MS:
                await objects.delete(left.path)
        return now_ms
    finally:
        await objects.delete(path)
