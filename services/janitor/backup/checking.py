"""Reads copies again: a store may change bits of one, and keep its size.

Each backup checks a part of the copies that the one before it has, another part each time; what has
rotted is copied again. `backup verify` checks all copies of one backup.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import xxhash

from libs.storage.errors import ObjectNotFound
from libs.storage.objects.digests import stored_digest
from libs.storage.objects.small_objects import Objects
from services.janitor.backup.copying import each

PARTS: Final = 30
"""So many backups read all copies once: at one each six hours that takes a week. What they read is
3% each time of what restores read, and of what some stores charge for."""


def in_part(stored: str, turn_number: int) -> bool:
    """Whether the backup with the turn of this number checks this copy."""
    return xxhash.xxh3_64_intdigest(stored.encode()) % PARTS == turn_number % PARTS


async def rotten(
    objects: Objects,
    digests: Mapping[str, str],
    report: Callable[[int, int], None],
    cancelled: threading.Event,
) -> list[str]:
    """The paths of those that do not have the digest that they should have.

    One that is gone is passed over. Raises StoreUnavailable, JobCancelled.
    """
    found: list[str] = []

    async def check(path: str) -> None:
        try:
            for _ in range(2):  # A store may give a part of an object that is whole.
                if await stored_digest(objects, path) == digests[path]:
                    return
        except ObjectNotFound:
            return
        found.append(path)

    await each([*digests], check, report, cancelled)
    return sorted(found)


async def digests_of(
    objects: Objects,
    paths: Sequence[str],
    report: Callable[[int, int], None],
    cancelled: threading.Event,
) -> dict[str, str]:
    """The digests of copies as they are. Raises ObjectNotFound, StoreUnavailable, JobCancelled."""
    found: dict[str, str] = {}

    async def read(path: str) -> None:
        found[path] = await stored_digest(objects, path)

    await each(paths, read, report, cancelled)
    return found
