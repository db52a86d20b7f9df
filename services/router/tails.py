"""Reading the logs: one stream per log that all routes share, and own streams for those that lag.

::

    TailLog ──▶ Tail ──offer──▶ Route (log, broker 0)      a tail stands at one position and
                     └─offer──▶ Route (log, broker 1)      feeds every route that is not behind it

A route that is behind every tail (a new broker, one that was down) gets a tail of its own, which
joins the shared one when it has caught up. So an entry is read and decoded once, however many
brokers there are, except by those who lag; each of them costs ingest one more stream meanwhile.
Where the end of a log was purged, routes pass over it, so that every broker gets to the end.

Bounds: a route holds `Buffer.messages_max` messages or `Buffer.bytes_max` bytes, and far fewer that
are not judged yet: of judged ones only what is stored stays in memory. While one is full its tail
does not read, and gRPC's flow control holds ingest back. A route that is full while its broker is
down lets go of its entries and leaves; its log is read again from the broker's cursor once that is
back. One that is full because its broker is slow leaves the others after `grace_ms` and goes on by
itself. So a broker that is down costs no memory and stops no other, and a slow one holds the others
up once, for that long.

All routes together have a budget. Beyond it each route that holds anything is full, until that is
assigned or let go of; one that holds nothing takes one answer of ingest, in as little memory as it
can. So no route waits for memory that another one does not release.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from libs.serving.peers.calls import Backoff, PeerFailed, PeerHealth, peer_failures
from libs.serving.peers.channels import Connection
from libs.storage.records.log_bounds import LogGap, LogIds
from libs.storage.records.log_parts import PART_BYTES_MAX, PART_MESSAGES_MAX
from services.router.entries import LogEntry
from services.router.route import Route
from services.router.wire import log_entries
from slatemq._byte_budget import ByteBudget
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc

JOIN_GAP = 4_096
"""A route that begins joins a tail that is at most this many sequences behind it; the entries in
between are read in vain, which costs less than another stream."""

BACKFILLS_MAX = 4
"""Streams of one log that read for replays: ingest has 256 for all that read its log."""

WATCH_SECONDS = 1.0
"""How often a log that no stream reads, because every broker is down, is asked where it stands."""


class Buffer(NamedTuple):
    """What one route may hold, and how long a full one may hold up others.

    Attributes:
        messages_max: Messages. Each costs some two hundred bytes of memory once it is judged.
        waiting_max: Messages of them that are not judged yet. Each costs up to a kilobyte, shared
            between routes.
        bytes_max: Bytes on the wire.
        total_bytes_max: About what all routes and replays may take in memory together.
        grace_ms: How long a full route may hold up the other routes of its tail.
        silence_ms: Without an answer for this long a stream is dead: heartbeats come every 10 s.
    """

    messages_max: int = 262_144
    waiting_max: int = 32_768
    bytes_max: int = 24 * 1024 * 1024
    total_bytes_max: int = 256 * 1024 * 1024
    grace_ms: int = 1_000
    silence_ms: int = 25_000

    def is_full(self, route: Route) -> bool:
        """Whether the route may not be offered more."""
        if route.pending_count >= self.messages_max or route.pending_bytes >= self.bytes_max:
            return True
        return route.waiting_count >= self.waiting_max or route.must_drain


@dataclass(eq=False)
class Subscriber:
    """One route and its broker's side of it.

    Attributes:
        route: What is fed.
        wake: Called when entries were offered.
        is_live: Whether its broker answers.
        tail: What feeds it now; None = nothing.
    """

    route: Route
    wake: Callable[[], None]
    is_live: Callable[[], bool]
    tail: Tail | None = field(default=None, repr=False)


class Log:
    """The metadata log of one ingest shard, and the streams that read it.

    Attributes:
        ingest_shard: Whose log it is.
        durable_sequence: Its last durable message, as of the last `advance`.
        ids: Where its IDs jump, as of the last `open`.
        is_first: Whether this router is the first one of the log; see `reserve`.
        subscribers: All routes of this log.
        backfills: To be held while a stream reads for a replay.
        budget: The memory of the routes and replays of all logs.
    """

    def __init__(
        self,
        ingest_shard: int,
        connect: Connection,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        buffer: Buffer,
        budget: ByteBudget,
    ) -> None:
        """Read from the channel that `connect` returns, in tasks that `start` watches over."""
        self.ingest_shard = ingest_shard
        self.durable_sequence = 0
        self.ids = LogIds(0, [])
        self.is_first = True
        self.subscribers: list[Subscriber] = []
        self.tails: list[Tail] = []
        self.backfills = asyncio.Semaphore(BACKFILLS_MAX)
        self._connect = connect
        self.buffer = buffer
        self.budget = budget
        self.presence = PeerHealth(f"the log of ingest {ingest_shard}", connect.doubt)
        self._start = start

    @property
    def is_read(self) -> bool:
        return any(tail.is_open for tail in self.tails)

    @property
    def is_current(self) -> bool:
        """Whether its end is known as of some seconds ago at most."""
        return self.is_read or self.presence.is_up

    async def watch(self) -> None:
        """Ask where the log stands while no stream says it, so that the lag stays visible."""
        while True:
            if not self.is_read:
                try:
                    with peer_failures():
                        await self.open()
                    self.presence.mark_up()
                except PeerFailed as failure:
                    self.presence.mark_down(failure)
            await asyncio.sleep(WATCH_SECONDS)

    async def open(self) -> ingest_pb2_grpc.IngestServiceAsyncStub:
        """A stub for the log's ingest, once it has said where the log stands. Raises PeerFailed."""
        stub = ingest_pb2_grpc.IngestServiceStub(await self._connect())
        status = await stub.GetLogStatus(ingest_pb2.GetLogStatusRequest())
        if not isinstance(status, ingest_pb2.GetLogStatusResponse):
            raise PeerFailed("an answer that cannot be read")
        if status.shard != self.ingest_shard:
            raise PeerFailed(f"ingest shard {status.shard} answers there")
        self.advance(status.durable_sequence)
        gaps = [LogGap(gap.after_sequence, gap.next_sequence) for gap in status.gaps]
        self.ids = LogIds(status.first_sequence, gaps)
        return stub

    def advance(self, durable_sequence: int) -> None:
        self.durable_sequence = max(self.durable_sequence, durable_sequence)

    @asynccontextmanager
    async def reading(self, response: ingest_pb2.TailLogResponse) -> AsyncIterator[list[LogEntry]]:
        """The entries of an answer, read in steps; within the block the budget counts them.

        Those for which there is no memory are read again when they are judged. Raises PeerFailed.
        """
        entries: list[LogEntry] = []
        held_bytes = step_count = step_bytes = 0
        try:
            for entry in log_entries(response):
                if entry is None:
                    await asyncio.sleep(0)
                    continue
                if self.budget.used_bytes + entry.memory_bytes > self.budget.bytes_max:
                    entry.discard_runs()
                self.budget.take(entry.memory_bytes)
                held_bytes += entry.memory_bytes
                entries.append(entry)
                step_count += entry.messages_count
                step_bytes += entry.size_bytes
                if step_count >= PART_MESSAGES_MAX or step_bytes >= PART_BYTES_MAX:
                    step_count = step_bytes = 0
                    await asyncio.sleep(0)
            yield entries
        finally:
            self.budget.release(held_bytes)

    def has_more(self, route: Route) -> bool:
        """Whether the log is known to have entries that the route has room for and was not offered.

        They come without delay, unless ingest is down.
        """
        return route.position < self.durable_sequence and not self.buffer.is_full(route)

    def refresh(self, subscriber: Subscriber) -> None:
        """A route's cursor moved, or its broker came back: see that it is fed from where it is."""
        tail, route = subscriber.tail, subscriber.route
        if tail is not None and tail.position > route.position:
            tail.leave(subscriber)
            tail = None
        if tail is not None:
            tail.capacity.set()
        elif subscriber.is_live() and not self.buffer.is_full(route):
            self._tail_for(route.position).join(subscriber)

    def broker_down(self, subscriber: Subscriber) -> None:
        """Its broker is down, and what was sent to it is in the route again."""
        if subscriber.tail is None:
            subscriber.route.forget()  # It was full and has left: what came back is read again too.
        else:
            subscriber.tail.capacity.set()  # Others need not wait for a full route any longer.

    def _tail_for(self, position: int) -> Tail:
        for tail in self.tails:
            if 0 <= position - tail.position <= JOIN_GAP and not tail.is_paused:
                return tail
        tail = Tail(self, position)
        self.tails.append(tail)
        self._start(tail.run())
        return tail


class Tail:
    """One stream of a log.

    Attributes:
        position: The message up to which it was read.
        subscribers: The routes it feeds; without any it ends.
        capacity: Set when a full route may have capacity again.
        is_open: Whether the stream is answering.
        is_paused: Whether it waits for capacity.
    """

    def __init__(self, log: Log, position: int) -> None:
        self.position = position
        self.subscribers: list[Subscriber] = []
        self.capacity = asyncio.Event()
        self.is_open = False
        self.is_paused = False
        self._log = log

    def join(self, subscriber: Subscriber) -> None:
        """Feed this route too; it must not be behind."""
        subscriber.tail = self
        self.subscribers.append(subscriber)

    def leave(self, subscriber: Subscriber) -> None:
        subscriber.tail = None
        self.subscribers.remove(subscriber)
        self.capacity.set()

    async def run(self) -> None:
        """Read until no route is fed; start over, from the same place, whenever that fails."""
        backoff = Backoff()
        try:
            while self.subscribers:
                try:
                    with peer_failures():
                        await self._read(backoff)
                except PeerFailed as failure:
                    self._log.presence.mark_down(failure)
                    await asyncio.sleep(backoff.next_seconds())
        finally:
            if self in self._log.tails:
                self._log.tails.remove(self)

    async def _read(self, backoff: Backoff) -> None:
        stub = await self._log.open()
        self.is_open = True
        call = stub.TailLog(ingest_pb2.TailLogRequest(after_sequence=self.position))
        try:
            while await self._has_capacity():
                async with asyncio.timeout(self._log.buffer.silence_ms / 1000):
                    response = await call.read()
                if not isinstance(response, ingest_pb2.TailLogResponse):
                    raise PeerFailed("the log's stream ended")
                backoff.reset()
                self._log.presence.mark_up()
                self._log.advance(response.durable_sequence)
                async with self._log.reading(response) as entries:
                    self._take(entries, response.durable_sequence)
        except TimeoutError:
            raise PeerFailed("the log's stream is silent") from None
        finally:
            self.is_open = False
            call.cancel()

    def _take(self, entries: Sequence[LogEntry], durable_sequence: int) -> None:
        """Offer what came: without entries, nothing is left up to the last durable message."""
        log, before = self._log, self.position
        through = max(before, entries[-1].last if entries else durable_sequence)
        if not entries and through == before:
            return
        if any(later.first <= entry.last for entry, later in pairwise(entries)):
            raise PeerFailed("the log's entries are out of order")
        for subscriber in self.subscribers:
            subscriber.route.offer(before, entries, through)
            subscriber.wake()
        self.position = through
        for other in log.tails:
            met = before <= other.position <= self.position
            if met and other is not self and not other.is_paused and other.subscribers:
                for subscriber in list(self.subscribers):
                    self.leave(subscriber)
                    other.join(subscriber)
                return

    async def _has_capacity(self) -> bool:
        """Wait until every route that is fed has room; returns False when none is left."""
        buffer = self._log.buffer
        grace = asyncio.get_running_loop().time() + buffer.grace_ms / 1000
        while True:
            full = [s for s in self.subscribers if buffer.is_full(s.route)]
            for subscriber in full:
                if not subscriber.is_live():
                    subscriber.route.forget()
                    self.leave(subscriber)
            full = [s for s in full if s.tail is self]
            if not full:
                return bool(self.subscribers)
            if len(full) == len(self.subscribers):
                await self._wait_for_capacity(None)
            elif not await self._wait_for_capacity(grace):
                for subscriber in full:
                    subscriber.route.forget()
                    self.leave(subscriber)
                    self._log.refresh(subscriber)

    async def _wait_for_capacity(self, until: float | None) -> bool:
        """Wait for `capacity`, at most until this time of the loop; returns whether it came."""
        self.capacity.clear()
        self.is_paused = True
        try:
            async with asyncio.timeout_at(until):
                await self.capacity.wait()
        except TimeoutError:
            return False
        finally:
            self.is_paused = False
        return True
