"""Sends the outbox: for each ingest shard a line of its own, in order, from what is durable.

    rows ──read, a bounded part──► ingest ──durable there──► deleted
      ▲                              │ away: the same again, later, without end
      └──────────────────────────────┘

Nothing here needs to be exact: ingest passes over the numbers that it has, so a row may be sent
again however late, by this process or the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from libs.serving.peers import Backoff, PeerFailed, Presence
from libs.storage.errors import CorruptRecord, StorageError
from libs.storage.execution_records import NOT_SET, OutboxRecord, decode_outbox
from libs.storage.own_keys import outbox_range, parse_outbox_key
from libs.storage.payloads import PayloadUri
from libs.storage.slate import Database
from services.broker.other_shards import OutboxTarget
from services.broker.owner import ShardOwner
from slatemq.v1.ingest_pb2 import PublishMessage, PushedMessage, PushRequest

log = logging.getLogger(__name__)

BATCH_ROWS = 1000
"""Rows sent at once at most: some 10 ms of work at either end."""

BATCH_BYTES = 4 << 20
"""Bytes of rows read and sent at once, about: all that the outbox has in memory per ingest."""


class OutboxSender:
    """Sends the pushes of one broker shard; see `run`."""

    def __init__(
        self, owner: ShardOwner, database: Database, target: OutboxTarget, shard: int
    ) -> None:
        """Send the outbox of this owner's shard, whose number is `shard`."""
        self._owner = owner
        self._database = database
        self._target = target
        self._shard = shard
        self._outbox = owner.shard.outbox
        self._outbox.on_push = self._pushed
        self._wakes: dict[int, asyncio.Event] = {}
        self._new = asyncio.Event()

    async def run(self) -> None:
        """Sends until cancelled."""
        async with asyncio.TaskGroup() as lines:
            while True:
                self._new.clear()
                for ingest_shard in self._outbox.ingest_shards:
                    if ingest_shard not in self._wakes:
                        self._wakes[ingest_shard] = asyncio.Event()
                        lines.create_task(self._send_all(ingest_shard))
                await self._new.wait()

    def _pushed(self, ingest_shard: int) -> None:
        wake = self._wakes.get(ingest_shard, self._new)
        wake.set()

    async def _send_all(self, ingest_shard: int) -> None:
        wake, backoff = self._wakes[ingest_shard], Backoff()
        presence = Presence(f"ingest {ingest_shard}, where pushes go,")
        while True:
            wake.clear()
            if not self._outbox.waiting_count(ingest_shard):
                await wake.wait()
                continue
            try:
                await self._send(ingest_shard)
            except (PeerFailed, StorageError) as error:
                presence.away(error)
                await asyncio.sleep(backoff.next_seconds())
            else:
                presence.there()
                backoff.reset()

    async def _send(self, ingest_shard: int) -> None:
        """Sends the oldest rows, and removes those that are durable at ingest."""
        counter = self._outbox.counter(ingest_shard)
        # What is in the store may not be synced yet: only what this covers may be told to others.
        await self._owner.durable()
        values = await self._read(ingest_shard, counter.first_waiting, counter.last_number)
        rows = [decode_outbox(value) for value in values]
        self._outbox.seen(ingest_shard, rows[0].pushed_at_ms)
        request = PushRequest(
            broker_shard=self._shard,
            first_number=counter.first_waiting,
            messages=map(pushed_message, rows),
        )
        last_number = await self._target.push(ingest_shard, request)
        count = min(last_number + 1 - counter.first_waiting, len(rows))
        if count <= 0:
            raise PeerFailed(f"took {len(rows)} pushes, and has none of them")
        size_bytes = sum(map(len, values[:count]))
        await self._owner.run(lambda _: self._outbox.sent(ingest_shard, count, size_bytes))

    async def _read(self, ingest_shard: int, first: int, last: int) -> Sequence[bytes]:
        """The values of the first rows, at least one: about BATCH_BYTES, if they are of a size."""
        counter = self._outbox.counter(ingest_shard)
        average = max(counter.waiting_bytes // (last + 1 - first), 1)
        limit = min(max(BATCH_BYTES // average, 1), BATCH_ROWS)
        values: list[bytes] = []
        size_bytes = 0
        span = outbox_range(ingest_shard, first, last)
        async for rows in self._database.scan(*span, limit=limit, durable=True):
            for key, value in rows:
                _, number = parse_outbox_key(key)
                size_bytes += len(value)
                if number != first + len(values) or (values and size_bytes > BATCH_BYTES):
                    break
                values.append(value)
        if not values:
            raise CorruptRecord("outbox", f"row {first} for ingest {ingest_shard} is missing")
        return values


def pushed_message(row: OutboxRecord) -> PushedMessage:
    """A row as ingest takes it."""
    message = PublishMessage(headers=dict(row.headers), created_at_ms=row.pushed_at_ms)
    for name in ("retention_s", "delay_ms", "visible_at_ms"):
        value = getattr(row, name)
        if value != NOT_SET:
            setattr(message, name, value)
    pushed = PushedMessage(message=message, queue_id=row.queue_id)
    pushed.retention_deadline_ms = row.retention_deadline_ms
    if isinstance(row.payload, PayloadUri):
        pushed.payload_uri, pushed.payload_bytes = row.payload.uri, row.payload_bytes
    else:
        pushed.message.payload = row.payload
    return pushed
