"""The policies of archives: dead letters go in once a run has stored their contents, and come back.

The contents of what is redriven come with the call. Their pushes go into the outbox, and their
messages out of the row, in one command: a repeated call finds the row without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from libs.storage.records.archived_records import ArchivedMessage
from libs.storage.records.queues import FailedMessage
from services.broker.core.batches.remove import (
    FailedRow,
    Outcome,
    archive,
    drop_archived,
    judge_archived,
    redrive_archived,
    take_dead_letters,
)
from services.broker.core.queue import Queue
from services.broker.dead_letters.mover import ListedDeadLetter, Mover, StoredRow
from services.broker.outbox.pusher import PushBatch
from slatemq.errors import NotFound


class Content(NamedTuple):
    """What a dead letter carried."""

    payload: bytes
    headers: Mapping[str, str]


class Archiver:
    """Archives dead letters of one shard's queues; redrives and drops archived ones.

    Outcomes are in the order of what was wanted.
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
            failed = [FailedRow(row.order, row.stored, row.wanted) for row in rows]
            outcomes, taken = take_dead_letters(self._shard, queue, failed)
            archive(queue, taken, run, now_ms)
            return outcomes

        return await self._mover.take(queue, self._mover.lists.failed, wanted, move)

    async def drop(self, queue: Queue, wanted: Sequence[ListedDeadLetter]) -> list[Outcome]:
        """Removes archived dead letters, whichever run archived them."""

        def move(
            rows: Sequence[StoredRow[ArchivedMessage]], pushes: PushBatch | None, now_ms: int
        ) -> list[list[Outcome]]:
            return [
                drop_archived(self._shard, queue, row.order, row.stored, row.wanted) for row in rows
            ]

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
        is_elsewhere = await self._mover.is_elsewhere(target_id)
        limits = (await self._mover.begin_pushes()).limits
        for number, content in enumerate(contents):
            limits.check_payload(f"rows[{number}].payload", len(content.payload))

        async def upload(rows: Sequence[StoredRow[ArchivedMessage]]) -> PushBatch:
            batch = await self._mover.begin_pushes()
            [(order, stored, dead_letters, numbers)] = rows
            now_ms = self._mover.owner.clock.now_ms()
            _, places = judge_archived(queue, order, stored, dead_letters, now_ms)
            for place, number in places.items():
                ends_ms = stored[place].retention_deadline_ms
                await batch.add(number, target_id, contents[numbers[number]], ends_ms)
            return batch

        def move(
            rows: Sequence[StoredRow[ArchivedMessage]], pushes: PushBatch | None, now_ms: int
        ) -> list[list[Outcome]]:
            assert pushes is not None
            shard = self._shard
            if not is_elsewhere and target_id not in shard.queues:
                raise NotFound("queue", target_id)
            [(order, stored, dead_letters, _)] = rows
            outcomes = redrive_archived(
                shard,
                queue,
                order,
                stored,
                dead_letters,
                pushes.rows,
                pushes.ingest_shard,
                now_ms,
            )
            each = zip(dead_letters, outcomes, strict=True)
            ids = (one.message_id for one, end in each if end is Outcome.REMOVED)
            shard.events.redriven(queue, target_id, ids, now_ms)
            return [outcomes]

        # A row at a time: where the outbox gets full, the rows before stay redriven.
        archived = self._mover.lists.archived
        return await self._mover.take(queue, archived, wanted, move, upload, messages_at_once=1)
