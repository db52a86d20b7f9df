"""The copy of a queue's rows to the shard that it moves to, and how many queues are copied at once.

    header ──taken──► page, page, … several at a time ──all taken──► the last page

The pages have different rows, so their order does not matter, but that of the first and the last.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.storage.database.slate import Database
from libs.storage.errors import StorageError, first_raised
from libs.storage.records.move_records import MoveRecord
from services.broker.moves.rows import header_of, pages_of
from services.broker.moves.targets import ArrivalTargets
from slatemq.errors import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SlateMQError,
    Unavailable,
    Unimplemented,
)
from slatemq.v1.move_pb2 import ArrivalHeader, StoredRow

log = logging.getLogger(__name__)

MOVES_AT_ONCE: Final = 4
"""Queues copied at the same time."""

SENT_BYTES_MAX: Final = 4 << 20
"""Rows sent that the target has not stored yet, of one queue: they share commits, which may be
seconds apart. More would take longer over a slow network than a call may."""

RETRY_S: Final = 0.5

GIVE_UP_S: Final = 30.0
"""A move whose target has taken no page for so long is cancelled: the queue is without service
meanwhile. However long all pages take, it goes on as long as one after the other is taken. As long,
rows that cannot be read now are read again."""

REFUSALS: Final = (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unimplemented,
)
"""Answers of a target that a repeat would get again."""


@dataclass(eq=False)
class CopyTurns:
    """The queues that are being copied: the others are served until they have a turn."""

    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOVES_AT_ONCE))
    _queues: set[str] = field(default_factory=set, init=False)

    async def take(self, queue_id: str) -> None:
        """Waits for a turn, unless the queue has one: it has none after a restart."""
        if queue_id not in self._queues:
            await self._turns.acquire()
            self._queues.add(queue_id)

    async def take_free(self, queue_id: str) -> None:
        """Raises Unavailable (MOVES_RUNNING) where there is none now."""
        if self._turns.locked():
            raise Unavailable(
                f"{MOVES_AT_ONCE} queues are being copied from this shard: {queue_id!r} can move "
                "once one of them is copied",
                reason="MOVES_RUNNING",
            )
        await self.take(queue_id)

    def end(self, queue_id: str) -> None:
        """Does nothing for a queue that has no turn."""
        if queue_id in self._queues:
            self._queues.discard(queue_id)
            self._turns.release()


@dataclass(eq=False)
class Copy:
    """One departure's copy, which may be run again.

    Attributes:
        report: Called with the rows that the target has, and what the copy waits for.
    """

    database: Database
    targets: ArrivalTargets
    queue_id: str
    record: MoveRecord
    report: Callable[[int, str], None]
    _copied_rows_count: int = field(default=0, init=False)
    _taken_s: float = field(default=0.0, init=False)
    _sent_bytes: int = field(default=0, init=False)
    _taken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _furthest: int = field(default=-1, init=False)
    _since_s: float = field(default=0.0, init=False)

    async def run(self) -> None:
        """Sends all rows to the target, from the first on.

        Raises what the target refuses them with, its last error once it has taken none for
        GIVE_UP_S, and StorageError.
        """
        self._copied_rows_count = self._sent_bytes = 0
        header = await header_of(self.database, self.queue_id)
        await self._send((), header=header)
        last: list[StoredRow] = []
        with first_raised(SlateMQError, StorageError):
            async with asyncio.TaskGroup() as sending:
                async for page in pages_of(self.database, self.queue_id, header):
                    if last:
                        await self._room_for(last)
                        sending.create_task(self._send_one(last))
                    last = page
        await self._send(last, is_last=True)

    def gives_up(self) -> bool:
        """Whether the copy has failed for GIVE_UP_S, and got no further meanwhile.

        Call it after each failure to read.
        """
        now_s = time.monotonic()
        if self._copied_rows_count > self._furthest:
            self._furthest, self._since_s = self._copied_rows_count, now_s
        return now_s - self._since_s > GIVE_UP_S

    async def _room_for(self, page: Sequence[StoredRow]) -> None:
        size_bytes = _size_of(page)
        while self._sent_bytes and self._sent_bytes + size_bytes > SENT_BYTES_MAX:
            self._taken.clear()
            await self._taken.wait()
        self._sent_bytes += size_bytes

    async def _send_one(self, page: Sequence[StoredRow]) -> None:
        await self._send(page)
        self._sent_bytes -= _size_of(page)
        self._taken.set()

    async def _send(
        self,
        rows: Sequence[StoredRow],
        *,
        header: ArrivalHeader | None = None,
        is_last: bool = False,
    ) -> None:
        """Sends a page until the target has stored it."""
        begun_s = time.monotonic()
        while True:
            try:
                await self.targets.send(
                    self.record.shard,
                    self.queue_id,
                    self.record.number,
                    rows,
                    header=header,
                    is_last=is_last,
                )
            except REFUSALS:
                raise
            except SlateMQError as error:
                if time.monotonic() > max(begun_s, self._taken_s) + GIVE_UP_S:
                    raise
                log.warning("a page of queue %s waits: %s", self.queue_id, error)
                self.report(self._copied_rows_count, str(error))
            else:
                self._taken_s = time.monotonic()
                self._copied_rows_count += len(rows)
                self.report(self._copied_rows_count, "")
                return
            await asyncio.sleep(RETRY_S)


def _size_of(page: Sequence[StoredRow]) -> int:
    return sum(len(row.key) + len(row.value) for row in page)
