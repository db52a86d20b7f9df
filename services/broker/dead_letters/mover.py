"""Takes messages out of the stored rows of a queue's lists: one engine, on which policies decide.

    lock ──► read rows ──► decide ──► upload ──► one command ──► durable

A row that was read is as the command finds it, since all that take messages out of a list hold its
lock from the read until what they wrote is durable. Only a purge may come in between; it empties
the whole list, and commands treat such rows as gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from services.broker.core.batches.remove import DeadLetter, M, Outcome, StoredRow
from services.broker.core.queue import Queue
from services.broker.entries.finished_pages import FinishedReader, ListReaders
from services.broker.outbox.pusher import PushBatch, Pusher
from services.broker.shard.owner import ShardOwner
from slatemq.errors import Unavailable

ROWS_AT_ONCE: Final = 100
"""Rows read and written under the lock; other movers of the list have their turn in between."""

MESSAGES_AT_ONCE: Final = 1000
"""Messages in the rows that one command changes, and those of one row at most beyond that."""

ENTRY_BYTES: Final = 30
"""About what each message of a row that is written again adds to a commit."""

LOCK_S: Final = 10.0
"""How long a call waits for a redrive to release the rows; it may be waiting for an ingest."""

K = TypeVar("K")
T = TypeVar("T")


class ListedDeadLetter(NamedTuple):
    """A dead letter and the row of its list that has it."""

    order: int
    dead_letter: DeadLetter


Move = Callable[[Sequence[StoredRow[M]], PushBatch | None, int], list[list[Outcome]]]
"""A policy: moves what is wanted of rows, in one command, given what was uploaded and the time.
Returns the outcomes of each row."""

Upload = Callable[[Sequence[StoredRow[M]]], Awaitable[PushBatch]]
"""What is to be pushed for rows, uploaded."""


@dataclass(eq=False)
class Mover:
    owner: ShardOwner
    lists: ListReaders
    pusher: Pusher
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )

    @asynccontextmanager
    async def lock(
        self, queue_id: str, reader: FinishedReader[Any], *, in_background: bool = False
    ) -> AsyncIterator[None]:
        """Holds the lock of a queue's list: what is read was durable, and what is written is.

        Raises Unavailable where a call waits too long; work in the background waits without end.
        """
        lock = self._locks.setdefault(f"{reader.name}/{queue_id}", asyncio.Lock())
        try:
            async with asyncio.timeout(None if in_background else LOCK_S):
                await lock.acquire()
        except TimeoutError:
            raise Unavailable(
                "a redrive holds these rows, retry", reason="ROWS_BUSY", retry_after_ms=1000
            ) from None
        try:
            await self.owner.durable()
            yield
            await self.owner.durable()
        finally:
            lock.release()

    async def take(
        self,
        queue: Queue,
        reader: FinishedReader[M],
        wanted: Sequence[ListedDeadLetter],
        move: Move[M],
        upload: Upload[M] | None = None,
        messages_at_once: int = MESSAGES_AT_ONCE,
    ) -> list[Outcome]:
        """Moves what is wanted, some rows at a time; outcomes in the order of `wanted`.

        Raises NotFound where the queue was deleted meanwhile, Unavailable, and what `move` and
        `upload` raise.
        """
        outcomes = [Outcome.GONE] * len(wanted)
        by_order = places_by_key([one.order for one in wanted])
        for orders in grouped(by_order, ROWS_AT_ONCE):
            async with self.lock(queue.queue_id, reader):
                rows: list[StoredRow[M]] = []
                for order in orders:
                    numbers = by_order[order]
                    dead_letters = [wanted[number].dead_letter for number in numbers]
                    stored = await reader.row(queue, order)
                    rows.append(StoredRow(order, stored, dead_letters, numbers))
                    # A row that is gone counts, too: a policy may take one row at a time.
                    count = sum(max(len(row.stored), 1) for row in rows)
                    if count < messages_at_once and order != orders[-1]:
                        continue
                    pushes = await upload(rows) if upload else None
                    command = partial(move, rows, pushes)
                    found = await self.run(queue, command, ENTRY_BYTES * count, pushes)
                    for row, ends in zip(rows, found, strict=True):
                        for number, outcome in zip(row.numbers, ends, strict=True):
                            outcomes[number] = outcome
                    rows = []
        return outcomes

    async def run(
        self,
        queue: Queue,
        command: Callable[[int], T],
        size_bytes: int,
        pushes: PushBatch | None = None,
    ) -> T:
        """Runs a command on a queue that still exists, whose uploads are young enough.

        Raises NotFound and Unavailable.
        """

        def run(now_ms: int) -> T:
            if pushes is not None:
                pushes.check_age(now_ms)
            if not self.owner.owns(queue):
                raise self.owner.shard.absence(queue.queue_id)
            return command(now_ms)

        return await self.owner.run(run, size_bytes + (pushes.size_bytes if pushes else 0))

    async def begin_pushes(self, first_bytes: int = 0) -> PushBatch:
        """An empty batch. Raises ResourceExhausted where not even a first push has room."""
        self.owner.shard.outbox.check_capacity(1, first_bytes)
        return await self.pusher.begin()

    async def upload(self, pushes: PushBatch) -> None:
        """Uploads what was added. Raises ResourceExhausted before any of it is in vain."""
        self.owner.shard.outbox.check_capacity(pushes.count, pushes.size_bytes)
        await pushes.upload()

    async def is_elsewhere(self, target_id: str, source_id: str) -> bool:
        """Whether messages of a queue of this shard get into a target by being pushed to it.

        It is on another shard then, or a header decides their partition. Raises NotFound where the
        target is on no shard.
        """
        queues = self.owner.shard.queues
        if target_id not in queues and await self.pusher.elsewhere({target_id}):
            return True
        # Looked for now: it may have come while others were asked.
        target, source = queues.get(target_id), queues.get(source_id)
        if target is None:
            absence = self.owner.shard.absence(target_id)
            await self.owner.confirm(absence)
            raise absence
        return source is not None and not target.settings.accepts(source.settings)


def places_by_key(keys: Sequence[K]) -> dict[K, list[int]]:
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def grouped(keys: Iterable[K], size: int) -> Iterator[list[K]]:
    """The keys in their order, `size` at a time."""
    left = iter(keys)
    while some := list(islice(left, size)):
        yield some
