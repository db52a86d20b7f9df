"""Sending to one broker shard, and keeping its configs current.

::

    away ──GetRoutingState: cursors, configs──▶ live: judge, Assign, WatchQueues
      ▲                                          │
      └────────── any call failed ───────────────┘   what was in flight goes again

Live, one task judges and sends. At most one piece of each log is in flight, so that a piece always
begins where the one before it ended, and while it is, the next one is judged. Nothing waits for
company except what has no match. Pieces of several logs that are ready together go in one call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio

from libs.serving.peers import (
    Backoff,
    PeerBusy,
    PeerFailed,
    PeerRefused,
    Presence,
    peer_failures,
)
from services.router.backfill import Backfills
from services.router.metrics import Metrics
from services.router.route import Piece, PieceLimits, Route
from services.router.routing import BrokerRules
from services.router.tails import Log, Subscriber
from services.router.wire import assign_request, queue_rules
from slatemq.v1 import (
    assignment_pb2,
    assignment_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
)

CALLS_MAX = 4
"""Assign calls in flight to one broker. With a thousand logs, one for each would be a thousand
calls; over this many, pieces that are ready gather and go together."""

RULES_STEP = 16
"""Queues taken in between two looks at everything else there is to do: some milliseconds' work."""

Ranges = Sequence[tuple[int, Piece]]


class BrokerLink:
    """What this router does for one broker shard.

    Attributes:
        shard: The broker shard.
        rules: Its queues, as last told.
        is_live: Whether it answers.
        is_known: Whether its queues were ever told.
    """

    def __init__(
        self,
        shard: int,
        connect: Callable[[], Coroutine[Any, Any, grpc.aio.Channel]],
        start: Callable[[Coroutine[Any, Any, None]], object],
        limits: PieceLimits,
        metrics: Metrics,
    ) -> None:
        """Call the broker on the channel that `connect` gives; `start` watches over a task."""
        self.shard = shard
        self.rules = BrokerRules()
        self.is_live = False
        self.is_known = False
        self._connect = connect
        self._limits = limits
        self._metrics = metrics
        self._presence = Presence(f"broker {shard}")
        self._backoff = Backoff()
        self._applying = asyncio.Lock()
        self._reload = False
        self._cursors: dict[int, int] = {}
        self._backfills = Backfills(shard, connect, self.refresh_rules, start, limits, metrics)
        self._lanes: dict[int, tuple[Log, Subscriber]] = {}
        self._wake = asyncio.Event()
        self._to_judge: dict[int, None] = {}
        self._ready: dict[int, None] = {}
        self._held: dict[int, int] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._failure: PeerFailed | None = None
        self._has_worked = True

    def add_log(self, log: Log) -> None:
        """Route this log to the broker too."""
        shard = log.ingest_shard
        subscriber = Subscriber(
            Route(self._cursors.get(shard, 0)),
            wake=lambda: self._look_at(shard),
            is_live=lambda: self.is_live,
        )
        self._lanes[shard] = (log, subscriber)
        log.subscribers.append(subscriber)
        log.refresh(subscriber)
        self._backfills.add_log(log)

    def route(self, ingest_shard: int) -> Route | None:
        """The state of the log of this shard; None if it is not routed."""
        lane = self._lanes.get(ingest_shard)
        return None if lane is None else lane[1].route

    async def run(self) -> None:
        """Connect and serve; start over whenever a call fails."""
        while True:
            try:
                with peer_failures():
                    await self._open()
                    await self._serve()
            except PeerFailed as failure:
                self._presence.away(failure)
            await asyncio.sleep(self._backoff.next_seconds())

    async def refresh_rules(self, timeout_seconds: float) -> None:
        """Learn now what changed at the broker; raises PeerFailed."""
        known = self.rules.revision
        with peer_failures():
            state = await self._routing_state(known, timeout_seconds)
            await self._learn(known, state.changes, state.config_revision)

    async def _open(self) -> None:
        """Learn cursors and configs, and go on from there."""
        known = 0 if self._reload else self.rules.revision
        state = await self._routing_state(known)
        if state.config_revision < known:
            self._reload = True
            raise PeerFailed("the broker's configs went back; reading them all again")
        if self._reload:
            rules = BrokerRules()
            await _apply(rules, state.changes, state.config_revision)
            self.rules, self._reload = rules, False
            self._backfills.learn(state.changes)
        await self._learn(known, state.changes, state.config_revision)
        self._cursors = {cursor.ingest_shard: cursor.sequence for cursor in state.cursors}
        self.is_live = self.is_known = True
        if self._has_worked:
            self._presence.there()
        for shard, (log, subscriber) in self._lanes.items():
            subscriber.route.adopt(self._cursors.get(shard, 0))
            log.refresh(subscriber)
            self._look_at(shard)

    async def _routing_state(
        self, known: int, timeout_seconds: float | None = None
    ) -> assignment_pb2.GetRoutingStateResponse:
        stub = assignment_pb2_grpc.AssignmentServiceStub(await self._connect())
        state = await stub.GetRoutingState(
            assignment_pb2.GetRoutingStateRequest(known_revision=known), timeout=timeout_seconds
        )
        if not isinstance(state, assignment_pb2.GetRoutingStateResponse):
            raise PeerFailed("an answer that cannot be read")
        if state.broker_shard != self.shard:
            raise PeerFailed(f"broker shard {state.broker_shard} answers there")
        return state

    async def _learn(
        self, known: int, changes: Sequence[queue_pb2.QueueChange], revision: int
    ) -> None:
        """Take in what changed after `known`; what was judged by older configs is judged again."""
        async with self._applying:
            if known <= self.rules.revision < revision:
                await _apply(self.rules, changes, revision)
                self._backfills.learn(changes)
                for shard in self._lanes:
                    self._look_at(shard)

    async def _serve(self) -> None:
        """Judge and send until a call fails."""
        watch = asyncio.create_task(self._watch())
        try:
            while self._failure is None:
                self._judge()
                self._send()
                if self._to_judge:
                    await asyncio.sleep(0)
                else:
                    await self._pause()
            raise self._failure
        finally:
            self.is_live = False
            tasks = [watch, *self._calls]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._failure = None
            for log, subscriber in self._lanes.values():
                subscriber.route.lost()
                log.broker_away(subscriber)

    def _look_at(self, ingest_shard: int) -> None:
        self._to_judge[ingest_shard] = None
        self._wake.set()

    def _judge(self) -> None:
        """Judge a step's worth of messages, and see what is ready to be sent."""
        judged_count, now_ms = 0, _now_ms()
        while self._to_judge and judged_count < self._limits.step_max:
            shard = next(iter(self._to_judge))
            del self._to_judge[shard]
            log, subscriber = self._lanes[shard]
            route = subscriber.route
            judged_count += route.judge(self.rules, now_ms, self._limits)
            log.refresh(subscriber)  # What is judged takes less room.
            if route.can_judge(self._limits):
                self._to_judge[shard] = None
            self._sort_in(shard, now_ms)
        for shard, due_ms in list(self._held.items()):
            if due_ms <= now_ms:
                self._sort_in(shard, now_ms)

    def _sort_in(self, ingest_shard: int, now_ms: int) -> None:
        """Put a log among those that are ready, or held, or neither."""
        self._ready.pop(ingest_shard, None)
        self._held.pop(ingest_shard, None)
        log, subscriber = self._lanes[ingest_shard]
        due_ms = subscriber.route.due_ms(self._limits, more=log.has_more(subscriber.route))
        if due_ms is not None and due_ms <= now_ms:
            self._ready[ingest_shard] = None
        elif due_ms is not None:
            self._held[ingest_shard] = due_ms

    def _send(self) -> None:
        """Send what is ready, in as many calls as may be in flight."""
        while self._ready and len(self._calls) < CALLS_MAX:
            soon_ms = _now_ms() + self._limits.hold_ms // 2
            company = [shard for shard, due_ms in self._held.items() if due_ms <= soon_ms]
            ranges: list[tuple[int, Piece]] = []
            room = self._limits
            for shard in [*self._ready, *company]:
                route = self._lanes[shard][1].route
                self._ready.pop(shard, None)
                self._held.pop(shard, None)
                if route.due_ms(self._limits) is None or route.judged is None:
                    continue
                if route.judged.revision != self.rules.revision:
                    self._look_at(shard)
                    continue
                piece = route.send()
                if route.can_judge(self._limits):
                    self._to_judge[shard] = None  # A long piece had no room for what is next.
                ranges.append((shard, piece))
                room = room.less(piece)
                if room.are_used_up:
                    break
            if ranges:
                call = asyncio.create_task(self._call(ranges))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def _pause(self) -> None:
        """Wait until there is something to do: entries, an answer, or a piece held long enough."""
        until = None
        if self._held:
            wait_ms = min(self._held.values()) - _now_ms()
            until = asyncio.get_running_loop().time() + max(0, wait_ms) / 1000
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        self._wake.clear()

    async def _call(self, ranges: Ranges) -> None:
        revision = ranges[0][1].revision
        try:
            with peer_failures():
                stub = assignment_pb2_grpc.AssignmentServiceStub(await self._connect())
                response = await stub.Assign(assign_request(revision, ranges))
                await self._answered(revision, ranges, response)
        except PeerBusy as failure:
            self._presence.away(failure)
            await asyncio.sleep(self._backoff.next_seconds())
            for shard, _ in ranges:
                self._lanes[shard][1].route.lost()
                self._look_at(shard)
        except PeerFailed as failure:
            # A wrong piece was judged by wrong configs, however that came to be.
            self._reload = self._reload or isinstance(failure, PeerRefused)
            self._has_worked = False
            self._failure = failure
        finally:
            self._wake.set()

    async def _answered(self, revision: int, ranges: Ranges, response: object) -> None:
        if not isinstance(response, assignment_pb2.AssignResponse):
            raise PeerFailed("an answer that cannot be read")
        results = response.results
        if [result.ingest_shard for result in results] != [shard for shard, _ in ranges]:
            raise PeerFailed("an answer about other logs than those asked about")
        if response.config_revision < revision:
            self._reload = True
            raise PeerFailed("the broker's configs went back; reading them all again")
        await self._learn(revision, response.changes, response.config_revision)
        for (shard, piece), result in zip(ranges, results, strict=True):
            moved = result.cursor != piece.previous
            if not moved and response.config_revision == revision:
                raise PeerFailed(f"a piece of log {shard} was refused without a reason")
            log, subscriber = self._lanes[shard]
            subscriber.route.answered(result.cursor)
            self._metrics.answered(self.shard, shard, piece, applied=result.applied)
            log.refresh(subscriber)
            self._look_at(shard)
        self._works()

    def _works(self) -> None:
        self._has_worked = True
        self._backoff.reset()
        self._presence.there()

    async def _watch(self) -> None:
        """Take in changes of queues as they come, so that a piece is seldom refused for them.

        Nothing depends on it: a refused piece brings the changes too.
        """
        presence, backoff = Presence(f"the queue watch of broker {self.shard}"), Backoff()
        while True:
            try:
                with peer_failures():
                    stub = queue_pb2_grpc.QueueServiceStub(await self._connect())
                    known = self.rules.revision
                    request = queue_pb2.WatchQueuesRequest(after_revision=known)
                    async for response in stub.WatchQueues(request):
                        await self._learn(known, response.changes, response.revision)
                        known = response.revision
                        presence.there()
                        backoff.reset()
                    raise PeerFailed("the stream ended")
            except PeerFailed as failure:
                presence.away(failure)
            await asyncio.sleep(backoff.next_seconds())


async def _apply(
    rules: BrokerRules, changes: Sequence[queue_pb2.QueueChange], revision: int
) -> None:
    """Bring rules to a revision, in steps: compiling ten thousand filters takes seconds."""
    for begin in range(0, len(changes), RULES_STEP):
        rules.change(queue_rules(changes[begin : begin + RULES_STEP]))
        await asyncio.sleep(0)
    rules.revision = revision


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
