"""Sending to one broker shard, and keeping its configs current.

::

    down ──GetRoutingState: cursors, configs──▶ live: judge, Assign, WatchQueues
      ▲                                          │
      └────────── any call failed ───────────────┘   what was in flight goes again

Live, one task judges and sends. At most one piece of each log is in flight, so that a piece always
begins where the one before it ended, and while it is, the next one is judged. Nothing waits for
company except what has no match. Pieces of several logs that are ready together go in one call.

Pieces that are too large for a call, or not taken in time, are made smaller: see `Pace`.

A failure that is not the broker's is a fault of ours: it ends the router, instead of one log.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from libs.filters import TooSlow
from libs.serving.peers.calls import (
    UNSTORABLE_WAIT_S,
    Backoff,
    CallTooLarge,
    PeerBusy,
    PeerFailed,
    PeerHealth,
    PeerLate,
    PeerRefused,
    PeerUnstorable,
    peer_failures,
    unstorable_wait_s,
)
from libs.serving.peers.channels import Connection
from services.router.backfill import Backfills
from services.router.metrics import Metrics, Tracing
from services.router.pieces import Pace, Piece, PieceLimits, Seen
from services.router.reserve import LOOK_S, Reserve
from services.router.route import Route
from services.router.routing import STEP_NS, BrokerRules
from services.router.shares import FilterShare
from services.router.tails import Log, Subscriber
from services.router.wire import (
    apply_changes,
    ask_for_quarantine,
    assign_request,
    read_state,
)
from slatemq._cancelling import end_all
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc, queue_pb2, queue_pb2_grpc

CALLS_MAX = 4
"""Assign calls in flight to one broker. With a thousand logs, one for each would be a thousand
calls; over this many, pieces that are ready gather and go together."""

QUARANTINES_MAX = 32
"""Calls at once that have a broker leave queues out: they share its commits, and nothing is routed
meanwhile."""

RETRY_S = 0.5
"""When a range is sent again that a broker cannot take yet."""

ASSIGN_SECONDS = 30.0
"""A broker that has not answered an assignment by then counts as down: slow stores take seconds."""

Pieces = Sequence[tuple[int, Piece]]


class BrokerLink:
    """What this router does for one broker shard.

    Attributes:
        shard: The broker shard.
        rules: Its queues, as it last said.
        is_live: Whether it answers.
        is_known: Whether it ever said its queues.
    """

    def __init__(
        self,
        shard: int,
        connect: Connection,
        start: Callable[[Coroutine[Any, Any, None]], object],
        limits: PieceLimits,
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        """Call the broker on the channel that `connect` returns; `start` watches over a task."""
        self.shard = shard
        self.rules = BrokerRules()
        self.is_live = False
        self.is_known = False
        self._connect = connect
        self._pace = Pace(limits)
        self._metrics = metrics
        self._tracing = tracing
        self._presence = PeerHealth(f"broker {shard}", connect.doubt)
        self._backoff = Backoff()
        self._applying = asyncio.Lock()
        self._reload = False
        self._cursors: dict[int, int] = {}
        self._backfills = Backfills(
            shard,
            connect,
            self.refresh_rules,
            self.quarantine,
            self._without_calls,
            lambda: self.is_live,
            start,
            limits,
            metrics,
        )
        self._lanes: dict[int, tuple[Log, Subscriber]] = {}
        self._wake = asyncio.Event()
        self._to_judge: dict[int, None] = {}
        self._ready: dict[int, None] = {}
        self._held: dict[int, int] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._holds_calls = asyncio.Lock()  # Another one each time that the broker is lost.
        self._failure: Exception | None = None
        self._slow: tuple[TooSlow, int] | None = None
        self._share = FilterShare({})
        self._has_worked = True
        self._reserve = Reserve(looks_after_loss=math.ceil(UNSTORABLE_WAIT_S / LOOK_S))
        self._suspects: dict[int, bool] = {}  # By log: whether it still waits.
        self._is_trying = False  # Whether the last call was that of a suspect.

    def add_log(self, log: Log) -> None:
        """Route this log to the broker too."""
        shard = log.ingest_shard
        subscriber = Subscriber(
            Route(self._cursors.get(shard, 0), log.budget),
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

    def close(self) -> None:
        """Leave the logs, once `run` has ended: the shard was removed."""
        self._backfills.close()
        for log, subscriber in self._lanes.values():
            if subscriber.tail is not None:
                subscriber.tail.leave(subscriber)
            subscriber.route.lost()
            subscriber.route.forget()
            log.subscribers.remove(subscriber)
        self._lanes.clear()

    async def run(self) -> None:
        """Connect and serve; start over whenever a call fails."""
        while True:
            try:
                with peer_failures():
                    await self._open()
                    await self._serve()
            except PeerFailed as failure:
                self._reload |= isinstance(failure, PeerRefused)  # Configs must be wrong.
                self._presence.mark_down(failure)
            await asyncio.sleep(self._backoff.next_seconds())

    async def refresh_rules(self, timeout_seconds: float) -> None:
        """Learn now what changed at the broker; raises PeerFailed."""
        known = self.rules.revision
        with peer_failures():
            state = await read_state(await self._connect(), self.shard, known, timeout_seconds)
            await self._learn(known, state.changes, state.config_revision)

    async def quarantine(self, slow: TooSlow, revision: int) -> None:
        """Have the broker leave a queue out that takes too long; `revision` is what it was by.

        Raises PeerFailed.
        """
        await self._quarantine([slow], revision)

    async def _quarantine(self, slow: Sequence[TooSlow], revision: int) -> None:
        for start in range(0, len(slow), QUARANTINES_MAX):
            some = slow[start : start + QUARANTINES_MAX]
            with peer_failures():
                channel = await self._connect()
                await asyncio.gather(
                    *(ask_for_quarantine(channel, one, revision, ASSIGN_SECONDS) for one in some)
                )
        await self.refresh_rules(ASSIGN_SECONDS)

    async def _open(self) -> None:
        """Learn cursors and configs, and go on from there."""
        known = 0 if self._reload else self.rules.revision
        state = await read_state(await self._connect(), self.shard, known)
        if state.config_revision < known:
            self._reload = True
            raise PeerFailed("the broker's configs went back; reading them all again")
        if self._reload:
            rules = BrokerRules()
            await apply_changes(rules, state.changes, state.config_revision)
            self.rules, self._reload = rules, False
            self._backfills.learn(state.changes)
        await self._learn(known, state.changes, state.config_revision)
        self._cursors = state.cursors
        self.is_live = self.is_known = True
        if self._has_worked:
            self._presence.mark_up()
        for shard, (log, subscriber) in self._lanes.items():
            cursor = self._cursors.get(shard, 0)
            if cursor > subscriber.route.cursor:
                self._reserve.moved_unseen(shard)
            subscriber.route.adopt(cursor)
            log.refresh(subscriber)
            self._look_at(shard)
        self._begin_share()

    async def _learn(
        self, known: int, changes: Sequence[queue_pb2.QueueChange], revision: int
    ) -> None:
        """Take in what changed after `known`."""
        async with self._applying:
            if known <= self.rules.revision < revision:
                await apply_changes(self.rules, changes, revision)
                self._backfills.learn(changes)
                routes = [subscriber.route for _, subscriber in self._lanes.values()]
                judged_by = [route.revision for route in routes if route.revision is not None]
                self.rules.forget_changes(min(judged_by, default=revision))
                for shard in self._held:
                    self._look_at(shard)

    async def _serve(self) -> None:
        """Judge and send until a call fails."""
        watches = [asyncio.create_task(self._watch()), asyncio.create_task(self._watch_reserve())]
        try:
            while self._failure is None:
                self._judge()
                if self._slow is not None:
                    (slow, revision), self._slow = self._slow, None
                    await self.quarantine(slow, revision)
                if self._share.is_over:
                    await self._leave_out_costliest()
                self._send()
                if self._to_judge:
                    await asyncio.sleep(0)
                else:
                    await self._pause()
            raise self._failure
        finally:
            self.is_live = False
            self._holds_calls = asyncio.Lock()
            self._reserve.link_lost()
            await end_all([*watches, *self._calls])
            self._failure = None
            for log, subscriber in self._lanes.values():
                subscriber.route.lost()
                log.broker_down(subscriber)

    def _look_at(self, ingest_shard: int) -> None:
        self._to_judge[ingest_shard] = None
        self._wake.set()

    def _judge(self) -> None:
        """Judge a step's worth of messages, and see what is ready to be sent."""
        judged_count, now_ms = 0, _now_ms()
        began_ns, processor_ns = time.perf_counter_ns(), time.thread_time_ns()
        until_ns = began_ns + STEP_NS
        while self._to_judge and judged_count < self._pace.limits.step_max:
            shard = next(iter(self._to_judge))
            del self._to_judge[shard]
            log, subscriber = self._lanes[shard]
            if self._is_in_reserve(shard) or self._waits(shard):
                continue
            route = subscriber.route
            route.refresh_waiting(self.rules, self._pace.limits)
            try:
                judged_count += route.judge(self.rules, now_ms, self._pace.limits)
            except TooSlow as slow:
                self._slow = slow, route.judging_revision(self.rules)
                route.judge_again()
            log.refresh(subscriber)  # What is judged takes less room.
            if route.can_judge(self._pace.limits):
                self._to_judge[shard] = None
            self._sort_in(shard, now_ms)
            if self._slow is not None or time.perf_counter_ns() > until_ns:
                break
        for shard, due_ms in list(self._held.items()):
            if due_ms <= now_ms:
                self._sort_in(shard, now_ms)
        processor_ns = time.thread_time_ns() - processor_ns
        self._share.add_judging(judged_count, time.perf_counter_ns() - began_ns, processor_ns)

    async def _leave_out_costliest(self) -> None:
        """Has the broker leave out queues whose filters together hold up a log, if any do."""
        revision = self.rules.revision
        slow = self._share.too_slow(self.rules.take_spent(), self._waits_ms())
        if slow:
            await self._quarantine(slow, revision)
        self._begin_share()

    def _begin_share(self) -> None:
        self.rules.take_spent()
        self._share = FilterShare(self._waits_ms(), self._share)

    def _waits_ms(self) -> dict[int, int]:
        """How long the oldest message of each log has waited that this router routes."""
        now_ms = int(time.time() * 1000)
        oldest_ms = {
            shard: subscriber.route.oldest_received_ms
            for shard, (_, subscriber) in self._lanes.items()
            if not self._is_in_reserve(shard) and not self._waits(shard)
        }
        return {shard: now_ms - at_ms for shard, at_ms in oldest_ms.items() if at_ms is not None}

    def _sort_in(self, ingest_shard: int, now_ms: int) -> None:
        """Put a log among those that are ready, or held, or neither."""
        self._ready.pop(ingest_shard, None)
        self._held.pop(ingest_shard, None)
        log, subscriber = self._lanes[ingest_shard]
        due_ms = subscriber.route.due_ms(self._pace.limits, more=log.has_more(subscriber.route))
        if due_ms is not None and due_ms <= now_ms:
            self._ready[ingest_shard] = None
        elif due_ms is not None:
            self._held[ingest_shard] = due_ms

    def _send(self) -> None:
        """Send what is ready, in as many calls as may be in flight.

        A suspect goes while nothing else is in flight, so that it names itself if the broker ends
        over it. What else is ready goes between two of them.
        """
        while self._ready and len(self._calls) < CALLS_MAX and not self._holds_calls.locked():
            suspects = [shard for shard in self._ready if shard in self._suspects]
            if self._calls and (suspects or self._is_trying):
                return
            soon_ms = _now_ms() + self._pace.limits.hold_ms // 2
            company = [shard for shard, due_ms in self._held.items() if due_ms <= soon_ms]
            others = [one for one in [*self._ready, *company] if one not in self._suspects]
            is_turn = bool(suspects) and not (self._is_trying and others)
            pieces = self._take(suspects[:1] if is_turn else others)
            if pieces:
                self._is_trying = is_turn
                call = asyncio.create_task(self._call(pieces))
                self._calls.add(call)
                call.add_done_callback(self._end_call)

    def _take(self, shards: Iterable[int]) -> Pieces:
        """What goes in one call of what these logs have."""
        pieces: list[tuple[int, Piece]] = []
        room = self._pace.limits
        for shard in shards:
            route = self._lanes[shard][1].route
            self._ready.pop(shard, None)
            self._held.pop(shard, None)
            piece = route.next_piece
            if route.due_ms(self._pace.limits) is None or piece is None:
                continue
            if not piece.is_caught_up:
                route.catch_up(self.rules)
            if piece.is_catching_up:
                self._look_at(shard)
                continue
            route.send()
            if route.can_judge(self._pace.limits):
                self._to_judge[shard] = None  # A long piece had no room for what is next.
            pieces.append((shard, piece))
            room = room.less(piece)
            if room.are_used_up:
                break
        return pieces

    @asynccontextmanager
    async def _without_calls(self) -> AsyncIterator[None]:
        """Hold all other calls back during a replay that may end the broker.

        Once the broker is lost they are held back no longer, even before the replay has its answer.
        Raises PeerFailed if it is down.
        """
        async with (holds := self._holds_calls):
            try:
                while self._calls:
                    await asyncio.wait(self._calls)
                if not self.is_live or self._failure is not None or holds is not self._holds_calls:
                    raise PeerFailed("the broker is down")
                yield
            except PeerUnstorable as failure:
                if self.is_live and holds is self._holds_calls:
                    self._failure = PeerFailed(str(failure))
                raise
            finally:
                self._wake.set()

    def _end_call(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._wake.set()

    async def _pause(self) -> None:
        """Wait until there is something to do: entries, an answer, or a piece held long enough."""
        until = None
        if self._held:
            wait_ms = min(self._held.values()) - _now_ms()
            until = asyncio.get_running_loop().time() + max(0, wait_ms) / 1000
        began_ns = time.perf_counter_ns()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        self._wake.clear()
        self._share.add_pause(time.perf_counter_ns() - began_ns)

    async def _call(self, pieces: Pieces) -> None:
        try:
            with peer_failures():
                request = assign_request(
                    (shard, piece, self._lanes[shard][1].route.seen_of(piece))
                    for shard, piece in pieces
                )
                stub = assignment_pb2_grpc.AssignmentServiceStub(await self._connect())
                with self._tracing.routing(self.shard, [piece for _, piece in pieces]):
                    response = await stub.Assign(request, timeout=ASSIGN_SECONDS)
                await self._answered(pieces, response)
        except CallTooLarge as failure:
            if not self._pace.was_too_much():
                self._failure = failure  # One message that no call holds.
            self._take_back(pieces)
        except PeerBusy as failure:
            self._presence.mark_down(failure)
            await asyncio.sleep(self._backoff.next_seconds())
            self._take_back(pieces)
        except PeerUnstorable as failure:
            self._suspect_all_in_flight()
            self._failure = PeerFailed(f"{failure}; its messages wait for up to a minute")
        except PeerFailed as failure:
            if isinstance(failure, PeerLate):
                self._pace.was_too_much()
            self._has_worked = False
            self._failure = failure
        except Exception as failure:  # noqa: BLE001 - it ends the router: see `_serve`
            self._failure = failure

    def _suspect_all_in_flight(self) -> None:
        """These logs wait, and go by themselves then: the broker ended over one of them.

        Sent at once, it would end the next broker process too, and all that others do there. Which
        one it was is not known: the calls in flight shared a commit, and the first to fail ends the
        others. So each goes while no other one is in flight.
        """
        for shard, (_, subscriber) in self._lanes.items():
            route = subscriber.route
            if route.in_flight is not None and not route.is_outdated and not self._waits(shard):
                self._suspects[shard] = True
                self._reserve.step_back(shard)
                wait_s = unstorable_wait_s()
                asyncio.get_running_loop().call_later(wait_s, self._end_wait, shard)

    def _end_wait(self, ingest_shard: int) -> None:
        if ingest_shard in self._suspects:
            self._suspects[ingest_shard] = False
            self._look_at(ingest_shard)

    def _waits(self, ingest_shard: int) -> bool:
        return self._suspects.get(ingest_shard, False)

    def _take_back(self, pieces: Pieces) -> None:
        """What these pieces hold is judged and sent again."""
        for shard, _ in pieces:
            self._lanes[shard][1].route.lost()
            self._look_at(shard)

    async def _answered(self, pieces: Pieces, response: object) -> None:
        if not isinstance(response, assignment_pb2.AssignResponse):
            raise PeerFailed("an answer that cannot be read")
        results, revision = response.results, response.config_revision
        if [result.ingest_shard for result in results] != [shard for shard, _ in pieces]:
            raise PeerFailed("an answer about other logs than those asked about")
        if revision < max(piece.revision for _, piece in pieces):
            self._reload = True
            raise PeerFailed("the broker's configs went back; reading them all again")
        if self.rules.revision < revision and any(result.outdated for result in results):
            await self.refresh_rules(ASSIGN_SECONDS)
        for (shard, piece), result in zip(pieces, results, strict=True):
            log, subscriber = self._lanes[shard]
            route = subscriber.route
            route.seen = Seen(piece.read_until, revision, response.broker_incarnation)
            if result.outdated:
                route.outdated(self.rules)
            elif result.retry_later:
                route.lost()
                asyncio.get_running_loop().call_later(RETRY_S, self._look_at, shard)
                continue
            elif result.cursor == piece.previous:
                raise PeerFailed(f"a piece of log {shard} was refused without a reason")
            else:
                self._suspects.pop(shard, None)
                route.answered(result.cursor)
                if not result.applied:
                    self._reserve.moved(shard)
            self._metrics.answered(self.shard, shard, piece, applied=result.applied)
            log.refresh(subscriber)
            self._look_at(shard)
        self._works()

    def _works(self) -> None:
        self._has_worked = True
        self._pace.was_answered()
        self._backoff.reset()
        self._presence.mark_up()

    def _is_in_reserve(self, ingest_shard: int) -> bool:
        return not self._lanes[ingest_shard][0].is_first and self._reserve.has(ingest_shard)

    async def _watch_reserve(self) -> None:
        """Let go of what other routers have assigned, and step in where none gets on."""
        before: set[int] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            pending = {
                shard
                for shard, (_, subscriber) in self._lanes.items()
                if subscriber.route.is_behind and self._is_in_reserve(shard)
            }
            for shard in before - pending:
                self._look_at(shard)  # This router is its first one by now, perhaps.
            before = pending
            if pending:
                try:
                    with peer_failures():
                        await self._look_at_cursors(pending)
                except PeerFailed as failure:
                    self._failure = failure
                    return self._wake.set()

    async def _look_at_cursors(self, pending: Iterable[int]) -> None:
        known = self.rules.revision
        state = await read_state(await self._connect(), self.shard, known, ASSIGN_SECONDS)
        await self._learn(known, state.changes, state.config_revision)
        for shard in pending:
            log, subscriber = self._lanes[shard]
            route, cursor = subscriber.route, state.cursors.get(shard, 0)
            if cursor > route.cursor:
                self._reserve.moved(shard)
                route.adopt(cursor)
                log.refresh(subscriber)
            elif self._reserve.stands(shard):
                if self._reserve.is_after_loss(shard):  # Its first router waits, perhaps.
                    self._suspects.setdefault(shard, False)
                self._look_at(shard)

    async def _watch(self) -> None:
        """Take in changes of queues as they come, so that a piece is seldom refused for them.

        Nothing depends on it: a refused piece brings the changes too.
        """
        health = PeerHealth(f"the queue watch of broker {self.shard}", self._connect.doubt)
        backoff = Backoff()
        while True:
            try:
                with peer_failures():
                    stub = queue_pb2_grpc.QueueServiceStub(await self._connect())
                    known, changes = self.rules.revision, list[queue_pb2.QueueChange]()
                    request = queue_pb2.WatchQueuesRequest(after_revision=known)
                    async for response in stub.WatchQueues(request):
                        changes += response.changes
                        if response.more:
                            continue
                        await self._learn(known, changes, response.revision)
                        known, changes = response.revision, []
                        health.mark_up()
                        backoff.reset()
                    raise PeerFailed("the stream ended")
            except PeerRefused as failure:
                self._failure = failure
                return self._wake.set()
            except PeerFailed as failure:
                health.mark_down(failure)
            await asyncio.sleep(backoff.next_seconds())


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
