"""Group commit: changes apply in memory, one loop makes them durable, then responses are sent.

    mark_dirty ──▶ gathering ──drain──▶ written (in memory) ──flush, sync──▶ durable ──▶ responses
                       ▲                      at most two, in order                │
                       └──────────── the next commit gathers meanwhile ◀───────────┘

A small commit that finds no other in flight is written and made durable in one step where the
database can do that (`Database.write`), and the next one gathers until it is durable.

All waiters share one future per commit. Commits become durable strictly in order. When one
fails, memory is ahead of the disk: every waiter gets an error and there is never another commit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from libs.storage.database.clocks import Clock
from libs.storage.database.pace import FixedPace, Pace
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import StorageError, StoreFailed, Unstorable
from libs.storage.layout.own_keys import (
    CLOCK_KEY,
)
from libs.storage.records.states import encode_clock

MAX_IN_FLIGHT: Final = 2
"""Commits written and not yet durable: one being synced while the next is written."""

AT_ONCE_BYTES: Final = 256 << 10
"""Commits up to this size that find no other in flight are made in one step, off the event loop.
Larger ones overlap: copying their bytes takes longer than waking up for each step."""


class Source(Protocol):
    """The owner of the records to commit."""

    async def drain(self, batch: Batch) -> None:
        """Put everything that changed since the last drain.

        Other tasks may run meanwhile, and what they change belongs to this commit: the last step
        puts all of it. What takes long to encode is put in steps, or later (`Batch.put_later`).

        `batch.commit` is the number of this commit, which is passed to the `on_durable` hooks. Put
        nothing if nothing changed: the hooks are not called then. An error here fails the commit.
        """


class _Commit:
    __slots__ = ("done", "has_changes", "is_proof", "number", "size_bytes", "started_at")

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_proof = False
        self.has_changes = True
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.size_bytes = 0
        self.started_at = 0.0


class GroupCommit:
    """The commit loop of one database; `run` must be running for anything to become durable.

    `pace` is the least time between the starts of two commits: none on a disk, more where each
    commit is a paid PUT.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        source: Source,
        pace: Pace | None = None,
        in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self._database = database
        self._clock = clock
        self._source = source
        self.pace = pace or FixedPace()
        self._in_flight: deque[_Commit] = deque()
        self._slots = asyncio.Semaphore(in_flight)
        self._wake = asyncio.Event()
        self._hooks: list[Callable[[int], None]] = []
        self._number = 1
        self._gathering: _Commit | None = None
        self._gathered_bytes = 0
        self.hold = asyncio.Lock()
        """No commit begins while it is held: for changes made in steps that belong into one commit.

        Do not wait for a commit while holding it.
        """
        self._closing = False
        self._running = False
        self._finished = asyncio.Event()
        self._finisher: asyncio.Task[None] | None = None
        self.gather_ms = 0
        """How long a commit gathers before it begins: for sources whose callers wait for other
        things, so that more shares a commit."""
        self.measure: Callable[[float, int], None] | None = None
        """Called with the seconds that each commit took to be durable, and its bytes."""
        self.failed: StorageError | None = None
        """Why there will be no further commit; None while all is well."""

    def mark_dirty(
        self, size_bytes: int = 0, failed: Callable[[StorageError], None] | None = None
    ) -> None:
        """Note that something changed in memory, for the next commit to drain.

        `size_bytes` counts towards `uncommitted_bytes` until the drain measures the real size.
        `failed` is called if that commit fails; where an earlier one has failed, its error is
        raised here.
        """
        if failed is not None and self.failed is not None:
            raise self.failed
        if self._gathering is None:
            self._gathering = _Commit(self._number)
            self._wake.set()
        self._gathered_bytes += size_bytes
        if failed is not None:
            self._gathering.done.add_done_callback(partial(_pass_failure_on, failed))

    async def durable(self) -> None:
        """Wait for the newest commit that can contain what was applied so far, if there is one.

        Raises the error of a failed commit. Cancelling one waiter does not affect the others.
        """
        newest = self.newest()
        if newest is not None:
            await asyncio.shield(newest)

    async def prove_ownership(self) -> None:
        """Wait for a commit that begins after this call: only the database's owner can make one.

        A process that was replaced may not know it yet, and still read from its memory. So prove
        ownership before a response that is final, such as "there is none" or "it is too late".
        Raises the error of a failed commit, Fenced among them.
        """
        self.mark_dirty()
        if self._gathering is not None:
            self._gathering.is_proof = True
        await self.durable()

    def newest(self) -> asyncio.Future[None] | None:
        """The future of that commit, to attach callbacks to; do not cancel it.

        Raises the error of a failed commit.
        """
        if self.failed is not None:
            raise self.failed
        newest = self._gathering or (self._in_flight[-1] if self._in_flight else None)
        return newest.done if newest is not None else None

    def on_durable(self, callback: Callable[[int], None]) -> None:
        """Call `callback(commit number)` after each durable commit, before its waiters go on.

        It is not called for a commit without changes (see `prove_ownership`).
        """
        self._hooks.append(callback)

    def overdue_ms(self) -> int:
        """Age of the oldest commit in flight, in milliseconds; 0 if there is none."""
        if not self._in_flight:
            return 0
        return int((time.monotonic() - self._in_flight[0].started_at) * 1000)

    def reading_ms(self) -> int:
        """For how long the database's oldest read has waited for the store; 0: none does."""
        return self._database.reading_ms()

    @property
    def uncommitted_bytes(self) -> int:
        """Bytes gathered or in flight, not durable yet: the measure for back-pressure."""
        return self._gathered_bytes + sum(one.size_bytes for one in tuple(self._in_flight))

    async def run(self) -> None:
        """Commit until closed. Raises the error of a failed commit; the process must stop then."""
        self._running = True
        try:
            while self.failed is None:
                await self._wake.wait()
                await self._pause(self.gather_ms / 1000)
                await self._slots.acquire()
                if self._gathering is None or self.failed is not None:
                    break
                await self._commit(self._gathering)
            if self._finisher is not None:
                await self._finisher
            if self.failed is not None:
                raise self.failed
        except asyncio.CancelledError:
            self._fail(StoreFailed("the commit loop was stopped"))
            raise
        finally:
            self._running = False
            self._finished.set()

    async def close(self) -> None:
        """Commit what is still dirty, then end `run`. Never raises: look at `failed`.

        Await the task of `run` afterwards.
        """
        self._closing = True
        self._wake.set()
        if self._running:
            await self._finished.wait()

    async def _commit(self, commit: _Commit) -> None:
        await asyncio.sleep(0)  # tasks that are ready to run may still join this commit
        if self.failed is not None:
            return
        started = time.monotonic()
        batch = Batch()
        batch.commit = commit.number
        try:
            async with self.hold:
                await self._source.drain(batch)
        except Exception as error:  # noqa: BLE001 - a half-drained source must not commit again
            self._fail(error)
            return
        if self._gathering is None:
            return  # An earlier one has failed meanwhile.
        self._gathering = None
        self._gathered_bytes = 0
        self._wake.clear()
        if self._closing:
            self._wake.set()
        commit.has_changes = len(batch) > 0
        if not commit.has_changes and not commit.is_proof:
            self._slots.release()
            self._release_empty(commit)
            return
        batch.put(CLOCK_KEY, encode_clock(self._clock.now_ms()))
        commit.size_bytes = batch.size_bytes
        commit.started_at = started
        self._number += 1
        self._in_flight.append(commit)
        is_alone = len(self._in_flight) == 1
        try:
            alone = is_alone and commit.size_bytes <= AT_ONCE_BYTES
            is_durable = await self._database.write(batch, alone)
        except Exception as error:  # noqa: BLE001 - memory is ahead of the disk
            self._fail(error, commit)
            return
        if is_durable:
            self._conclude(commit)
        else:
            self._finisher = asyncio.create_task(self._finish(commit, self._finisher))
        await self._pause(started + self.pace.interval_s() - time.monotonic())

    async def _finish(self, commit: _Commit, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        if self.failed is not None:
            return
        try:
            await self._database.flush()
        except Exception as error:  # noqa: BLE001 - no answer may rest on what went wrong
            self._fail(error)
            return
        self._conclude(commit)

    def _conclude(self, commit: _Commit) -> None:
        try:
            self._in_flight.popleft()
            duration_s = time.monotonic() - commit.started_at
            self.pace.took(duration_s)
            if self.measure is not None:
                self.measure(duration_s, commit.size_bytes)
            if commit.has_changes:
                for hook in self._hooks:
                    hook(commit.number)
        except Exception as error:  # noqa: BLE001 - no answer may rest on what went wrong
            self._fail(error, commit)
            return
        commit.done.set_result(None)
        self._slots.release()

    def _release_empty(self, commit: _Commit) -> None:
        """Let the waiters of an empty commit wait for the commits in flight, if there are any."""
        if not self._in_flight:
            commit.done.set_result(None)
            return

        def follow(newest: asyncio.Future[None]) -> None:
            error = newest.exception()
            if error is None:
                commit.done.set_result(None)
            else:
                commit.done.set_exception(error)
                commit.done.exception()

        self._in_flight[-1].done.add_done_callback(follow)

    async def _pause(self, seconds: float) -> None:
        if seconds > 0 and not self._closing:
            await asyncio.sleep(seconds)

    def _fail(self, error: BaseException, commit: _Commit | None = None) -> None:
        """End all commits: this one failed, or the one that gathers.

        Where it has a record that cannot be encoded, what is in the others can be, and is perhaps
        stored by now: they get another error.
        """
        if self.failed is None:
            if isinstance(error, StorageError):
                self.failed = error
            else:
                self.failed = StoreFailed(f"the commit loop broke: {error!r}")
                self.failed.__cause__ = error
        of_others = self.failed
        if isinstance(self.failed, Unstorable):
            of_others = StoreFailed(f"another commit failed: {self.failed}")
        # It comes first: who has a part in others too is to know what cannot be stored.
        waiting = [self._gathering if commit is None else commit, *self._in_flight, self._gathering]
        self._in_flight.clear()
        self._gathering = None
        for one in waiting:
            if one is not None and not one.done.done():
                one.done.set_exception(self.failed if one is waiting[0] else of_others)
                one.done.exception()  # marks it as retrieved: there may be no waiter
        self._wake.set()
        self._slots.release()


def _pass_failure_on(failed: Callable[[StorageError], None], done: asyncio.Future[None]) -> None:
    error = done.exception()
    if isinstance(error, StorageError):  # as it always is: see `_fail`
        failed(error)
