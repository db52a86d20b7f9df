"""Plans a scan: which keys of which snapshots hold what is wanted, cut into pieces of a like size.

Planning reads the state records of queues and a few rows for their places, never the lists.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Container, Iterator
from dataclasses import dataclass, replace
from typing import Final

from libs.storage.arrow.queues import QueueShard
from libs.storage.database.log_positions import position_before
from libs.storage.database.queue_pairs import refuse_unpaired
from libs.storage.database.queue_ranges import (
    NumberRange,
    active_runs,
    archived_run,
    attempts_run,
    done_run,
    failed_run,
    log_run,
    pack_run,
    payload_run,
)
from libs.storage.database.snapshots import BATCH_ROWS_MAX, SnapshotReader
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.keys import (
    LAST_NUMBER,
    config_key,
    config_range,
    parse_config_key,
    parse_queue_state_key,
    queue_state_key,
    queue_state_range,
)
from libs.storage.layout.own_keys import LOG_BOUNDS_KEY
from libs.storage.records.configs import QueueConfigRecord, decode_config
from libs.storage.records.log_bounds import decode_log_bounds
from libs.storage.records.payload_packs import PACK_MESSAGES
from libs.storage.records.states import QueueStateRecord, decode_queue_state
from services.janitor.snapshots import SnapshotName
from services.janitor.spark.tables import Bucketed, Table
from services.janitor.spark.wanted import RowFilter
from slatemq._grouping import groups_of

PIECE_ROWS: Final = 50_000
"""Messages for which a task of its own pays: a task costs some ten milliseconds."""

PROBES_AT_ONCE: Final = 32

PACKS_AT_ONCE: Final = BATCH_ROWS_MAX // PACK_MESSAGES
"""As many messages as of one record each: small packs may be followed by large ones, and 64 KiB may
lie in a hundred bytes."""


@dataclass(frozen=True)
class PlannedRange:
    """A range of keys with about `message_count` messages; a read has at most `rows_max` rows."""

    run: NumberRange
    of: Bucketed
    message_count: int
    rows_max: int = BATCH_ROWS_MAX


@dataclass(frozen=True)
class PlannedRead:
    name: SnapshotName
    parts: tuple[PlannedRange, ...]


async def plan(
    reader: SnapshotReader,
    name: SnapshotName,
    table: Table,
    wanted: RowFilter,
    pieces_max: int,
    moved: Container[str] = (),
) -> list[PlannedRead]:
    """At most `pieces_max` pieces, with all that is wanted of a table in one snapshot.

    `moved` are queues that have moved away.
    """
    if table.service == "ingest":
        parts = [part async for part in _ingest_parts(reader, name, table, wanted)]
    else:
        parts = [
            part
            for queue, _, state in await read_queues(reader, wanted, moved)
            for part in _queue_parts(QueueShard(queue, name.shard), table, state, wanted)
        ]
    total = sum(part.message_count for part in parts)
    target = max(math.ceil(total / pieces_max), PIECE_ROWS)
    cut: list[PlannedRange] = []
    for part in parts:
        cut += await _cut(reader, part, target)
    together = groups_of(cut, lambda part: part.message_count, target * 5 // 4)
    return [PlannedRead(name, tuple(some)) for some in together]


async def read_queues(
    reader: SnapshotReader, wanted: RowFilter, moved: Container[str]
) -> list[tuple[str, QueueConfigRecord, QueueStateRecord]]:
    """The wanted queues that exist; queues named by the filter are looked up, and no others.

    Those that have moved away do not exist here any more. Raises DamagedStore where a queue has
    lost one of its records: without it, its messages would count as those of no queue.
    """
    configs: dict[str, QueueConfigRecord] = {}
    states: dict[str, QueueStateRecord] = {}
    if wanted.queues is None:
        async for rows in reader.scan(*config_range()):
            configs.update((parse_config_key(key), decode_config(value)) for key, value in rows)
        async for rows in reader.scan(*queue_state_range()):
            states.update(
                (parse_queue_state_key(key), decode_queue_state(value)) for key, value in rows
            )
    else:
        for queue in sorted(filter(None, wanted.queues)):
            config = await reader.get(config_key(queue))
            state = await reader.get(queue_state_key(queue))
            if config is not None:
                configs[queue] = decode_config(config)
            if state is not None:
                states[queue] = decode_queue_state(state)
    refuse_unpaired(configs, states)
    return [
        (queue, config, states[queue]) for queue, config in configs.items() if queue not in moved
    ]


async def _ingest_parts(
    reader: SnapshotReader, name: SnapshotName, table: Table, wanted: RowFilter
) -> AsyncIterator[PlannedRange]:
    of, begin = Bucketed(QueueShard("", name.shard)), await _log_begin(reader)
    if table.name == "payloads":
        async for part in _payload_parts(reader, of, begin, wanted):
            yield part
        return
    whole = await _tight(reader, log_run(begin))
    if whole is None:
        return
    first, last = whole.first, whole.last
    if wanted.first_id is not None and wanted.first_id > first:
        # An entry's IDs go up to that of the next one: the last entry up to here may have it.
        until = log_run(first, min(wanted.first_id, LAST_NUMBER))
        first = await _number(reader, until, last=True) or first
    if wanted.last_id is not None:
        last = min(last, wanted.last_id)
    if wanted.first_ms is not None:
        before = await position_before(reader, whole.last, wanted.first_ms, whole.first)
        first = max(first, before + 1)
    if wanted.last_ms is not None:
        until_ms = wanted.last_ms + 1
        last = min(last, await position_before(reader, whole.last, until_ms, whole.first))
    if first <= last:
        run = await _tight(reader, log_run(first, last))
        if run is not None:
            yield PlannedRange(run, of, run.last - run.first + 1)


async def _payload_parts(
    reader: SnapshotReader, of: Bucketed, begin: int, wanted: RowFilter
) -> AsyncIterator[PlannedRange]:
    """The payloads with records of their own, then those in packs."""
    first_id = wanted.first_id or 0
    last_id = MAX_MESSAGE_ID if wanted.last_id is None else min(wanted.last_id, MAX_MESSAGE_ID)
    last_id = max(last_id, 0)
    run = await _tight(reader, payload_run(max(first_id, begin), last_id))
    if run is not None:
        yield PlannedRange(run, of, _width(run))
    # A pack begins so far before the last message that it may have.
    before = PACK_MESSAGES - 1
    packs = await _tight(reader, pack_run(max(first_id - before, begin), last_id))
    if packs is not None:
        yield PlannedRange(packs, of, _width(packs) + before, PACKS_AT_ONCE)


async def _log_begin(reader: SnapshotReader) -> int:
    """The first sequence that is left: a scan of removed rows costs 1.5 µs each."""
    bounds = await reader.get(LOG_BOUNDS_KEY)
    return 0 if bounds is None else decode_log_bounds(bounds).first_sequence


def _queue_parts(
    place: QueueShard, table: Table, state: QueueStateRecord, wanted: RowFilter
) -> Iterator[PlannedRange]:
    of, queue = Bucketed(place), place.queue
    until_ms = None if wanted.last_ms is None else wanted.last_ms + 1
    match table.name:
        case "active":
            for run, head_order, head_offset, count in active_runs(queue, state):
                yield PlannedRange(run, Bucketed(place, head_order, head_offset), count)
        case "done":
            if done := done_run(queue, state, wanted.first_ms or 0, until_ms):
                yield PlannedRange(done, of, state.done_count)
        case "failed":
            if failed := failed_run(queue, state, wanted.first_ms or 0, until_ms):
                yield PlannedRange(failed, of, state.failed_count)
        case "archived":
            if archived := archived_run(queue, state, wanted.first_ms or 0, until_ms):
                yield PlannedRange(
                    archived, of, state.archived.messages_count if state.archived else 0
                )
        case "attempts":
            first_id = min(max(wanted.first_id or 0, 0), MAX_MESSAGE_ID)
            last_id = MAX_MESSAGE_ID if wanted.last_id is None else wanted.last_id
            last_id = min(max(last_id, 0), MAX_MESSAGE_ID)
            yield PlannedRange(attempts_run(queue, first_id, last_id), of, state.failed_count + 1)


# --- Cutting runs -----------------------------------------------------------


async def _tight(reader: SnapshotReader, run: NumberRange) -> NumberRange | None:
    """The range from its first row to its last; None if it has no row."""
    if run.first > run.last:
        return None
    first, last = await asyncio.gather(
        _number(reader, run, last=False), _number(reader, run, last=True)
    )
    return None if first is None or last is None else run._replace(first=first, last=last)


async def _number(reader: SnapshotReader, run: NumberRange, *, last: bool) -> int | None:
    span = run.span
    async for rows in reader.scan(span.start, span.end, limit=1, descending=last):
        return run.number(rows[0][0])
    return None


async def _cut(reader: SnapshotReader, part: PlannedRange, target: int) -> list[PlannedRange]:
    """The part in pieces of about `target` messages.

    Numbers have gaps: after restarts, where messages were removed, where nothing happened for a
    day. So a range is halved where there are rows on both sides, until no piece is too wide.
    """
    wanted = math.ceil(part.message_count / target)
    if wanted <= 1:
        return [part]
    whole = await _tight(reader, part.run)
    runs = [whole] if whole is not None else []
    while runs:
        width = sum(_width(run) for run in runs)
        wide = [run for run in runs if _width(run) > max(width // (2 * wanted), 1)]
        if not wide or len(runs) > 4 * wanted:
            break
        halves = [
            half
            for some in groups_of(wide, lambda _: 1, PROBES_AT_ONCE)
            for both in await asyncio.gather(*(_halves(reader, run) for run in some))
            for half in both
        ]
        runs = sorted([run for run in runs if run not in wide] + halves)
    width = sum(_width(run) for run in runs)
    share = part.message_count / max(width, 1)
    return [
        replace(part, run=run, message_count=max(1, round(_width(run) * share))) for run in runs
    ]


async def _halves(reader: SnapshotReader, run: NumberRange) -> list[NumberRange]:
    middle = (run.first + run.last) // 2
    halves = (run._replace(last=middle), run._replace(first=middle + 1))
    found = await asyncio.gather(*(_tight(reader, half) for half in halves))
    return [half for half in found if half is not None]


def _width(run: NumberRange) -> int:
    return run.last - run.first + 1
