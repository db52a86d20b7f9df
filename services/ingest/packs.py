"""Reading payload packs by the IDs of their first messages: many near ones by one scan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from libs.storage.payload_packs import (
    PACK_MESSAGES,
    PACKED_MESSAGES_MIN,
    pack_key,
    pack_range,
    parse_pack_key,
)
from libs.storage.slate import Database

__all__ = ["RUN_MIN", "read_packs", "runs"]

RUN_MIN: Final = 4
"""Shorter runs of rows are read one by one: a scan begins in 300 µs, a row by itself takes 70."""

_NEAR: Final = 2 * PACK_MESSAGES
"""Packs whose first IDs are at most so far apart are read by one scan."""

PACKS_AT_ONCE: Final = 64
"""Read by one scan at most, 4 MiB: whoever wants more asks for some at a time."""


async def read_packs(database: Database, first_ids: Iterable[int]) -> dict[int, bytes]:
    """The durable packs with these first IDs, ascending, as far as there are any."""
    found: dict[int, bytes] = {}
    strays: list[int] = []
    for run in runs(first_ids, _NEAR):
        if len(run) < RUN_MIN:
            strays += run
            continue
        wanted = set(run)
        # Small entries between them may have packs of their own.
        rows_max = (run[-1] - run[0]) // PACKED_MESSAGES_MIN + 1
        async for rows in database.scan(*pack_range(run[0], run[-1]), limit=rows_max, durable=True):
            packs = ((parse_pack_key(key), value) for key, value in rows)
            found.update((first_id, value) for first_id, value in packs if first_id in wanted)
    values = await database.get_many(map(pack_key, strays), durable=True)
    read = zip(strays, values, strict=True)
    return found | {first_id: stray for first_id, stray in read if stray is not None}


def runs(numbers: Iterable[int], near: int) -> Iterator[list[int]]:
    """Ascending numbers, cut where two are further apart than `near`."""
    run: list[int] = []
    for number in numbers:
        if run and number - run[-1] > near:
            yield run
            run = []
        run.append(number)
    if run:
        yield run
