"""Sends the outbox: for each ingest shard a line of its own, in order, from what is durable.

    rows ──read, a bounded part──► ingest ──durable there──► deleted
      ▲                              │ down: the same again, later, without end
      │                              │ ended over a record: from one row on, much later
      │                              │ refuses a row permanently: it is set aside
      ├──────────────────────────────┤ has other numbers: nothing is sent until an operator resumes
      └──────────────────────────────┘ was removed: they are numbered again, for another ingest

Nothing here needs to be exact: ingest passes over the numbers that it has, so a row may be sent
again however late, by this process or the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from libs.serving.peers.calls import (
    Backoff,
    PeerFailed,
    PeerHealth,
    PeerUnstorable,
    unstorable_wait_s,
)
from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord, StorageError
from libs.storage.layout.own_keys import outbox_range, parse_outbox_key
from libs.storage.records.execution_records import NOT_SET, OutboxRecord, decode_outbox
from libs.storage.records.payloads import PayloadUri
from services.broker.core.lists.outbox import PUT_ASIDE, REFUSED_MAX, Outbox
from services.broker.outbox.targets import NumbersDiffer, OutboxTarget, RowRefused
from services.broker.shard.owner import ShardOwner
from slatemq._counts import counted
from slatemq.errors import FailedPrecondition, Unavailable
from slatemq.v1.ingest_pb2 import PushedMessage, PushRequest

log = logging.getLogger(__name__)

BATCH_ROWS = 1000
"""The most rows in one call."""

STEP_ROWS = 100
"""Rows decoded, or made messages of, in one step."""

BATCH_BYTES = 4 << 20
"""About the bytes of rows in one call: all that the outbox has in memory per ingest."""

HALTED_MS_MAX = 30_000
"""How often to look whether an operator has resumed a halted outbox."""


class _TooManyRefused(Exception):
    """The number of pushes set aside has reached its limit."""


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
        self._lines: dict[int, _Line] = {}
        self._new = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._new.clear()
                for ingest_shard in self._outbox.ingest_shards:
                    if ingest_shard not in self._lines:
                        line = _Line(
                            self._owner, self._database, self._target, self._shard, ingest_shard
                        )
                        self._lines[ingest_shard] = line
                        tasks.create_task(line.run())
                await self._new.wait()

    def _pushed(self, ingest_shard: int) -> None:
        line = self._lines.get(ingest_shard)
        wake = self._new if line is None else line.wake
        wake.set()

    def resume(self, ingest_shard: int) -> None:
        """Goes on from the number that ingest has, where that is why nothing is sent.

        Raises FailedPrecondition where it is not.
        """
        line = self._lines.get(ingest_shard)
        if line is None or ingest_shard not in self._outbox.halts:
            raise FailedPrecondition(
                "OUTBOX_NOT_HALTED",
                f"the outbox for ingest {ingest_shard} is not halted",
                subject=f"ingest {ingest_shard}",
            )
        line.resume()


@dataclass(eq=False)
class _Line:
    """The pushes for one ingest shard."""

    _owner: ShardOwner
    _database: Database
    _target: OutboxTarget
    _shard: int
    _ingest_shard: int
    _rows_max: int = field(default=BATCH_ROWS, init=False)
    _sent_number: int = field(default=0, init=False)
    """The last number of the call that was sent last."""
    _ended_number: int = field(default=0, init=False)
    """The last number of the calls over which the ingest ended, perhaps by another's record."""
    _alone_number: int = field(default=0, init=False)
    """Up to this number rows go alone: the ingest has ended twice over some of them."""
    _resuming: bool = field(default=False, init=False)
    _look_again: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def _outbox(self) -> Outbox:
        return self._owner.shard.outbox

    def resume(self) -> None:
        """Take the number that ingest has for right, once, and try now."""
        self._resuming = True
        self._look_again.set()

    async def run(self) -> None:
        backoff, halted = Backoff(), Backoff(HALTED_MS_MAX)
        health = PeerHealth(f"ingest {self._ingest_shard}, where pushes go,")
        while True:
            self.wake.clear()
            if not self._outbox.waiting_count(self._ingest_shard):
                await self.wake.wait()
                continue
            try:
                await self._send()
            except (NumbersDiffer, CorruptRecord, _TooManyRefused) as error:
                if self._resuming and isinstance(error, NumbersDiffer):
                    await self._renumber(error.last_number)
                else:
                    await self._halt(error, halted.next_seconds())
            except (PeerFailed, StorageError) as error:
                health.mark_down(error)
                wait_s = backoff.next_seconds()
                if isinstance(error, PeerUnstorable):  # the ingest ended, and would again
                    self._rows_max, wait_s = 1, unstorable_wait_s()
                    self._note_ended()
                if not await self._has_left():
                    await asyncio.sleep(wait_s)
            else:
                health.mark_up()
                backoff.reset()
                halted.reset()
                self._resuming = False
                if self._outbox.halts.pop(self._ingest_shard, None):
                    log.info("the outbox for ingest %d goes on", self._ingest_shard)

    async def _send(self) -> None:
        """Sends the oldest rows, and removes those that are durable at ingest."""
        ingest_shard = self._ingest_shard
        counter = self._outbox.counter(ingest_shard)
        # What is in the store may not be synced yet: only what this covers may be sent.
        await self._owner.durable()
        values = await self._read(counter.first_waiting, counter.last_number)
        try:
            aside_count, rows = await _decoded(values)
        except CorruptRecord as error:
            await self._set_aside(values[0], f"its row is damaged: {error}")
            return
        if rows:
            self._outbox.seen(ingest_shard, rows[0].pushed_at_ms)
        sent_count = aside_count + len(rows)
        messages = [pushed_message(row) async for row in _in_steps(rows)]
        request = PushRequest(
            broker_shard=self._shard,
            first_number=counter.first_waiting + counter.offset + aside_count,
            messages=messages,
            set_aside_count=aside_count,
        )
        self._sent_number = counter.first_waiting + sent_count - 1
        try:
            last_number = await self._target.push(ingest_shard, request)
        except RowRefused as error:
            if sent_count > 1:
                self._rows_max = sent_count // 2  # until the one at fault goes alone
            elif rows:
                await self._set_aside(values[0], str(error))
            else:
                raise
            return
        self._check(last_number)
        count = min(last_number + 1 - counter.offset - counter.first_waiting, sent_count)
        if count <= 0:
            raise PeerFailed(f"took {counted(sent_count, 'push', 'pushes')}, and has none of them")
        size_bytes = sum(map(len, values[:count]))
        await self._owner.run(lambda _: self._outbox.sent(ingest_shard, count, size_bytes))
        if counter.first_waiting + count > self._alone_number:
            self._rows_max = min(2 * self._rows_max, BATCH_ROWS)

    def _note_ended(self) -> None:
        """Notes that the ingest ended over the last call, or over what others sent meanwhile."""
        first, last = self._outbox.counter(self._ingest_shard).first_waiting, self._sent_number
        if first <= self._ended_number and first < last:
            self._alone_number = last
        self._ended_number = max(self._ended_number, last)

    async def _has_left(self) -> bool:
        """Whether the ingest was removed, and some rows are now for another one.

        It refuses pushes before it is removed, and is not removed while it may have stored a row
        that still waits here. So none of these is stored anywhere.
        """
        try:
            if not await self._target.is_removed(self._ingest_shard):
                return False
            counter = self._outbox.counter(self._ingest_shard)
            await self._owner.durable()
            values = await self._read(counter.first_waiting, counter.last_number)
            other = await self._target.choose()
        except (StorageError, Unavailable) as error:
            log.warning("pushes for ingest %d wait: %s", self._ingest_shard, error)
            return False

        def move(now_ms: int) -> None:
            for value in values:
                if value != PUT_ASIDE:
                    self._outbox.push(other, value, now_ms)
            self._outbox.sent(self._ingest_shard, len(values), sum(map(len, values)))

        await self._owner.run(move)
        self._outbox.halts.pop(self._ingest_shard, None)  # Why it stood still went with the ingest.
        log.info(
            "ingest %d was removed: %d pushes go to %d", self._ingest_shard, len(values), other
        )
        return True

    def _check(self, last_number: int) -> None:
        """Raises NumbersDiffer where ingest has rows that never were: it passes over ours then."""
        now = self._outbox.counter(self._ingest_shard)
        if last_number > now.last_number + now.offset:
            raise NumbersDiffer(
                f"the ingest has stored row {last_number}, but this broker has numbered only up to "
                f"{now.last_number + now.offset}",
                last_number,
            )

    async def _set_aside(self, value: bytes, reason: str) -> None:
        """Takes the push out of the oldest row, so that those behind it go on."""
        first = self._outbox.counter(self._ingest_shard).first_waiting
        if len(self._outbox.refused) >= REFUSED_MAX:
            pushes = counted(REFUSED_MAX, "push is", "pushes are")
            raise _TooManyRefused(f"{pushes} set aside already: {reason}")
        log.error(
            "push %d for ingest %d was refused permanently and is set aside: %s",
            first,
            self._ingest_shard,
            reason,
        )
        await self._owner.run(
            lambda now_ms: self._outbox.set_aside(self._ingest_shard, value, reason, now_ms)
        )

    async def _halt(self, error: Exception, seconds: float) -> None:
        """Says why nothing is sent, once, and waits."""
        text = str(error)
        if self._outbox.halts.get(self._ingest_shard) != text:
            log.error("the outbox for ingest %d is halted: %s", self._ingest_shard, text)
        self._outbox.halts[self._ingest_shard] = text
        self._resuming = False
        self._look_again.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._look_again.wait()
        except TimeoutError:
            return

    async def _renumber(self, last_number: int) -> None:
        """Goes on behind the last number that ingest has."""
        log.warning(
            "the outbox for ingest %d goes on behind number %d, as was asked",
            self._ingest_shard,
            last_number,
        )
        await self._owner.run(lambda _: self._outbox.renumber(self._ingest_shard, last_number))

    async def _read(self, first: int, last: int) -> Sequence[bytes]:
        """The values of the first rows, at least one: about BATCH_BYTES, if they are of a size."""
        counter = self._outbox.counter(self._ingest_shard)
        average = max(counter.waiting_bytes // (last + 1 - first), 1)
        limit = min(max(BATCH_BYTES // average, 1), self._rows_max, BATCH_ROWS)
        values: list[bytes] = []
        size_bytes = 0
        span = outbox_range(self._ingest_shard, first, last)
        async for rows in self._database.scan(*span, limit=limit, durable=True):
            for key, value in rows:
                _, number = parse_outbox_key(key)
                size_bytes += len(value)
                if number != first + len(values) or (values and size_bytes > BATCH_BYTES):
                    break
                values.append(value)
        if not values:
            raise CorruptRecord("outbox", f"row {first} for ingest {self._ingest_shard} is missing")
        return values


T = TypeVar("T")


async def _in_steps(items: Sequence[T]) -> AsyncIterator[T]:
    """The items; others have turns after each STEP_ROWS, which may have many headers."""
    for place, one in enumerate(items, 1):
        yield one
        if place % STEP_ROWS == 0:
            await asyncio.sleep(0)


async def _decoded(values: Sequence[bytes]) -> tuple[int, list[OutboxRecord]]:
    """How many rows were set aside at the beginning, and those behind up to the next such one.

    Raises CorruptRecord for a damaged row that is the first; before another one it ends.
    """
    aside_count = 0
    rows: list[OutboxRecord] = []
    async for value in _in_steps(values):
        if value == PUT_ASIDE:
            if rows:
                break
            aside_count += 1
            continue
        try:
            rows.append(decode_outbox(value))
        except CorruptRecord:
            if aside_count + len(rows) == 0:
                raise
            break
    return aside_count, rows


def pushed_message(row: OutboxRecord) -> PushedMessage:
    """A row as ingest takes it."""
    pushed = PushedMessage(
        headers=dict(row.headers), created_at_ms=row.pushed_at_ms, queue_id=row.queue_id
    )
    for name in ("retention_s", "delay_ms", "visible_at_ms"):
        value = getattr(row, name)
        if value != NOT_SET:
            setattr(pushed, name, value)
    pushed.retention_deadline_ms = row.retention_deadline_ms
    if isinstance(row.payload, PayloadUri):
        pushed.payload_uri, pushed.payload_bytes = row.payload.uri, row.payload_bytes
    else:
        pushed.payload = row.payload
    return pushed
