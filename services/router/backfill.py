"""Bringing stored messages into queues that start in the past, behind the back of live routing.

::

    Queue.replay ──▶ cursor ──TailLog──▶ piece, judged ──Backfill──▶ cursor ──▶ ... ──▶ end: done
                       ▲                                    │
                       └── the broker's cursor and config ──┘ refused, or failed

One task for each log and broker shard with replays, as long as there are some. Queues take turns;
those that stand at the same place of the log share the reading. A piece is read from a stream of
its own, which is closed behind it: nothing is kept between two pieces but cursors, and the broker
decides about these. So whatever fails, on whichever side, the next piece begins where the broker
says; and two routers that do the same work cost work, and bring nothing in twice.

Live routing goes first: a piece is judged in steps so small that nothing else waits for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grpc
import grpc.aio

from libs.serving.peers import Backoff, PeerFailed, Presence, peer_failures
from services.router.metrics import Metrics
from services.router.route import PieceLimits
from services.router.routing import BrokerRules, Columns, LogEntry, QueueRule
from services.router.tails import Log
from services.router.wire import backfill_request, log_entries, queue_rule
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc, ingest_pb2, queue_pb2

MATCHES_MAX = 4_096
"""Matches in one piece: the broker takes them in within some milliseconds."""

STEP_MAX = 64
"""Messages judged in between two looks at everything else: half a millisecond's work."""

REFRESH_SECONDS = 5.0
"""How long to wait for a config that the broker says is newer than the one known."""


@dataclass
class Span:
    """What is left of a queue's replay of one log, in sequences."""

    cursor: int
    end: int


class ReplayingQueue:
    """A queue whose replay is not done, at one revision of its config.

    Attributes:
        spans: What is left, by ingest shard.
    """

    def __init__(self, queue: queue_pb2.Queue) -> None:
        """Go on where this queue, as its broker told it, stands."""
        self.queue_id = queue.queue_id
        self.revision = queue.revision
        self.spans = {
            told.ingest_shard: Span(told.cursor, told.end_sequence)
            for told in queue.replay.ranges
            if told.cursor < told.end_sequence
        }
        self._rule: QueueRule = queue_rule(queue)

    @cached_property
    def rules(self) -> BrokerRules:
        """The queue alone, to judge by."""
        rules = BrokerRules()
        rules.change([self._rule])
        return rules


class SharedPiece:
    """A piece of a log, judged by queues whose replays stand at its beginning.

    Attributes:
        previous: Sequence behind which it begins.
        last: Sequence with which it ends, so far.
        columns: The matches; one for each queue.
    """

    def __init__(
        self, queues: Sequence[ReplayingQueue], ingest_shard: int, limits: PieceLimits
    ) -> None:
        """Begin an empty piece."""
        spans = [queue.spans[ingest_shard] for queue in queues]
        self.previous = self.last = spans[0].cursor
        self.end = min(span.end for span in spans)
        self.columns: list[Columns] = [{} for _ in queues]
        self._rules = [queue.rules for queue in queues]
        self._left = limits

    def is_complete(self) -> bool:
        """Whether it is to go as it is."""
        return self.last >= self.end or self._left.are_used_up

    def add(self, entry: LogEntry) -> None:
        """Judge the next entry."""
        if entry.sequence <= self.last:
            raise PeerFailed("the log's entries are out of order")
        if entry.sequence > self.end:
            self.finish()
            return
        matches_count = 0
        for rules, columns in zip(self._rules, self.columns, strict=True):
            matches_count += rules.judge(entry, columns).matches_count
        self.last = entry.sequence
        self._left = self._left._replace(
            messages_max=self._left.messages_max - len(entry.messages),
            matches_max=self._left.matches_max - matches_count,
        )

    def finish(self) -> None:
        """The log has nothing more up to the end."""
        self.last = self.end


class Backfills:
    """The replays of one broker shard's queues."""

    def __init__(
        self,
        broker_shard: int,
        connect: Callable[[], Coroutine[Any, Any, grpc.aio.Channel]],
        refresh: Callable[[float], Coroutine[Any, Any, None]],
        start: Callable[[Coroutine[Any, Any, None]], object],
        limits: PieceLimits,
        metrics: Metrics,
    ) -> None:
        """Send on the channel that `connect` gives, in tasks that `start` watches over.

        `refresh` learns what changed at the broker, within so many seconds, or raises PeerFailed.
        """
        self._broker_shard = broker_shard
        self._connect = connect
        self._refresh = refresh
        self._start = start
        self._limits = limits._replace(matches_max=min(limits.matches_max, MATCHES_MAX))
        self._metrics = metrics
        self._logs: dict[int, Log] = {}
        self._queues: dict[str, ReplayingQueue] = {}
        self._running: set[int] = set()

    def add_log(self, log: Log) -> None:
        """Bring in what this log has, too."""
        self._logs[log.ingest_shard] = log
        self._see_to(log.ingest_shard)

    def learn(self, changes: Iterable[queue_pb2.QueueChange]) -> None:
        """Take in queues that changed: their replays are judged by their newest config."""
        for change in changes:
            match change.WhichOneof("change"):
                case "queue":
                    queue = ReplayingQueue(change.queue)
                    self._queues.pop(queue.queue_id, None)
                    if queue.spans:
                        self._queues[queue.queue_id] = queue
                    for ingest_shard in queue.spans:
                        self._see_to(ingest_shard)
                case "deleted_queue_id":
                    self._queues.pop(change.deleted_queue_id, None)

    def _see_to(self, ingest_shard: int) -> None:
        """See that a task is at work if there is any."""
        log = self._logs.get(ingest_shard)
        if log is None or ingest_shard in self._running or not self._waiting(ingest_shard):
            return
        self._running.add(ingest_shard)
        self._start(self._run(log))

    def _waiting(self, ingest_shard: int) -> list[ReplayingQueue]:
        """The queues that still need this log, by ID."""
        found = [queue for queue in self._queues.values() if ingest_shard in queue.spans]
        return sorted(found, key=lambda queue: queue.queue_id)

    async def _run(self, log: Log) -> None:
        """Bring in a log until no queue needs it any more."""
        shard = log.ingest_shard
        presence = Presence(f"the replay of log {shard} into broker {self._broker_shard}")
        backoff = Backoff()
        last_id = ""
        try:
            while queues := self._waiting(shard):
                turn = next((queue for queue in queues if queue.queue_id > last_id), queues[0])
                last_id = turn.queue_id
                cursor = turn.spans[shard].cursor
                group = [queue for queue in queues if queue.spans[shard].cursor == cursor]
                try:
                    with peer_failures():
                        await self._bring_in(log, group)
                except PeerFailed as failure:
                    presence.away(failure)
                    await asyncio.sleep(backoff.next_seconds())
                else:
                    presence.there()
                    backoff.reset()
        finally:
            self._running.discard(shard)

    async def _bring_in(self, log: Log, queues: Sequence[ReplayingQueue]) -> None:
        """Read, judge and send one piece for queues whose replays stand at the same place."""
        piece = SharedPiece(queues, log.ingest_shard, self._limits)
        async with log.backfills:
            await self._read(log, piece)
        for queue, columns in zip(queues, piece.columns, strict=True):
            await self._send(log.ingest_shard, queue, piece, columns)

    async def _read(self, log: Log, piece: SharedPiece) -> None:
        stub = await log.open()
        call = stub.TailLog(ingest_pb2.TailLogRequest(after_sequence=piece.previous))
        step_max, judged_count = min(self._limits.step_max, STEP_MAX), 0
        try:
            while not piece.is_complete():
                async with asyncio.timeout(log.buffer.silence_ms / 1000):
                    response = await call.read()
                if not isinstance(response, ingest_pb2.TailLogResponse):
                    raise PeerFailed("the log's stream ended")
                if not response.entries and response.durable_sequence >= piece.end:
                    piece.finish()  # What stood there has been removed.
                for entry in response.entries:
                    if piece.is_complete():
                        break
                    piece.add(log_entries([entry])[0])
                    judged_count += len(entry.messages)
                    if judged_count >= step_max:
                        judged_count = 0
                        await asyncio.sleep(0)
        except TimeoutError:
            raise PeerFailed("the log's stream is silent") from None
        finally:
            call.cancel()

    async def _send(
        self, ingest_shard: int, queue: ReplayingQueue, piece: SharedPiece, columns: Columns
    ) -> None:
        """Send a queue's part of a piece, and go on from where the broker says."""
        span = queue.spans[ingest_shard]
        request = backfill_request(
            queue.queue_id, queue.revision, ingest_shard, piece.previous, piece.last, columns
        )
        stub = assignment_pb2_grpc.AssignmentServiceStub(await self._connect())
        try:
            response = await stub.Backfill(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            queue.spans.pop(ingest_shard, None)  # The queue is gone, or made anew without a replay.
            return
        if not isinstance(response, assignment_pb2.BackfillResponse):
            raise PeerFailed("an answer that cannot be read")
        span.cursor = response.cursor
        if response.applied:
            self._metrics.backfilled(self._broker_shard, ingest_shard, columns)
        if span.cursor >= span.end:
            queue.spans.pop(ingest_shard, None)
        elif response.queue_revision != queue.revision:
            await self._newer(queue)
        elif not response.applied and response.cursor == piece.previous:
            raise PeerFailed(f"a piece of log {ingest_shard} was refused without a reason")

    async def _newer(self, queue: ReplayingQueue) -> None:
        """Wait for the queue's newer config. Raises PeerFailed."""
        if self._queues.get(queue.queue_id) is queue:
            await self._refresh(REFRESH_SECONDS)
        if self._queues.get(queue.queue_id) is queue:
            raise PeerFailed(f"queue {queue.queue_id} has changed, and how is not told yet")
