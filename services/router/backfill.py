"""Replays: brings stored messages into queues that start in the past, beside live routing.

::

    Queue.replay ──▶ cursor ──TailLog──▶ piece, judged ──Backfill──▶ cursor ──▶ ... ──▶ end: done
                       ▲                                    │
                       └── the broker's cursor and config ──┘ refused, or failed

One task for each log and broker shard with replays, as long as there are some. Queues take turns;
those that stand at the same place of the log share the reading, which is from a stream of its own.
Only cursors are kept between two pieces, and the broker decides about these. So after any failure,
on either side, the next piece begins where the broker says; and two routers that do the same work
waste some, but bring nothing in twice.

A queue over whose piece a broker ended waits, and holds up no other. Then its piece goes while no
assignment is in flight: see decision 0056.

Live routing goes first: pieces are small, they are judged in steps so small that nothing else waits
for long, and after each piece the task rests for as long as that took.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grpc
import grpc.aio

from libs.filters import TooSlow
from libs.serving.peers.calls import (
    Backoff,
    PeerFailed,
    PeerHealth,
    PeerUnstorable,
    peer_failures,
    unstorable_wait_s,
)
from libs.serving.peers.channels import Connection
from services.router.entries import LogEntry
from services.router.metrics import Metrics
from services.router.pieces import PieceLimits
from services.router.routing import BrokerRules, Columns, QueueRule
from services.router.tails import Log
from services.router.wire import backfill_request, queue_rule
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc, ingest_pb2, ingest_pb2_grpc, queue_pb2

MATCHES_MAX = 1_024
"""Matches in one piece: the broker takes them in within some milliseconds."""

STEP_MAX = 64
"""Messages judged in between two looks at everything else: half a millisecond's work."""

TURN_PIECES = 32
"""Pieces before it is another queue's turn: each turn opens a stream."""

ANSWER_SECONDS = 30.0
"""A broker that has not answered by then counts as down: others wait for their turn at the log."""

DOWN_LOOK_S = 0.5
"""How often replays into a broker shard that is down look whether it is back: they read and judge
nothing meanwhile."""

REFRESH_SECONDS = 5.0
"""How long to wait for a config that the broker says is newer than the one known."""


@dataclass
class Span:
    """What is left of a queue's replay of one log, in IDs of messages."""

    cursor: int
    end: int


class ReplayingQueue:
    """A queue whose replay is not done, at one revision of its config.

    Attributes:
        spans: What is left, by ingest shard: of the parts of each log the first one.
    """

    def __init__(self, queue: queue_pb2.Queue) -> None:
        self.queue_id = queue.queue_id
        self.revision = queue.revision
        self.spans: dict[int, Span] = {}
        self._later: dict[int, deque[Span]] = {}
        for item in queue.replay.ranges:
            if item.cursor < item.end_sequence:
                span = Span(item.cursor, item.end_sequence)
                if self.spans.setdefault(item.ingest_shard, span) is not span:
                    self._later.setdefault(item.ingest_shard, deque()).append(span)
        self._rule: QueueRule = queue_rule(queue)

    def finish_span(self, ingest_shard: int) -> None:
        """The part of a log that comes first is done: go on with the next one, if there is one."""
        del self.spans[ingest_shard]
        if later := self._later.get(ingest_shard):
            self.spans[ingest_shard] = later.popleft()

    @cached_property
    def rules(self) -> BrokerRules:
        """The queue alone, to judge by."""
        rules = BrokerRules()
        rules.change([self._rule])
        return rules


class SharedPiece:
    """A piece of a log, judged by queues whose replays stand at its beginning.

    Attributes:
        previous: The message behind which it begins.
        last: The message with which it ends, so far.
        columns: The matches; one for each queue.
        messages_count: How many messages were judged.
    """

    def __init__(
        self, queues: Sequence[ReplayingQueue], ingest_shard: int, limits: PieceLimits
    ) -> None:
        spans = [queue.spans[ingest_shard] for queue in queues]
        self.previous = self.last = spans[0].cursor
        self.end = min(span.end for span in spans)
        self.columns: list[Columns] = [{} for _ in queues]
        self.messages_count = 0
        self._rules = [queue.rules for queue in queues]
        self._left = limits

    def is_complete(self) -> bool:
        """Whether it is to go as it is."""
        return self.last >= self.end or self._left.are_used_up

    def add(self, entry: LogEntry) -> Iterator[None]:
        """Judge the next entry; yields whenever that was a step's work. Raises TooSlow."""
        if entry.first > self.end:
            self.finish()
            return
        if entry.last > self.end:
            entry = entry.between(self.previous, self.end)
        matches_count = 0
        for rules, columns in zip(self._rules, self.columns, strict=True):
            left_at: int | None = 0
            rest = None
            while left_at is not None:
                judgement = rules.judge(entry, columns, left_at, rest)
                matches_count += judgement.matches_count
                left_at, rest = judgement.left_at, judgement.rest
                if left_at is not None:
                    yield
        self.last = entry.last
        self.messages_count += entry.messages_count
        self._left = self._left._replace(
            messages_max=self._left.messages_max - entry.messages_count,
            matches_max=self._left.matches_max - matches_count,
        )

    def finish(self) -> None:
        """The log has nothing more up to the end."""
        self.last = self.end


class LogReader:
    """Reads a log on, piece by piece, from one stream for as long as pieces follow one another."""

    def __init__(self, log: Log, stub: ingest_pb2_grpc.IngestServiceAsyncStub) -> None:
        """Read from this ingest. Methods raise PeerFailed."""
        self._log = log
        self._stub = stub
        self._call: Any = None
        self._position = 0
        self._entries: deque[LogEntry] = deque()
        self._counted_bytes = 0

    def close(self) -> None:
        self._hold(())
        if self._call is not None:
            self._call.cancel()

    def _hold(self, entries: Sequence[LogEntry]) -> None:
        counted_bytes = self._counted_bytes
        self._counted_bytes = sum(entry.memory_bytes for entry in entries)
        self._log.budget.change(counted_bytes, self._counted_bytes)
        self._entries = deque(entries)

    async def begin(self, after: int) -> None:
        """Go on behind this sequence."""
        if self._call is None or self._position != after:
            self.close()
            self._position = after
            request = ingest_pb2.TailLogRequest(after_sequence=after)
            self._call = self._stub.TailLog(request)

    async def next(self, until: int) -> LogEntry | None:
        """The next entry; None when there is none up to this sequence, what stood there is gone."""
        entry = await self._read(until)
        # An entry that the position is inside of may have ended there since: the rest was purged.
        while entry is not None and entry.last <= self._position:
            entry = await self._read(until)
        if entry is None:
            return None
        if entry.first <= self._position:
            entry = entry.between(self._position, entry.last)
        self._position = entry.last
        return entry

    async def _read(self, until: int) -> LogEntry | None:
        while not self._entries:
            self._hold(())
            try:
                async with asyncio.timeout(self._log.buffer.silence_ms / 1000):
                    response = await self._call.read()
            except TimeoutError:
                raise PeerFailed("the log's stream is silent") from None
            if not isinstance(response, ingest_pb2.TailLogResponse):
                raise PeerFailed("the log's stream ended")
            async with self._log.reading(response) as entries:
                if not entries and response.durable_sequence >= until:
                    return None
                self._hold(entries)
        return self._entries.popleft()


class Backfills:
    def __init__(
        self,
        broker_shard: int,
        connect: Connection,
        refresh: Callable[[float], Coroutine[Any, Any, None]],
        quarantine: Callable[[TooSlow, int], Coroutine[Any, Any, None]],
        alone: Callable[[], AbstractAsyncContextManager[None]],
        is_live: Callable[[], bool],
        start: Callable[[Coroutine[Any, Any, None]], object],
        limits: PieceLimits,
        metrics: Metrics,
    ) -> None:
        """Send on the channel that `connect` returns, in tasks that `start` watches over.

        `refresh` learns what changed at the broker, or raises PeerFailed after this many seconds;
        `quarantine` has it leave out a queue that takes too long, as of this revision. No
        assignment is in flight inside `alone`, which raises PeerFailed while the broker is down:
        while it is not `is_live`.
        """
        self._broker_shard = broker_shard
        self._connect = connect
        self._refresh = refresh
        self._quarantine = quarantine
        self._alone = alone
        self._is_live = is_live
        self._start = start
        self._limits = limits._replace(matches_max=min(limits.matches_max, MATCHES_MAX))
        self._metrics = metrics
        self._logs: dict[int, Log] = {}
        self._queues: dict[str, ReplayingQueue] = {}
        self._running: set[int] = set()
        # By queue and log: the last message of the piece over which the broker ended.
        self._suspects: dict[tuple[str, int], int] = {}
        self._resting: set[tuple[str, int]] = set()

    def add_log(self, log: Log) -> None:
        self._logs[log.ingest_shard] = log
        self._see_to(log.ingest_shard)

    def close(self) -> None:
        """Bring nothing more in: what runs ends with its step."""
        self._queues.clear()
        self._logs.clear()

    def learn(self, changes: Iterable[queue_pb2.QueueChange]) -> None:
        """Take in queues that changed: their replays are judged by their newest config."""
        for change in changes:
            match change.WhichOneof("change"):
                case "queue":
                    queue = ReplayingQueue(change.queue)
                    self._queues.pop(queue.queue_id, None)
                    if queue.spans and not change.queue.HasField("quarantine"):
                        self._queues[queue.queue_id] = queue
                    for ingest_shard in queue.spans:
                        self._see_to(ingest_shard)
                case "deleted_queue_id":
                    self._queues.pop(change.deleted_queue_id, None)

    def _see_to(self, ingest_shard: int) -> None:
        log = self._logs.get(ingest_shard)
        if log is None or ingest_shard in self._running or not self._waiting(ingest_shard):
            return
        self._running.add(ingest_shard)
        self._start(self._run(log))

    def _waiting(self, ingest_shard: int) -> list[ReplayingQueue]:
        """The queues that still need this log, by ID, without those that wait."""
        found = [
            queue
            for queue in self._queues.values()
            if ingest_shard in queue.spans and (queue.queue_id, ingest_shard) not in self._resting
        ]
        return sorted(found, key=lambda queue: queue.queue_id)

    async def _run(self, log: Log) -> None:
        """Bring in a log until no queue needs it any more."""
        shard = log.ingest_shard
        health = PeerHealth(
            f"the replay of log {shard} into broker {self._broker_shard}", self._connect.doubt
        )
        backoff = Backoff()
        last_id = ""
        try:
            while queues := self._waiting(shard):
                if not self._is_live():
                    await asyncio.sleep(DOWN_LOOK_S)
                    continue
                turn = next((queue for queue in queues if queue.queue_id > last_id), queues[0])
                last_id = turn.queue_id
                try:
                    with peer_failures():
                        slow = await self._take_turn(log, last_id)
                        if slow is not None:
                            await self._quarantine(*slow)
                except PeerFailed as failure:
                    health.mark_down(failure)
                    await asyncio.sleep(backoff.next_seconds())
                else:
                    health.mark_up()
                    backoff.reset()
        finally:
            self._running.discard(shard)

    async def _take_turn(self, log: Log, queue_id: str) -> tuple[TooSlow, int] | None:
        """Bring in some pieces of what a queue needs next, for all queues that have come as far.

        Gives what ended it if a queue took too long, and the revision by which that was judged: the
        queue may have changed since.
        """
        shard = log.ingest_shard
        async with log.backfills:
            with closing(LogReader(log, await log.open())) as reader:
                for _ in range(TURN_PIECES):
                    queues = self._waiting(shard)
                    turn = next((queue for queue in queues if queue.queue_id == queue_id), None)
                    if turn is None:
                        return None
                    cursor = turn.spans[shard].cursor
                    group = [queue for queue in queues if queue.spans[shard].cursor == cursor]
                    began = _now_s()
                    piece = SharedPiece(group, shard, self._limits)
                    try:
                        await self._fill(piece, reader)
                    except TooSlow as slow:
                        return slow, next(q.revision for q in group if q.queue_id == slow.queue_id)
                    for queue, columns in zip(group, piece.columns, strict=True):
                        suspect = queue.queue_id, shard
                        alone = self._alone() if suspect in self._suspects else nullcontext()
                        asked = _now_s()
                        try:
                            async with alone:
                                began += _now_s() - asked  # Other work had that time.
                                with peer_failures():
                                    await self._send(log, queue, piece, columns)
                            span = queue.spans.get(shard)
                            if span is None or span.cursor >= self._suspects.get(suspect, 0):
                                self._suspects.pop(suspect, None)
                        except PeerUnstorable as failure:
                            self._suspect(queue.queue_id, shard, piece.last)
                            raise PeerFailed(
                                f"{failure}; queue {queue.queue_id} waits for up to a minute"
                            ) from failure
                    # As long as it took: half of the time is left to other work.
                    await asyncio.sleep(_now_s() - began)
        return None

    def _suspect(self, queue_id: str, ingest_shard: int, last: int) -> None:
        """This log waits for this queue: the broker ended over what was sent, up to this message.

        Sent at once, it would end the next broker process too, and all that others do there.
        """
        self._suspects[queue_id, ingest_shard] = last
        self._resting.add((queue_id, ingest_shard))
        self._start(self._end_wait(queue_id, ingest_shard))

    async def _end_wait(self, queue_id: str, ingest_shard: int) -> None:
        await asyncio.sleep(unstorable_wait_s())
        self._resting.discard((queue_id, ingest_shard))
        self._see_to(ingest_shard)

    async def _fill(self, piece: SharedPiece, reader: LogReader) -> None:
        step_max, judged_count = min(self._limits.step_max, STEP_MAX), 0
        await reader.begin(piece.previous)
        while not piece.is_complete():
            entry = await reader.next(piece.end)
            if entry is None:
                piece.finish()
                return
            for _ in piece.add(entry):
                await asyncio.sleep(0)
            judged_count += entry.messages_count
            if judged_count >= step_max:
                judged_count = 0
                await asyncio.sleep(0)

    async def _send(
        self, log: Log, queue: ReplayingQueue, piece: SharedPiece, columns: Columns
    ) -> None:
        """Send a queue's part of a piece, and go on from where the broker says."""
        ingest_shard = log.ingest_shard
        span = queue.spans[ingest_shard]
        request = backfill_request(
            queue.queue_id,
            queue.revision,
            ingest_shard,
            piece.previous,
            piece.last,
            columns,
            piece.messages_count,
            log.ids.count(piece.last, span.end),
        )
        stub = assignment_pb2_grpc.AssignmentServiceStub(await self._connect())
        try:
            response = await stub.Backfill(request, timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            # The queue is gone, or was created again without a replay.
            queue.spans.pop(ingest_shard, None)
            return
        if not isinstance(response, assignment_pb2.BackfillResponse):
            raise PeerFailed("an answer that cannot be read")
        span.cursor = response.cursor
        if response.applied:
            self._metrics.backfilled(self._broker_shard, ingest_shard, columns)
        if span.cursor >= span.end:
            queue.finish_span(ingest_shard)
        elif response.queue_revision > queue.revision:
            await self._newer(queue)
        elif not response.applied and response.cursor == piece.previous:
            raise PeerFailed(f"a piece of log {ingest_shard} was refused without a reason")

    async def _newer(self, queue: ReplayingQueue) -> None:
        """Wait for the queue's newer config. Raises PeerFailed."""
        if self._queues.get(queue.queue_id) is queue:
            await self._refresh(REFRESH_SECONDS)
        if self._queues.get(queue.queue_id) is queue:
            raise PeerFailed(f"queue {queue.queue_id} has changed, and its config is not known yet")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
