"""The policies of removals: entries past their retention go, available, done or failed.

Each step is one command, after which others have their turn: a call may name ten thousand buckets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from libs.storage.records.queues import FailedMessage
from services.broker.core.batches.remove import (
    DoneRow,
    FailedRow,
    Outcome,
    done_before,
    done_row,
    drop_waiting,
    prune_done,
    take_dead_letters,
)
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from services.broker.dead_letters.mover import (
    ENTRY_BYTES,
    ListedDeadLetter,
    Mover,
    StoredRow,
    grouped,
    places_by_key,
)
from services.broker.entries.finished_pages import TimeRange
from services.broker.outbox.pusher import PushBatch

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


class Remover:
    """Removes entries of one shard's queues. Outcomes are in the order of what was wanted."""

    def __init__(self, mover: Mover, grace_s: int) -> None:
        """Remove what is over for `grace_s` by this owner's clock."""
        self._mover = mover
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
        async for order, heads in self._mover.lists.done_heads.rows(
            queue, TimeRange(until_ms=before_ms), None
        ):
            going = [head for head in heads if head[1] < before_ms]
            if not going:
                return
            if len(going) == len(heads) and all(attempts <= 1 for _, _, attempts in going):
                yield DoneRow(order, len(heads), (), ())
                continue
            row = done_row(order, await self._mover.lists.done.row(queue, order), before_ms)
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
            failed = [FailedRow(row.order, row.stored, row.wanted) for row in rows]
            shard = self._owner.shard
            return take_dead_letters(shard, queue, failed, failed_by_ms=failed_by_ms)[0]

        return await self._mover.take(queue, self._mover.lists.failed, wanted, move)
