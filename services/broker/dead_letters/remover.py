"""RemoveEntries, from what is wanted to what is durable: reads the rows, and removes bit by bit.

Each bit is one command, after which others have their turn: a call may name ten thousand buckets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from libs.storage.records.archived_records import ArchivedMessage
from services.broker.core.batches.remove import (
    DeadLetter,
    DoneRow,
    FailedRow,
    Outcome,
    archive,
    done_before,
    done_row,
    drop_archived,
    drop_waiting,
    prune_done,
    take_dead_letters,
)
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from services.broker.entries.finished_pages import ListReaders, TimeRange
from services.broker.shard.owner import ShardOwner
from slatemq.errors import NotFound, Unavailable

BUCKETS_AT_ONCE: Final = 16
"""Active buckets that one command changes: they are read together, and a lane has room for 64."""

GROUPS_A_COMMIT: Final = 8
"""So many of these at most wait to be stored: some megabytes."""

LETTER_ROWS_AT_ONCE: Final = 100
"""Rows of a failed list that are read and written in one turn; redrives have theirs in between."""

LETTERS_AT_ONCE: Final = 1000
"""Dead letters in the rows that one command changes, and those of one row at most beyond that."""

DONE_ROWS_AT_ONCE: Final = 200
DONE_MESSAGES_AT_ONCE: Final = 20_000
"""Rows of a done list that one command removes, and messages in them, those of one row at most
beyond that."""

DONE_ROWS_MAX: Final = 5000
DONE_MESSAGES_MAX: Final = 500_000
"""Where one call ends: some hundred milliseconds."""

TURN_S: Final = 10.0
"""How long to wait until a redrive has let go of the rows; it may be waiting for an ingest."""

ENTRY_BYTES: Final = 30
"""About what each entry of a bucket that is written again takes."""

K = TypeVar("K")
T = TypeVar("T")


class ListedDeadLetter(NamedTuple):
    """A dead letter, and in which row of its list it is."""

    order: int
    dead_letter: DeadLetter


class WaitingMessage(NamedTuple):
    """A message that may wait, and in which bucket."""

    place: Place
    message_id: int


class Remover:
    """Removes entries of one shard's queues. Outcomes are in the order of what was wanted."""

    def __init__(
        self,
        owner: ShardOwner,
        lists: ListReaders,
        grace_s: int,
    ) -> None:
        """Remove what is over for so long by this owner's clock."""
        self._owner = owner
        self._lists = lists
        self._grace_ms = grace_s * 1000

    # --- What waits ---------------------------------------------------------

    async def expired(self, queue: Queue, wanted: Sequence[WaitingMessage]) -> list[Outcome]:
        """Drops messages that are past their retention, where they wait."""
        outcomes = [Outcome.GONE] * len(wanted)
        by_place = by_key([one.place for one in wanted])
        for count, some in enumerate(_grouped(by_place, BUCKETS_AT_ONCE), 1):
            ids = {place: [wanted[n].message_id for n in by_place[place]] for place in some}
            found = await self._run(queue, partial(self._drop, queue, ids), len(some) * 1000)
            for place in some:
                for number, outcome in zip(by_place[place], found[place], strict=True):
                    outcomes[number] = outcome
            await asyncio.sleep(0)  # others have their turn, also where nothing is read or stored
            if count % GROUPS_A_COMMIT == 0:
                await self._owner.durable()  # not faster than it is stored
        in_flight = queue.in_flight.message_ids()
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
        async with turn(self._owner, f"done/{queue.queue_id}"):
            await self._owner.durable()
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
            await self._owner.durable()
        return removed, more

    async def _done_rows(self, queue: Queue, before_ms: int) -> AsyncIterator[DoneRow]:
        """The rows from the beginning of the list on, until one of which nothing may go."""
        if not before_ms:
            return
        async for order, heads in self._lists.done_heads.rows(
            queue, TimeRange(until_ms=before_ms), None
        ):
            going = [head for head in heads if head[1] < before_ms]
            if not going:
                return
            if len(going) == len(heads) and all(attempts <= 1 for _, _, attempts in going):
                yield DoneRow(order, len(heads), (), ())
                continue
            row = done_row(order, await self._lists.done.row(queue, order), before_ms)
            if row is not None:
                yield row

    async def _prune(self, queue: Queue, rows: Sequence[DoneRow]) -> int:
        def prune(_: int) -> int:
            return prune_done(self._owner.shard, queue, rows)

        written = sum(len(row.left) + len(row.tried) + 1 for row in rows)
        return await self._run(queue, prune, written) if rows else 0

    # --- Failed -------------------------------------------------------------

    async def failed(
        self, queue: Queue, wanted: Sequence[ListedDeadLetter], run: str = ""
    ) -> list[Outcome]:
        """Archives letters for a run; without one removes those past the queue's retention."""
        outcomes = [Outcome.GONE] * len(wanted)
        by_order = by_key([one.order for one in wanted])
        for some in _grouped(by_order, LETTER_ROWS_AT_ONCE):
            async with turn(self._owner, queue.queue_id):
                await self._owner.durable()
                rows: list[FailedRow] = []
                for order in some:
                    stored = await self._lists.failed.row(queue, order)
                    dead_letters = [wanted[number].dead_letter for number in by_order[order]]
                    rows.append(FailedRow(order, stored, dead_letters))
                    count = sum(len(row.stored) for row in rows)
                    if count < LETTERS_AT_ONCE and order != some[-1]:
                        continue
                    found = await self._run(queue, partial(self._take, queue, rows, run), count)
                    for row, item in zip(rows, found, strict=True):
                        for number, outcome in zip(by_order[row.order], item, strict=True):
                            outcomes[number] = outcome
                    rows = []
                await self._owner.durable()
        return outcomes

    def _take(
        self, queue: Queue, rows: Sequence[FailedRow], run: str, now_ms: int
    ) -> list[list[Outcome]]:
        failed_by_ms = None
        if not run:
            retention_s = queue.settings.failed_retention_s
            # What is kept for ever never failed long enough ago.
            failed_by_ms = now_ms - retention_s * 1000 - self._grace_ms if retention_s else -1
        outcomes, taken = take_dead_letters(
            self._owner.shard, queue, rows, failed_by_ms=failed_by_ms
        )
        if run:
            archive(queue, taken, run, now_ms)
        return outcomes

    async def archived(self, queue: Queue, wanted: Sequence[ListedDeadLetter]) -> list[Outcome]:
        """Drops archived letters that nobody wants back."""
        outcomes = [Outcome.GONE] * len(wanted)
        by_order = by_key([one.order for one in wanted])
        for some in _grouped(by_order, LETTER_ROWS_AT_ONCE):
            async with turn(self._owner, f"archived/{queue.queue_id}"):
                await self._owner.durable()
                for order in some:
                    stored = await self._lists.archived.row(queue, order)
                    dead_letters = [wanted[number].dead_letter for number in by_order[order]]

                    def drop(
                        _: int,
                        order: int = order,
                        stored: Sequence[ArchivedMessage] = stored,
                        dead_letters: Sequence[DeadLetter] = dead_letters,
                    ) -> list[Outcome]:
                        return drop_archived(self._owner.shard, queue, order, stored, dead_letters)

                    found = await self._run(queue, drop, len(stored))
                    for number, outcome in zip(by_order[order], found, strict=True):
                        outcomes[number] = outcome
                await self._owner.durable()
        return outcomes

    async def _run(self, queue: Queue, command: Callable[[int], T], entries_count: int) -> T:
        """Runs a command on a queue that still is there; raises NotFound."""

        def run(now_ms: int) -> T:
            if not self._owner.owns(queue):
                raise NotFound("queue", queue.queue_id)
            return command(now_ms)

        return await self._owner.run(run, ENTRY_BYTES * entries_count)


@asynccontextmanager
async def turn(owner: ShardOwner, name: str) -> AsyncIterator[None]:
    """Has a turn to take something out of rows, see LetterTurns; Unavailable after a while."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(TURN_S):
                await stack.enter_async_context(owner.dead_letters.of(name))
        except TimeoutError:
            raise Unavailable(
                "a redrive holds these rows, retry", reason="ROWS_BUSY", retry_after_ms=1000
            ) from None
        yield


def by_key(keys: Sequence[K]) -> dict[K, list[int]]:
    """Which places of a sequence have which key."""
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def _grouped(keys: Iterable[K], size: int) -> Iterator[list[K]]:
    left = iter(keys)
    while some := list(islice(left, size)):
        yield some
