"""Runs redrives in the background: reads rows of failed lists, judges, and moves step by step.

    rows ──► which are wanted ──► contents, where they are needed ──► one command moves ──► durable

The redrives of one queue take turns, also with what else takes dead letters out: see the mover.
Those of other queues go on meanwhile, so an ingest that hangs holds up only what asks it.

Contents count in the budget of messages on their way, from before they are asked for until what was
made of them is moved. Filters are evaluated for one message at a time, by all redrives together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

from libs.filters import CONTENT_VARIABLES, Facts, Filter, FilterError, context, timestamp
from libs.filters.allowance import FREE_NS, Allowance, TooSlow
from libs.filters.engine import cel
from libs.filters.signatures import Type
from libs.serving.requests.budget import AnswerBudget
from libs.storage.errors import CorruptRecord, StoreUnavailable
from libs.storage.layout.ids import shard_of
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES
from libs.storage.records.queues import AvailableMessage, FailedMessage
from libs.storage.records.redrive_records import RedriveRecord, RedriveState
from services.broker.core.lists.attempts import carried
from services.broker.core.lists.outbox import REASON_CHARACTERS_MAX
from services.broker.core.queue import Queue
from services.broker.core.redrives import RedriveStep, is_its_queue, moved
from services.broker.dead_letters.mover import Mover
from services.broker.delivery.message_cache import FETCH_BYTES, Ingests, ReadResult
from services.broker.entries.finished_pages import ListPosition, TimeRange
from services.broker.outbox.pusher import PushBatch
from slatemq.errors import NotFound, ResourceExhausted, Unavailable
from slatemq.v1.message_pb2 import Message

log = logging.getLogger(__name__)

STEP_MESSAGES: Final = 500
"""Messages moved in one step at most: a few milliseconds, and what a commit of others waits."""

STEP_LOOKED_AT: Final = 20_000
"""The most messages examined in one step, where few of them are wanted."""

ROW_COST: Final = 20
"""Reading a row takes as long as reading this many messages."""

FORGET_EVERY_S: Final = 60.0
"""How often to look for redrives that ended long ago, while none runs."""

LOOKS_AT_ONCE: Final = 8
"""Steps that read dead letters, of redrives of as many queues: each may have some megabytes."""

ASKING_MAX: Final = 4
"""Steps that wait for contents from one ingest, 32 MB each. Steps that need nothing from that
ingest go on."""

BUSY_RETRY_S: Final = 0.1
"""When to retry a step for whose ingest ASKING_MAX steps wait."""

STEPS_A_SECOND: Final = 10
"""Steps per second that share a redrive's rate."""

RETRY_S: Final = 1.0
"""How long to wait when an ingest or the store is down."""

PUSH_BYTES: Final = INLINE_PAYLOAD_MAX_BYTES
"""What a push is reckoned with until its command runs: larger payloads are objects by then."""

OUTBOX_BYTES: Final = 2 * PUSH_BYTES
"""What it is reckoned with in the outbox, with its headers."""

DEAD_LETTER_VARIABLES: Final[Mapping[str, Type]] = {
    **CONTENT_VARIABLES,
    "message_id": "int",
    "reason": "string",
    "attempts": "int",
    "failed_at": "timestamp",
}
"""What a redrive's filter sees."""


class RedriveRunner:
    def __init__(self, mover: Mover, ingests: Ingests, budget: AnswerBudget) -> None:
        """Begin with those that ran when the process ended; see `run`."""
        self._budget = budget
        self._allowance = Allowance(process="broker")
        self._judging = asyncio.Lock()
        self._mover = mover
        self._owner = mover.owner
        self._ingests = ingests
        self._wake = asyncio.Event()
        self._next_at: dict[int, float] = {}
        self._looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._asking: Counter[int] = Counter()  # by ingest, the steps that wait for it

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        turns: dict[str, asyncio.Task[None]] = {}  # by queue
        try:
            while True:
                self._wake.clear()
                await self._owner.run(self._owner.shard.redrives.forget)
                wait_s = self._begin_turns(turns)
                woken = asyncio.create_task(self._wake.wait())
                waited = [woken, *turns.values()]
                await asyncio.wait(waited, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                for queue_id, turn in list(turns.items()):
                    if turn.done():
                        turn.result()
                        del turns[queue_id]
        finally:
            for turn in turns.values():
                turn.cancel()

    def _begin_turns(self, turns: dict[str, asyncio.Task[None]]) -> float:
        """Begins a turn for each queue that has none; returns the seconds until the next is due."""
        now = time.monotonic()
        due: dict[str, list[int]] = {}
        next_at = now + FORGET_EVERY_S
        redrives = self._owner.shard.redrives
        for number in redrives.running():
            record = redrives.get(number)
            if record is None or record.queue_id in turns:
                continue
            at = self._next_at.get(number, 0.0)
            if at <= now:
                due.setdefault(record.queue_id, []).append(number)
            else:
                next_at = min(next_at, at)
        for queue_id, numbers in due.items():
            turns[queue_id] = asyncio.create_task(self._take_turns(numbers))
        return next_at - now

    async def _take_turns(self, numbers: Sequence[int]) -> None:
        """One step of each of these redrives, which are of one queue."""
        for number in numbers:
            try:
                await self._step(number)
            except _IngestBusy:
                self._next_at[number] = time.monotonic() + BUSY_RETRY_S
            except (Unavailable, ResourceExhausted, StoreUnavailable) as error:
                log.warning("redrive %d waits: %s", number, error)
                self._next_at[number] = time.monotonic() + RETRY_S
            except TooSlow as slow:
                log.error("redrive %d cannot go on: %s", number, slow.reason)
                await self._end(number, slow.reason)
            except (CorruptRecord, FilterError) as error:
                log.error("redrive %d cannot go on: %s", number, error)
                await self._end(number, str(error))

    async def _step(self, number: int) -> None:
        record = self._owner.shard.redrives.get(number)
        if record is not None:
            async with self._mover.lock(
                record.queue_id, self._mover.lists.failed, in_background=True
            ):
                await self._step_locked(number)

    async def _step_locked(self, number: int) -> None:
        shard = self._owner.shard
        record = shard.redrives.get(number)
        if record is None or record.state != RedriveState.RUNNING:
            return
        queue = shard.queues.get(record.queue_id)
        if not is_its_queue(queue, record):
            await self._end(number, "its queue was deleted")
            return
        async with self._looks:
            steps = await self._look(queue, record)
        if not steps:
            await self._end(number, "")
            return
        try:
            is_elsewhere = await self._mover.is_elsewhere(record.target_queue_id, record.queue_id)
        except NotFound:
            await self._end(number, f"queue {record.target_queue_id!r} does not exist any more")
            return
        if not record.filter and not is_elsewhere:
            await self._move(number, queue, record, steps, None)
            return
        async with self._budget.fetching(FETCH_BYTES, "redrives") as room_bytes:
            pushes = await self._mover.begin_pushes(OUTBOX_BYTES) if is_elsewhere else None
            if pushes is not None:
                room_bytes //= 2  # half of it for pushes
                count = min(room_bytes // PUSH_BYTES, shard.outbox.room(OUTBOX_BYTES))
                steps = first_chosen(steps, max(count, 1))
            steps = await self._judged(number, record, steps, pushes, room_bytes)
            await self._move(number, queue, record, steps, pushes)

    async def _move(
        self,
        number: int,
        queue: Queue,
        record: RedriveRecord,
        steps: Sequence[RedriveStep],
        pushes: PushBatch | None,
    ) -> None:
        began = time.monotonic()
        command = partial(self._apply, number, steps, pushes)
        try:
            count = await self._mover.run(queue, command, 0, pushes)
        except NotFound:
            return  # The queue was deleted meanwhile: the next step ends the redrive.
        if record.rate:
            due = max(self._next_at.get(number, 0.0), began)
            self._next_at[number] = due + count / record.rate

    async def _look(self, queue: Queue, record: RedriveRecord) -> list[RedriveStep]:
        """The next rows, and what of them is to move as far as that is known without contents."""
        left, quota = STEP_LOOKED_AT, STEP_MESSAGES
        if record.rate:
            quota = min(quota, max(record.rate // STEPS_A_SECOND, 1))
        wanted = set(record.message_ids)
        retention_s = queue.settings.failed_retention_s
        kept_ms = self._owner.clock.now_ms() - retention_s * 1000 if retention_s else 0
        steps: list[RedriveStep] = []
        after = ListPosition(record.next_order, record.next_place - 1)
        async for order, messages in self._mover.lists.failed.rows(queue, TimeRange(), after):
            if order > record.end_order or left <= 0 or quota <= 0:
                break
            left -= ROW_COST
            through = record.next_place if order == record.next_order else 0
            chosen: list[int] = []
            while through < len(messages) and left > 0 and len(chosen) < quota:
                dead_letter = messages[through]
                if dead_letter.failed_at_ms >= kept_ms and (
                    not wanted or dead_letter.message_id in wanted
                ):
                    chosen.append(through)
                through += 1
                left -= 1
            quota -= len(chosen)
            steps.append(RedriveStep(order, messages, through, chosen))
        return steps

    def _apply(
        self, number: int, steps: Sequence[RedriveStep], pushes: PushBatch | None, now_ms: int
    ) -> int:
        """Moves what the steps have chosen, all of it or nothing; returns how many messages.

        With `pushes`, by message ID, into a queue of another shard.
        """
        shard = self._owner.shard
        record = shard.redrives.get(number)
        if record is None or record.state != RedriveState.RUNNING:
            return 0
        queue, target = shard.queues.get(record.queue_id), shard.queues.get(record.target_queue_id)
        if not is_its_queue(queue, record) or (target is None and pushes is None):
            return 0  # one of the two was deleted meanwhile: the next step looks again
        if pushes is not None:
            shard.outbox.check_capacity(len(pushes.rows), pushes.size_bytes)

        if target is not None and pushes is None:
            dead_letters = (dead_letter.message_id for dead_letter in _chosen(steps))
            shard.attempts.require(carried(dead_letters, queue, target))

        def enter(item: AvailableMessage) -> bool:
            if pushes is not None:
                shard.outbox.push(pushes.ingest_shard, pushes.rows[item.message_id], now_ms)
                return True
            if target is None:
                return False
            if target is not queue and target.settings.default_delay_ms:
                # It is new there, and those who look at what is delayed see it first.
                item = item._replace(visible_at_ms=now_ms + target.settings.default_delay_ms)
            if target.waiting.admit(item, now_ms) is None:
                return False
            shard.attempts.carry(item.message_id, queue, target)
            return True

        before = record.redriven_count
        taken: dict[int, set[int]] = {}
        for step in steps:
            if step.order != record.next_order:
                record = record._replace(next_order=step.order, next_place=0)
            if not 0 < queue.failed.oldest_order <= step.order:
                # A purge came in between.
                record = record._replace(next_order=step.order + 1, next_place=0)
                taken[step.order] = set()
                continue
            record, taken[step.order], rows = moved(queue, record, step, enter, now_ms)
            shard.write_rows(rows)
        shard.redrives.put(number, record)
        shard.redrives.note_removed(queue.queue_id, taken, by=number)
        ids = (step.messages[at].message_id for step in steps for at in sorted(taken[step.order]))
        shard.events.redriven(queue, record.target_queue_id, ids, now_ms, record.request_id)
        return record.redriven_count - before

    async def _end(self, number: int, error: str) -> None:
        """Notes that a redrive is done, or (`error`) cannot go on."""

        def end(now_ms: int) -> None:
            record = self._owner.shard.redrives.get(number)
            if record is not None and record.state == RedriveState.RUNNING:
                state = RedriveState.FAILED if error else RedriveState.DONE
                reason = error[:REASON_CHARACTERS_MAX]
                record = record._replace(state=state, ended_at_ms=now_ms, error=reason)
                self._owner.shard.redrives.put(number, record)

        self._next_at.pop(number, None)
        self._allowance.forget(str(number))
        await self._owner.run(end)
        await self._owner.durable()

    # --- Contents -----------------------------------------------------------

    async def _judged(
        self,
        number: int,
        record: RedriveRecord,
        steps: Sequence[RedriveStep],
        pushes: PushBatch | None,
        room_bytes: int,
    ) -> list[RedriveStep]:
        """What of the steps the filter lets through; its pushes are added, where there are any.

        A message that is not stored any more stays where it failed, since nothing is known of it.
        So does one that is too large for the ingest that takes pushes. Contents come `room_bytes`
        at a time, and are uploaded before the next. Raises TooSlow, and ResourceExhausted.
        """
        judge = None
        if record.filter:
            judge = await asyncio.to_thread(dead_letter_filter, record.filter)
        dead_letters: dict[int, list[FailedMessage]] = {}
        for dead_letter in _chosen(steps):
            dead_letters.setdefault(dead_letter.message_id, []).append(dead_letter)
        passed: set[FailedMessage] = set()
        async for contents in self._contents(list(dead_letters), room_bytes):
            for content in contents:
                for dead_letter in dead_letters[content.message_id]:
                    if judge is not None and not await self._matches(
                        number, judge, seen(dead_letter, content)
                    ):
                        continue
                    if pushes is None or _is_added(pushes, record, dead_letter, content):
                        passed.add(dead_letter)
                if judge is None:
                    await asyncio.sleep(0)
            if pushes is not None:
                await self._mover.upload(pushes)
        return [
            step._replace(chosen=[p for p in step.chosen if step.messages[p] in passed])
            for step in steps
        ]

    async def _matches(self, number: int, judge: Filter, message: cel.Context) -> bool:
        """Judge one message. Raises TooSlow for a filter that takes too much of the loop's time."""
        allowance = self._allowance
        async with self._judging:
            began_ns = allowance.now_ns()
            if began_ns - allowance.mark_ns > FREE_NS:
                allowance.mark(began_ns)
            does_match = judge.matches(message)
            if allowance.now_ns() - began_ns > FREE_NS:
                allowance.charge(str(number))
            await asyncio.sleep(0)  # An evaluation may take some milliseconds.
        return does_match

    async def _contents(
        self, ids: Sequence[int], max_bytes: int
    ) -> AsyncIterator[Sequence[Message]]:
        """The messages that are still stored, a response at a time; raises Unavailable."""
        by_shard: dict[int, list[int]] = {}
        for message_id in ids:
            by_shard.setdefault(shard_of(message_id), []).append(message_id)
        for shard, wanted in by_shard.items():
            left = wanted
            while left:
                messages, _, gone = await self._read(shard, left, max_bytes)
                if not messages and not gone:
                    raise Unavailable(
                        f"ingest {shard} returned no message, retry", reason="INGEST_DOWN"
                    )
                yield messages
                result = {*gone, *(message.message_id for message in messages)}
                left = [one for one in left if one not in result]

    async def _read(self, shard: int, ids: Sequence[int], max_bytes: int) -> ReadResult:
        if self._asking[shard] >= ASKING_MAX:
            raise _IngestBusy
        self._asking[shard] += 1
        try:
            return await self._ingests.read(shard, ids, max_bytes)
        finally:
            self._asking[shard] -= 1


class _IngestBusy(Exception):
    """ASKING_MAX steps wait for this ingest already."""


def _chosen(steps: Sequence[RedriveStep]) -> Iterator[FailedMessage]:
    for step in steps:
        for place in step.chosen:
            yield step.messages[place]


def first_chosen(steps: Sequence[RedriveStep], count: int) -> list[RedriveStep]:
    """The steps up to a number of chosen messages; what follows is left to the next look."""
    first: list[RedriveStep] = []
    for step in steps:
        if len(step.chosen) > count:
            through = step.chosen[count]
            return [*first, step._replace(through=through, chosen=step.chosen[:count])]
        first.append(step)
        count -= len(step.chosen)
    return first


def _is_added(
    pushes: PushBatch, record: RedriveRecord, dead_letter: FailedMessage, content: Message
) -> bool:
    """Adds the push of a dead letter; False where it is too large."""
    payload_bytes, most = len(content.payload), pushes.limits.payload_bytes
    if payload_bytes > most:
        log.warning(
            "message %d stays where it failed: it has %d bytes, at most %d can be pushed",
            content.message_id,
            payload_bytes,
            most,
        )
        return False
    ends_ms = dead_letter.retention_deadline_ms
    pushes.add(dead_letter.message_id, record.target_queue_id, content, ends_ms)
    return True


@lru_cache(maxsize=128)
def dead_letter_filter(source: str) -> Filter:
    """A redrive's filter; raises FilterError."""
    return Filter(source, DEAD_LETTER_VARIABLES)


def seen(dead_letter: FailedMessage, content: Message) -> cel.Context:
    more = {
        "reason": dead_letter.reason,
        "attempts": dead_letter.attempts,
        "failed_at": timestamp(dead_letter.failed_at_ms),
    }
    facts = Facts(
        dict(content.headers),
        content.created_at_ms,
        content.received_at_ms,
        len(content.payload),
        message_id=content.message_id,
    )
    return context(facts, DEAD_LETTER_VARIABLES, more)
