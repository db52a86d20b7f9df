"""RedriveArchived, from the request to what is durable: the content comes with the call.

Of each row of archived messages what is wanted goes in one command: the pushes into the outbox, the
messages out of the row. Who repeats a call finds the row without them, and pushes nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from libs.storage.database.blobs import Blobs
from libs.storage.records.archived_records import ArchivedMessage
from services.broker.core.batches.remove import (
    DeadLetter,
    Outcome,
    judge_archived,
    redrive_archived,
)
from services.broker.core.queue import Queue
from services.broker.dead_letters.push_rows import outbox_row
from services.broker.dead_letters.remover import ListedDeadLetter, by_key, turn
from services.broker.entries.finished_pages import FinishedReader
from services.broker.outbox.conversion import PushLimits
from services.broker.outbox.executor import UPLOAD_AGE_MS_MAX
from services.broker.outbox.targets import OtherBrokers, OutboxTarget
from services.broker.shard.owner import ShardOwner
from slatemq.errors import NotFound, Unavailable


class Content(NamedTuple):
    """What a dead letter carried."""

    payload: bytes
    headers: Mapping[str, str]


class ArchiveRedriver:
    """Redrives archived dead letters of one shard's queues."""

    def __init__(
        self,
        owner: ShardOwner,
        archived: FinishedReader[ArchivedMessage],
        target: OutboxTarget,
        others: OtherBrokers,
        blobs: Blobs,
        limits: PushLimits,
    ) -> None:
        """Redrive those of this owner's shard."""
        self._owner = owner
        self._archived = archived
        self._target = target
        self._others = others
        self._blobs = blobs
        self._limits = limits

    async def redrive(
        self,
        queue: Queue,
        target_id: str,
        wanted: Sequence[ListedDeadLetter],
        contents: Sequence[Content],
    ) -> list[Outcome]:
        """Pushes contents to the target, and takes their messages out; outcomes in their order."""
        elsewhere = target_id not in self._owner.shard.queues
        if elsewhere and not await self._others.having((target_id,)):
            await self._owner.durable()
            raise NotFound("queue", target_id)
        into = _Target(target_id, elsewhere, await self._target.choose())
        limits = self._limits.at(self._target.payload_bytes_max(into.ingest_shard))
        for number, content in enumerate(contents):
            limits.check_payload(f"rows[{number}].payload", len(content.payload))
        self._owner.shard.outbox.check_room(1, 0)  # nothing is uploaded for what is refused anyway
        outcomes = [Outcome.GONE] * len(wanted)
        by_order = by_key([one.order for one in wanted])
        async with turn(self._owner, f"archived/{queue.queue_id}"):
            await self._owner.durable()
            for order, numbers in by_order.items():
                dead_letters = [wanted[number].dead_letter for number in numbers]
                carried = [contents[number] for number in numbers]
                found = await self._row(queue, into, order, dead_letters, carried)
                for number, outcome in zip(numbers, found, strict=True):
                    outcomes[number] = outcome
            await self._owner.durable()
        return outcomes

    async def _row(
        self,
        queue: Queue,
        into: _Target,
        order: int,
        dead_letters: Sequence[DeadLetter],
        contents: Sequence[Content],
    ) -> list[Outcome]:
        """Redrives what is wanted of one row."""
        shard = self._owner.shard
        stored = await self._archived.row(queue, order)
        began_ms = self._owner.clock.now_ms()
        _, places = judge_archived(queue, order, stored, dead_letters, began_ms)
        pushes = {
            number: await outbox_row(
                into.queue_id,
                contents[number],
                stored[place].retention_deadline_ms,
                self._blobs,
                began_ms,
            )
            for place, number in places.items()
        }

        def run(now_ms: int) -> list[Outcome]:
            if now_ms - began_ms > UPLOAD_AGE_MS_MAX:
                raise Unavailable("the upload took over an hour, retry")
            if not self._owner.owns(queue):
                raise NotFound("queue", queue.queue_id)
            if not into.elsewhere and into.queue_id not in shard.queues:
                raise NotFound("queue", into.queue_id)
            outcomes = redrive_archived(
                shard, queue, order, stored, dead_letters, pushes, into.ingest_shard, now_ms
            )
            each = zip(dead_letters, outcomes, strict=True)
            ids = (dead_letter.message_id for dead_letter, end in each if end is Outcome.REMOVED)
            shard.events.redriven(queue, into.queue_id, ids, now_ms)
            return outcomes

        return await self._owner.run(run, sum(map(len, pushes.values())))


class _Target(NamedTuple):
    """Where the contents go."""

    queue_id: str
    elsewhere: bool
    ingest_shard: int
