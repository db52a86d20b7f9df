"""Brings waiting claims and messages together.

Each queue with waiting claims or streams has a line. When the queue may have changed, the
dispatcher looks at the messages that come next, fetches the payloads that are not cached, and only
then claims for the line: a payload that cannot be read costs no attempt. An ingest that is late to
answer holds up only its own messages. New messages whose payloads were fetched in time are claimed
in the commit that assigns them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from itertools import islice

from libs.serving.requests.budget import AnswerBudget
from libs.serving.requests.shares import Shares
from libs.storage.layout.ids import shard_of
from services.broker.core.moves import moving
from services.broker.core.queue import NeedsLane, Queue
from services.broker.core.waiting.scan import Needs, Passing
from services.broker.delivery.in_flight_limit import InFlightLimit
from services.broker.delivery.ingest_health import IngestHealth
from services.broker.delivery.late_fetches import LateFetches
from services.broker.delivery.message_cache import (
    CachedMessage,
    Fetch,
    FetchResult,
    Payloads,
    PrefetchWindows,
    size_of,
)
from services.broker.delivery.selection import ClaimSelector, IdSelector
from services.broker.delivery.waiters import (
    LOOK_AHEAD,
    TURN,
    ClaimBatch,
    Waiter,
    WaiterLine,
    paused,
)
from services.broker.shard.owner import ShardOwner
from slatemq._cancelling import end_all
from slatemq.errors import SlateMQError, Unavailable
from slatemq.v1.ingest_pb2 import StoredRun

log = logging.getLogger(__name__)

SHARE_MIN = 100
"""The least share of each of several waiters: responses of one message each cost more."""

READ_ON_S = 0.5
"""How long a look reads behind what cannot be had now before it ends claims that wait no more."""

STUCK_MS = 200
"""When to look again at messages that could not be claimed."""

TIMER_MAX_MS = 60_000
"""A timer is set for at most this long; it is set again when it has run out."""


class Dispatcher:
    def __init__(
        self,
        owner: ShardOwner,
        payloads: Payloads,
        waiters_max: int,
        in_flight_max: int,
        budget: AnswerBudget,
    ) -> None:
        """Serve claims from this shard; at most `waiters_max` claims and streams are open.

        Of all queues together, `in_flight_max` bounds the messages in flight, and `budget` what is
        fetched for claims and in answers.
        """
        self.in_flight = InFlightLimit(owner.shard.leases, in_flight_max, self._kick)
        self._budget = budget
        self._owner = owner
        self._payloads = payloads
        self._waiter_lines: dict[Queue, WaiterLine] = {}
        self._windows = PrefetchWindows()
        self._ingests = IngestHealth(payloads, self._ingest_back)
        self._late = LateFetches(payloads, budget, self._fetch_changed)
        self._kept_back: Counter[int] = Counter()
        self._keeping: Counter[str] = Counter()  # by queue, its messages that are kept back
        self._closed: SlateMQError | None = None
        self.streams: dict[Waiter, Queue] = {}
        """Open streams, in line or not, with their queues."""
        self.places = Shares(
            "waiting_claims_max",
            waiters_max,
            "claims and streams open",
            ("TOO_MANY_WAITING_CLAIMS", f"{waiters_max} claims are waiting"),
        )
        """Each claim or stream holds one for as long as it is open."""
        self.record_wait: Callable[[float], None] | None = None
        """Called with the seconds that a claim or stream has waited for the messages it gets."""
        owner.on_change = self._changed

    # --- Waiters ------------------------------------------------------------

    def add(self, queue: Queue, waiter: Waiter) -> None:
        """Puts a waiter in line until it wants no more or is removed.

        Raises NotFound for a queue that was deleted, FailedPrecondition for one that is paused,
        Unavailable for one that leaves the shard, and after `drain` its error.
        """
        if self._closed is not None:
            raise self._closed
        if not self._owner.owns(queue):
            raise self._owner.shard.absence(queue.queue_id)
        if queue.is_leaving:
            raise moving(queue.queue_id)
        if queue.settings.paused:
            raise paused(queue)
        waiter_line = self._waiter_lines.get(queue)
        if waiter_line is None:
            waiter_line = self._waiter_lines[queue] = WaiterLine(queue)
        waiter_line.enter(waiter)
        self._kick(waiter_line)

    def wait_no_more(self, queue: Queue, waiter: Waiter) -> None:
        """Ends a waiter with what the next look finds, if it is still in line."""
        waiter_line = self._waiter_lines.get(queue)
        if waiter_line is not None and waiter in waiter_line.line:
            waiter_line.impatient[waiter] = None
            self._kick(waiter_line)

    def remove(self, queue: Queue, waiter: Waiter) -> None:
        waiter_line = self._waiter_lines.get(queue)
        if waiter_line is not None and waiter in waiter_line.line:
            waiter_line.leave(waiter)
            self._clean_up(waiter_line)

    def drain(self, error: SlateMQError) -> None:
        """Ends all waiters, and those added later, with this error."""
        self._closed = error
        for stream in self.streams:
            stream.failed(error)
        for waiter_line in list(self._waiter_lines.values()):
            self._dismiss(waiter_line, error)

    async def close(self) -> None:
        """Ends all tasks; for the end of the process."""
        tasks = [
            waiter_line.task
            for waiter_line in self._waiter_lines.values()
            if waiter_line.task is not None
        ]
        for waiter_line in list(self._waiter_lines.values()):
            self._dismiss(waiter_line, self._closed)
        await end_all(tasks)
        await self._late.close()
        await self._ingests.close()

    def _dismiss(self, waiter_line: WaiterLine, error: SlateMQError | None) -> None:
        line, waiter_line.line = waiter_line.line, OrderedDict()
        waiter_line.impatient.clear()
        self._clean_up(waiter_line)
        for one in line:
            one.failed(error)

    def _clean_up(self, waiter_line: WaiterLine) -> None:
        if not waiter_line.line:
            if waiter_line.timer is not None:
                waiter_line.timer.cancel()
                waiter_line.timer = None
            self.in_flight.forget(waiter_line)
            if waiter_line.task is None and not waiter_line.late:
                self._waiter_lines.pop(waiter_line.queue, None)

    def refuse_waiters(self, queue: Queue, error: SlateMQError) -> None:
        """Ends the claims and streams of a queue with this error."""
        for stream, its_queue in self.streams.items():
            if its_queue is queue:
                stream.failed(error)
        waiter_line = self._waiter_lines.get(queue)
        if waiter_line is not None:
            self._dismiss(waiter_line, error)
        self.in_flight.go_on()  # A queue that was deleted has no leases any more.

    # --- Serving ------------------------------------------------------------

    def _changed(self, queues: Iterable[Queue]) -> None:
        self.in_flight.go_on()
        for queue in queues:
            waiter_line = self._waiter_lines.get(queue)
            if waiter_line is not None and waiter_line.is_open:
                self._kick(waiter_line)

    def _fetch_changed(self, waiter_line: WaiterLine) -> None:
        if waiter_line.line:
            self._kick(waiter_line)
        self._clean_up(waiter_line)

    def _kick(self, waiter_line: WaiterLine) -> None:
        waiter_line.again = True
        if waiter_line.task is None:
            # It serves others than the call that happens to start it, which may be an ack.
            waiter_line.task = asyncio.create_task(self._serve(waiter_line), context=Context())
            waiter_line.task.add_done_callback(lambda task: self._served(waiter_line, task))

    def _served(self, waiter_line: WaiterLine, task: asyncio.Task[None]) -> None:
        waiter_line.task = None
        if not (waiter_line.again and waiter_line.line):
            self.in_flight.leave(waiter_line)  # Else it has its turn at the next step.
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("serving %s failed", waiter_line.queue.queue_id, exc_info=error)
            known = error if isinstance(error, SlateMQError) else None
            self._dismiss(waiter_line, known or Unavailable("the queue cannot be read now"))
        elif waiter_line.line and waiter_line.again and not task.cancelled():
            self._kick(waiter_line)
        self._clean_up(waiter_line)

    async def _serve(self, waiter_line: WaiterLine) -> None:
        while waiter_line.line:
            waiter_line.again = False
            has_turn = self.in_flight.has_turn(waiter_line)
            first = next(iter(waiter_line.line))
            has_claimed = await self._step(waiter_line, first.context)
            if has_turn:
                self.in_flight.leave(waiter_line)
            if has_claimed:
                await asyncio.sleep(0)  # a step may have been all work and no wait
            elif waiter_line.behind or not waiter_line.again:
                self._rest(waiter_line)
                return

    async def _step(self, waiter_line: WaiterLine, context: Context) -> bool:
        """Claims what can be claimed for a line; returns whether that was anything.

        What has to be read for that is read in this context.
        """
        queue = waiter_line.queue
        waiter_line.unavailable, waiter_line.stuck, waiter_line.short = None, False, False
        waiter_line.reading_since_s, waiter_line.behind = 0.0, False
        waiter_line.look_again()
        wanted = waiter_line.wanted(partial(self._is_held_up, waiter_line))
        waiter_line.all_beyond = not (wanted or waiter_line.unread) and bool(
            waiter_line.beyond_share
        )
        waiter_line.passed = set()

        def reachable(ids: Sequence[int]) -> Sequence[int]:
            if not self._kept_back and self._ingests.can_serve_all and not waiter_line.late:
                return ids
            free = [message_id for message_id in ids if message_id not in self._kept_back]
            return [one for one in free if self._can_serve(waiter_line, one)]

        def peek(limit: int, now_ms: int) -> list[int]:
            # Looking drops what has expired: a queue that was deleted meanwhile must not change.
            if not self._owner.owns(queue) or not queue.capacity:
                return []
            if wanted and not self.in_flight.capacity(waiter_line):
                waiter_line.short = True
                return []
            return queue.peek(limit, reachable, now_ms, self._passing_of(waiter_line))

        ids = await self._owner.run(partial(peek, wanted))
        if not ids:
            if queue.capacity and not waiter_line.short:
                self._note_down(waiter_line, set())
            # All may wait until their principals have read more, which kicks no line.
            waiter_line.stuck = not wanted and waiter_line.unread and queue.waiting.ready_count > 0
            return False
        with self._payloads.pin() as held, self._late.brought(waiter_line) as brought:
            here, missing = self._payloads.look(ids)
            held.update(here)
            fetched = _take(brought, held)
            missing = [one for one in missing if one not in held] if brought else missing
            if not missing:
                return await self._claim_fetched(waiter_line, fetched, held)
            window, asked = self._windows.of(queue.queue_id), len(missing)
            if (count := window.count(missing[0])) > len(ids):
                _, missing = self._payloads.look(await self._owner.run(partial(peek, count)))
            expected_bytes = window.expected_bytes(len(missing), self._budget.share_bytes)
            async with self._budget.fetching(size_of(here) + expected_bytes) as fetch_bytes:
                # What another line found out about an ingest while this one waited for its turn.
                missing = reachable(missing)
                fetching = self._late.fetching(waiter_line, missing, fetch_bytes, context)
                async with fetching as (in_time, late):
                    fetched.add(_take(in_time, held))
                    if not late:
                        window.fetched(missing, asked, fetched)
                    for fetch in late:
                        self._ingests.mark_late(fetch, until_done=self._budget.is_exceeded)
                    waiter_line.passed.update(fetch.shard for fetch in late)
                    return await self._claim_fetched(waiter_line, fetched, held)

    async def _claim_fetched(
        self,
        waiter_line: WaiterLine,
        fetched: FetchResult,
        held: Mapping[int, CachedMessage],
    ) -> bool:
        """Notes what fetches found, and claims for a line; returns whether that was anything."""
        self._note_down(waiter_line, fetched.down)
        self._ingests.mark_slow(fetched.slow)
        waiter_line.passed.update(map(shard_of, fetched.slow))
        if fetched.gone:
            await self._fail_gone(waiter_line, fetched.gone)
            return True
        claimed = await self._claim_in_turns(waiter_line, held)
        if not claimed and self._budget.is_exceeded and waiter_line.unavailable is None:
            waiter_line.unavailable = self._budget.exceeded()
        waiter_line.stuck = not claimed
        # Now these are passed over: look once more.
        return claimed > 0 or bool(fetched.down and not waiter_line.behind)

    async def _fail_gone(self, waiter_line: WaiterLine, gone: Mapping[int, str]) -> None:
        """Moves those of a line's next messages to failed that are not to be had."""
        queue = waiter_line.queue

        def fail_all(ids: set[int], reason: str, now_ms: int) -> None:
            if self._owner.owns(queue):
                choosing = IdSelector(ids, self._passing_of(waiter_line))
                leases = self._owner.shard.leases
                claimed = leases.claim(queue, choosing, 0, "", now_ms)
                leases.fail(claimed.leases(), reason, now_ms)

        for reason in dict.fromkeys(gone.values()):
            ids = {one for one, why in gone.items() if why == reason}
            log.error(
                "%d messages of queue %s become dead letters: %s", len(ids), queue.queue_id, reason
            )
            await self._owner.run(partial(fail_all, ids, reason))

    async def _claim_in_turns(
        self, waiter_line: WaiterLine, held: Mapping[int, CachedMessage]
    ) -> int:
        """Claims in turns until no claim is cut short; returns the number of messages."""
        claimed = 0
        while True:
            waiter_line.cut = False
            claimed += await self._owner.run(
                lambda now_ms: self._claim_all(waiter_line, held, now_ms)
            )
            if not waiter_line.cut:
                return claimed
            await asyncio.sleep(0)

    def admit(self, principal: str) -> None:
        """Raises ResourceExhausted for a principal that leaves too much of its responses unread."""
        self._budget.admit(principal)

    def sent(self, batches: Sequence[ClaimBatch], principal: str) -> None:
        """Releases the memory of messages whose responses were sent, or never will be."""
        self._budget.release_for(principal, sum(one.size_bytes for one in batches))

    @contextmanager
    def keeping_back(self, queue_id: str, message_id: int) -> Iterator[None]:
        """Within the block the message is not claimed, and the queue does not leave.

        Raises Unavailable for a queue that leaves: it waits for those alone that came before.
        """
        queue = self._owner.shard.queues.get(queue_id)
        if queue is not None and queue.is_leaving:
            raise moving(queue_id)
        self._kept_back[message_id] += 1
        self._keeping[queue_id] += 1
        try:
            yield
        finally:
            self._kept_back[message_id] -= 1
            self._keeping[queue_id] -= 1
            self._kept_back = +self._kept_back  # without those that are back at 0
            self._keeping = +self._keeping
            self.look_again()

    def keeps_back(self, queue_id: str) -> bool:
        """Whether a message of the queue is kept back, which another shard would not know."""
        return queue_id in self._keeping

    def look_again(self) -> None:
        """Looks at all lines again: more may be claimable than at the last look."""
        self._changed(self._waiter_lines.keys())

    def _ingest_back(self, _: int) -> None:
        """Looks at the lines again that have passed over messages."""
        for waiter_line in self._waiter_lines.values():
            # Of a line that looked behind many messages, `passed` may not have all ingests.
            if waiter_line.line and waiter_line.passed:
                self._kick(waiter_line)

    def _note_down(self, waiter_line: WaiterLine, found: set[int]) -> None:
        waiter_line.passed |= found
        down = waiter_line.passed
        if down:
            shards = ", ".join(map(str, sorted(down)))
            waiter_line.unavailable = Unavailable(
                f"ingest {shards} is down, or still reading payloads", reason="INGEST_DOWN"
            )
        waiter_line.await_ingests(down)
        self._ingests.mark_down(found)

    def _rest(self, waiter_line: WaiterLine) -> None:
        """Nothing more can be claimed now: ends impatient waiters, sets a timer for the others."""
        may_come = self._may_come(waiter_line)
        for waiter in list(waiter_line.impatient):
            if waiter.has_begun or not may_come:
                waiter_line.leave(waiter)
                waiter.failed(self._refusal(waiter_line, waiter))
        if waiter_line.timer is not None:
            waiter_line.timer.cancel()
            waiter_line.timer = None
        # A queue without room waits for an ack alone, which has it looked at again.
        if waiter_line.line and waiter_line.short:
            self.in_flight.wait(waiter_line)
        elif waiter_line.line and waiter_line.queue.capacity:
            delay_ms = self._next_look_ms(waiter_line)
            if delay_ms is not None:
                loop = asyncio.get_running_loop()
                waiter_line.timer = loop.call_later(delay_ms / 1000, self._kick, waiter_line)
        if waiter_line.line:
            self.in_flight.wait_for_shares(waiter_line)

    def _refusal(self, waiter_line: WaiterLine, waiter: Waiter) -> SlateMQError | None:
        """Why the last look had nothing for a waiter; None: there was nothing."""
        if (unread := self._budget.refusal(waiter.principal)) is not None:
            return unread
        if waiter.principal in waiter_line.beyond_share:
            return self.in_flight.refusal(waiter.principal, waiter.quota)
        return waiter_line.unavailable

    def _is_held_up(self, waiter_line: WaiterLine, waiter: Waiter) -> bool:
        """Whether a waiter is passed over now for its principal, which its line notes."""
        if self._budget.is_beyond_half(waiter.principal):
            waiter_line.unread = True
            return True
        if self.in_flight.is_beyond_share(waiter_line, waiter.principal, waiter.quota):
            waiter_line.beyond_share[waiter.principal] = waiter.quota
            return True
        return False

    def _may_come(self, waiter_line: WaiterLine) -> bool:
        """Whether an ingest that is late, and may be up, is about to bring messages for a line.

        It may be late for another line, and only have to show that it is up.
        """
        if not waiter_line.queue.capacity or waiter_line.short:
            return False
        return any(
            not fetch.is_done and not self._ingests.is_silent(shard)
            for shard, fetch in waiter_line.late.items()
        ) or any(map(self._ingests.may_be_up, waiter_line.passed))

    def _can_serve(self, waiter_line: WaiterLine, message_id: int) -> bool:
        """Whether a message can be had now; otherwise it is passed over, which its line notes."""
        return self._cause(waiter_line, message_id) is None

    def _cause(self, waiter_line: WaiterLine, message_id: int) -> int | None:
        shard = shard_of(message_id)
        is_late = waiter_line.late and waiter_line.is_late(shard)
        cause = shard if is_late else self._ingests.cause(message_id)
        if cause is not None:
            waiter_line.passed.add(shard)
        return cause

    def _passing_of(self, waiter_line: WaiterLine) -> Passing:
        """What claims for a line pass over, without what is kept back, which comes soon."""
        return Passing(
            lambda item: self._cause(waiter_line, item.message_id),
            lambda cause: waiter_line.is_late(cause) or self._ingests.holds(cause),
            partial(_reads_on, waiter_line),
        )

    def _next_look_ms(self, waiter_line: WaiterLine) -> int | None:
        if waiter_line.stuck or waiter_line.behind or waiter_line.impatient:
            return STUCK_MS
        if waiter_line.all_beyond:
            return None  # An ack has it looked at again.
        due_ms = waiter_line.queue.waiting.next_due_ms()
        if due_ms is None:
            return None
        # What was due at this look could not be claimed: wait a little.
        left_ms = due_ms - self._owner.clock.now_ms()
        return min(left_ms, TIMER_MAX_MS) if left_ms > 0 else STUCK_MS

    # --- Claiming -----------------------------------------------------------

    def deliver(self, queue: Queue, now_ms: int) -> None:
        """Claims for the waiters of a queue what is in memory with its payload; never waits."""
        waiter_line = self._waiter_lines.get(queue)
        if waiter_line is None or not waiter_line.is_open:
            return
        if queue.capacity and not self.in_flight.capacity(waiter_line):
            self.in_flight.wait(waiter_line)
            return
        waiter_line.cut = self._budget.is_full
        try:
            if not waiter_line.cut:
                self._claim_all(waiter_line, {}, now_ms)
        except (NeedsLane, Needs):
            waiter_line.cut = True
        if waiter_line.cut:
            self._kick(waiter_line)
        elif waiter_line.line:
            self.in_flight.wait_for_shares(waiter_line)
        self._clean_up(waiter_line)

    @property
    def is_waited_on(self) -> bool:
        return bool(self._waiter_lines)

    def waited_on(self, queue_ids: Sequence[str]) -> Set[str]:
        """The queues with waiters, of these and perhaps of others."""
        if len(queue_ids) < len(self._waiter_lines):
            return set(filter(self.has_waiters, queue_ids))
        return {
            queue.queue_id for queue, waiter_line in self._waiter_lines.items() if waiter_line.line
        }

    def has_waiters(self, queue_id: str) -> bool:
        queue = self._owner.shard.queues.get(queue_id)
        waiter_line = self._waiter_lines.get(queue) if queue is not None else None
        return waiter_line is not None and bool(waiter_line.line)

    def add_fresh(self, runs: Sequence[StoredRun]) -> None:
        """Take messages that came with their assignment, if there are waiters."""
        if self.is_waited_on:
            self._payloads.add_fresh(runs, self._owner.shard.cursors)

    async def fetch_for_waiters(self, queue: Queue, ids: Sequence[int]) -> None:
        """Fetches new messages that are about to be assigned, if the queue has waiters."""
        waiter_line = self._waiter_lines.get(queue)
        if waiter_line is None or not waiter_line.is_open or queue.waiting.ready_count:
            return  # No waiters, or older messages come first.
        first = islice(waiter_line.line, len(ids))
        wanted = sum(waiter.wants for waiter in first if not self._is_held_up(waiter_line, waiter))
        _, missing = self._payloads.look(ids[: min(wanted, LOOK_AHEAD)])
        missing = [message_id for message_id in missing if self._can_serve(waiter_line, message_id)]
        if missing:
            window = self._windows.of(queue.queue_id)
            fetch_bytes = window.expected_bytes(len(missing), self._budget.share_bytes)
            if not self._budget.try_reserve(fetch_bytes):
                return  # The claims fetch for themselves; what is assigned must not wait.
            with self._budget.releasing(fetch_bytes):
                fetched = await self._payloads.fetch(missing, None, fetch_bytes)
            window.fetched(missing, len(missing), fetched)
            self._ingests.mark_down(fetched.down)
            self._ingests.mark_slow(fetched.slow)

    def _claim_all(
        self, waiter_line: WaiterLine, held: Mapping[int, CachedMessage], now_ms: int
    ) -> int:
        """Claims for the waiters of a line, for as many as a step has time; returns the number."""
        claimed = passed_over = 0
        waiter_line.look_again()
        ready_count = waiter_line.queue.waiting.ready_count
        share = ready_count // len(waiter_line.line) + 1 if waiter_line.line else 0
        for _ in range(len(waiter_line.line)):
            # Each claim passes over the same messages: where they are many, it has its own step.
            if claimed + passed_over >= TURN:
                waiter_line.cut = True
                break
            waiter = next(iter(waiter_line.line))
            if not waiter.wants:  # It has ended, and did not leave yet.
                waiter_line.leave(waiter)
                continue
            if self._is_held_up(waiter_line, waiter):
                _pass_over(waiter_line, waiter)
                continue
            batch, skipped = self._claim(waiter_line, waiter, max(share, SHARE_MIN), held, now_ms)
            passed_over += skipped
            if not batch.held:
                waiter_line.short = not self.in_flight.capacity(waiter_line)
                if not waiter.has_begun:
                    break
                waiter_line.leave(waiter)
                waiter.failed(None)
                continue
            claimed += len(batch.held)
            self._budget.take_for(waiter.principal, batch.size_bytes)
            if self.record_wait is not None:
                now_s = time.monotonic()
                self.record_wait(now_s - waiter.since_s)
                waiter.since_s = now_s
            waiter.take(batch)
            if not waiter.wants:
                waiter_line.leave(waiter)
                continue
            waiter_line.line.move_to_end(waiter)
            if waiter.has_begun:
                waiter_line.cut = True
                waiter_line.impatient[waiter] = None
        return claimed

    def _claim(
        self,
        waiter_line: WaiterLine,
        waiter: Waiter,
        share: int,
        held: Mapping[int, CachedMessage],
        now_ms: int,
    ) -> tuple[ClaimBatch, int]:
        """What is claimed for one waiter, and how many messages that passed over."""
        queue = waiter_line.queue
        principal = waiter.principal
        in_flight_left = self.in_flight.capacity(waiter_line, principal, waiter.quota)
        capacity = min(queue.capacity, in_flight_left)
        choosing = ClaimSelector(
            min(waiter.wants, TURN, share, capacity),
            waiter.bytes_left,
            min(waiter.answer_bytes_left, self._budget.share_of(principal)),
            held,
            self._payloads.get,
            self._kept_back,
            partial(self._can_serve, waiter_line),
            self._passing_of(waiter_line),
            one_fits=not (waiter.has_begun or self._budget.is_exceeded),
        )
        claimed = self._owner.shard.leases.claim(
            queue, choosing, waiter.lease_ms, waiter.consumer, now_ms, principal
        )
        size_bytes = choosing.size_bytes if choosing.chosen else 0
        return ClaimBatch(claimed, choosing.chosen, size_bytes), choosing.skipped_count


def _reads_on(waiter_line: WaiterLine) -> bool:
    """Whether a look reads more behind what it passed over; if not, the next one goes on there."""
    now_s = time.monotonic()
    waiter_line.reading_since_s = waiter_line.reading_since_s or now_s
    has_time = now_s - waiter_line.reading_since_s <= READ_ON_S  # once at least
    reads_on = bool(waiter_line.line) and (has_time or not waiter_line.impatient)
    waiter_line.behind = not reads_on
    return reads_on


def _pass_over(waiter_line: WaiterLine, waiter: Waiter) -> None:
    """A waiter that may get no more now: it ends with what it has, or lets the others go first."""
    if waiter.has_begun:
        waiter_line.leave(waiter)
        waiter.failed(None)
    else:
        waiter_line.line.move_to_end(waiter)


def _take(fetches: Iterable[Fetch], held: dict[int, CachedMessage]) -> FetchResult:
    """Adds what fetches have brought to the held messages; returns what else came of them."""
    fetched = FetchResult()
    for fetch in fetches:
        fetch.task.result()
        held.update(fetch.held)
        fetched.add(fetch.result)
    return fetched
