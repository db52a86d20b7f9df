"""The policies of removals and archives: what is past its retention goes, dead letters come back.

Each step is one command, after which others have their turn: a call may name ten thousand buckets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from libs.storage.records.archived_records import ArchivedMessage
from libs.storage.records.execution_records import NOT_SET
from libs.storage.records.queues import FailedMessage
from services.broker.core.batches.remove import (
    DoneRow,
    Outcome,
    StoredRow,
    archive,
    done_before,
    done_row,
    drop_archived,
    drop_waiting,
    judge_archived,
    prune_done,
    redrive_archived,
    take_dead_letters,
)
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from services.broker.dead_letters.mover import (
    ENTRY_BYTES,
    ListedDeadLetter,
    Mover,
    grouped,
    places_by_key,
)
from services.broker.entries.finished_pages import TimeRange
from services.broker.outbox.pusher import PushBatch
from services.broker.shard.loading import Histories, Store

BUCKETS_AT_ONCE: Final = 16
"""Active buckets that one command changes: they are read together, and a lane has room for 64."""

BUCKET_BYTES: Final = 1000 * ENTRY_BYTES

GROUPS_A_COMMIT: Final = 8
"""Groups of buckets that wait to be stored at most: some megabytes."""

DONE_ROWS_AT_ONCE: Final = 200
DONE_MESSAGES_AT_ONCE: Final = 20_000
"""Rows of a done list that one command removes, and messages in them, those of one row at most
beyond that."""

DONE_ROWS_MAX: Final = 5000
DONE_MESSAGES_MAX: Final = 500_000
"""Where one call ends: some hundred milliseconds."""


class WaitingMessage(NamedTuple):
    """A message that may wait, and in which bucket."""

    place: Place
    message_id: int


class Content(NamedTuple):
    payload: bytes
    headers: Mapping[str, str]


class Remover:
    """Removes entries of one shard's queues. Outcomes are in the order of what was wanted."""

    def __init__(self, mover: Mover, database: Store, grace_s: int) -> None:
        """Remove what is over for `grace_s` by this owner's clock."""
        self._mover = mover
        self._database = database
        self._owner = mover.owner
        self._grace_ms = grace_s * 1000

    # --- What waits ---------------------------------------------------------

    async def expired(self, queue: Queue, wanted: Sequence[WaitingMessage]) -> list[Outcome]:
        """Drops messages that are past their retention, where they wait."""
        outcomes = [Outcome.GONE] * len(wanted)
        by_place = places_by_key([one.place for one in wanted])
        for count, some in enumerate(grouped(by_place, BUCKETS_AT_ONCE), 1):
            ids = {place: [wanted[n].message_id for n in by_place[place]] for place in some}
            drop = partial(self._drop, queue, ids)
            found = await self._mover.run(queue, drop, BUCKET_BYTES * len(some))
            for place in some:
                for number, outcome in zip(by_place[place], found[place], strict=True):
                    outcomes[number] = outcome
            await asyncio.sleep(0)  # others have their turn, also where nothing is read or stored
            if count % GROUPS_A_COMMIT == 0:
                await self._owner.durable()  # not faster than it is stored
        in_flight = queue.leases.message_ids()
        for number, one in enumerate(wanted):
            if outcomes[number] is Outcome.GONE and one.message_id in in_flight:
                outcomes[number] = Outcome.IN_FLIGHT
        await self._owner.durable()
        return outcomes

    def _drop(
        self, queue: Queue, ids: Mapping[Place, Sequence[int]], now_ms: int
    ) -> dict[Place, list[Outcome]]:
        return drop_waiting(queue, ids, now_ms - self._grace_ms)

    # --- Done ---------------------------------------------------------------

    async def done(self, queue: Queue, before_ms: int) -> tuple[int, bool]:
        """Removes what was done long enough ago: how many messages, and whether there is more."""
        removed = looked_at = waiting = 0
        async with self._mover.lock(queue.queue_id, self._mover.lists.done):
            before_ms = done_before(queue, before_ms, self._grace_ms, self._owner.clock.now_ms())
            rows: list[DoneRow] = []
            more = False
            async for row in self._done_rows(queue, before_ms):
                rows.append(row)
                looked_at += 1
                waiting += row.messages_count
                more = looked_at >= DONE_ROWS_MAX or removed + waiting >= DONE_MESSAGES_MAX
                full = len(rows) >= DONE_ROWS_AT_ONCE or waiting >= DONE_MESSAGES_AT_ONCE
                if more or full:
                    removed += await self._prune(queue, rows)
                    rows, waiting = [], 0
                if more:
                    break
            removed += await self._prune(queue, rows)
        return removed, more

    async def _done_rows(self, queue: Queue, before_ms: int) -> AsyncIterator[DoneRow]:
        """The rows from the beginning of the list on, until one of which nothing may go."""
        if not before_ms:
            return
        histories = Histories(self._database, self._owner.shard.attempts, queue)
        async for order, heads in self._mover.lists.done_heads.rows(
            queue, TimeRange(until_ms=before_ms), None
        ):
            going = [head for head in heads if head[1] < before_ms]
            if not going:
                return
            tried = await histories.of([message_id for message_id, _, _ in going])
            if len(going) == len(heads) and not tried:
                yield DoneRow(order, len(heads), (), ())
                continue
            stored = await self._mover.lists.done.row(queue, order)
            row = done_row(order, stored, before_ms, tried)
            if row is not None:
                yield row

    async def _prune(self, queue: Queue, rows: Sequence[DoneRow]) -> int:
        def prune(_: int) -> int:
            return prune_done(self._owner.shard, queue, rows)

        written = sum(len(row.left) + len(row.tried) + 1 for row in rows)
        return await self._mover.run(queue, prune, ENTRY_BYTES * written) if rows else 0

    # --- Failed -------------------------------------------------------------

    async def failed(self, queue: Queue, wanted: Sequence[ListedDeadLetter]) -> list[Outcome]:
        """Removes dead letters past the queue's retention of failed messages."""

        def move(
            rows: Sequence[StoredRow[FailedMessage]], pushes: PushBatch | None, now_ms: int
        ) -> list[list[Outcome]]:
            retention_s = queue.settings.failed_retention_s
            # Where dead letters are kept without end, none failed long enough ago.
            failed_by_ms = now_ms - retention_s * 1000 - self._grace_ms if retention_s else -1
            shard = self._owner.shard
            return take_dead_letters(shard, queue, rows, failed_by_ms=failed_by_ms)[0]

        return await self._mover.take(queue, self._mover.lists.failed, wanted, move)


class Archiver:
    """Archives dead letters once a run has stored their contents; redrives and drops archived ones.

    The contents of what is redriven come with the call. Their pushes go into the outbox, and their
    messages out of the row, in one command: a repeated call finds the row without them. Outcomes
    are in the order of what was wanted.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._shard = mover.owner.shard

    async def archive(
        self, queue: Queue, wanted: Sequence[ListedDeadLetter], run: str
    ) -> list[Outcome]:
        """Moves dead letters, whose contents this run has stored, to the archived list."""

        def move(
            rows: Sequence[StoredRow[FailedMessage]], pushes: PushBatch | None, now_ms: int
        ) -> list[list[Outcome]]:
            outcomes, taken = take_dead_letters(self._shard, queue, rows)
            archive(queue, taken, run, now_ms)
            return outcomes

        return await self._mover.take(queue, self._mover.lists.failed, wanted, move)

    async def drop(self, queue: Queue, wanted: Sequence[ListedDeadLetter]) -> list[Outcome]:
        """Removes archived dead letters, whichever run archived them."""

        def move(
            rows: Sequence[StoredRow[ArchivedMessage]], pushes: PushBatch | None, now_ms: int
        ) -> list[list[Outcome]]:
            return [drop_archived(self._shard, queue, row) for row in rows]

        return await self._mover.take(queue, self._mover.lists.archived, wanted, move)

    async def redrive(
        self,
        queue: Queue,
        target_id: str,
        wanted: Sequence[ListedDeadLetter],
        contents: Sequence[Content],
    ) -> list[Outcome]:
        """Pushes contents to the target queue, and takes their messages out of the archived list.

        Raises NotFound, InvalidArgument, ResourceExhausted and Unavailable.
        """
        is_elsewhere = await self._mover.is_elsewhere(target_id, queue.queue_id)
        limits = (await self._mover.begin_pushes()).limits
        for number, content in enumerate(contents):
            limits.check_payload(f"rows[{number}].payload", len(content.payload))

        async def upload(rows: Sequence[StoredRow[ArchivedMessage]]) -> PushBatch:
            batch = await self._mover.begin_pushes()
            (row,) = rows
            _, places = judge_archived(queue, row, self._mover.owner.clock.now_ms())
            for place, number in places.items():
                content = contents[row.numbers[number]]
                ends_ms = row.stored[place].retention_deadline_ms
                delay_ms = 0 if target_id == queue.queue_id else NOT_SET
                batch.add(number, target_id, content, ends_ms, delay_ms)
            await self._mover.upload(batch)
            return batch

        def move(
            rows: Sequence[StoredRow[ArchivedMessage]], pushes: PushBatch | None, now_ms: int
        ) -> list[list[Outcome]]:
            assert pushes is not None
            shard = self._shard
            if not is_elsewhere and target_id not in shard.queues:
                raise shard.absence(target_id)
            (row,) = rows
            outcomes = redrive_archived(shard, queue, row, pushes.rows, pushes.ingest_shard, now_ms)
            each = zip(row.wanted, outcomes, strict=True)
            ids = (one.message_id for one, end in each if end is Outcome.REMOVED)
            shard.events.redriven(queue, target_id, ids, now_ms)
            return [outcomes]

        # A row at a time: where the outbox gets full, the rows before stay redriven.
        archived = self._mover.lists.archived
        return await self._mover.take(queue, archived, wanted, move, upload, messages_at_once=1)
