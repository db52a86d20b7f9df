"""Rows found by their numbers: many near ones by one scan, the others one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, NamedTuple

from libs.storage.database.slate import Database
from libs.storage.errors import DamagedStore
from libs.storage.layout.ids import runs
from libs.storage.layout.keys import parse_payload_key, payload_key, payload_range
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.payload_packs import (
    PACK_MESSAGES,
    PACKED_MESSAGES_MIN,
    pack_key,
    pack_range,
    parse_pack_key,
)

RUN_MIN: Final = 4
"""Shorter runs of rows are read one by one: a scan begins in 300 µs, a row by itself takes 70."""


class Series(NamedTuple):
    """Rows of one kind, each under a number.

    Attributes:
        key: The key of the row with this number.
        span: The keys from one number to another, both included.
        parse: The number in a key.
        near: Numbers at most so far apart are read by one scan: a row costs 7 µs there.
        step: Numbers are at least so far apart.
    """

    key: Callable[[int], bytes]
    span: Callable[[int, int], KeyRange]
    parse: Callable[[bytes], int]
    near: int
    step: int


PAYLOADS: Final = Series(payload_key, payload_range, parse_payload_key, near=8, step=1)
"""Payloads with records of their own, by message ID."""

PACKS: Final = Series(
    pack_key, pack_range, parse_pack_key, near=2 * PACK_MESSAGES, step=PACKED_MESSAGES_MIN
)
"""Packs, by the ID of their first message; small log entries may have packs between large ones."""


async def read_rows(
    database: Database,
    series: Series,
    numbers: Iterable[int],
    unreadable: dict[int, DamagedStore] | None = None,
) -> AsyncIterator[list[tuple[int, bytes]]]:
    """The durable rows with these numbers, ascending, as far as there are any.

    Rows of a scan come as they are read, so that they need not all be in memory. Where a table is
    damaged, the others are read one by one, and the numbers of the damaged ones are `unreadable`,
    with the reasons; without it this raises DamagedStore.
    """
    strays: list[int] = []
    for run in runs(numbers, series.near):
        if len(run) < RUN_MIN:
            strays += run
            continue
        wanted = set(run)
        # There may be others between them.
        rows_max = (run[-1] - run[0]) // series.step + 1
        span = series.span(run[0], run[-1])
        left = run
        try:
            async for rows in database.scan(*span, limit=rows_max, durable=True):
                numbered = [(series.parse(key), value) for key, value in rows]
                yield [(number, value) for number, value in numbered if number in wanted]
                left = [number for number in left if number > numbered[-1][0]]
        except DamagedStore:
            if unreadable is None:
                raise
            yield await _read_singly(database, series, left, unreadable)
    try:
        values = await database.get_many(map(series.key, strays), durable=True)
    except DamagedStore:
        if unreadable is None:
            raise
        yield await _read_singly(database, series, strays, unreadable)
        return
    read = zip(strays, values, strict=True)
    yield [(number, value) for number, value in read if value is not None]


async def _read_singly(
    database: Database,
    series: Series,
    numbers: Iterable[int],
    unreadable: dict[int, DamagedStore],
) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    for number in numbers:
        try:
            value = await database.get(series.key(number), durable=True)
        except DamagedStore as error:
            unreadable[number] = error
            continue
        if value is not None:
            found.append((number, value))
    return found
