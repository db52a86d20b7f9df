"""Random histories, told to a real broker and to plain queues at once; the lists must agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from slatemq.v1 import consumer_pb2, entry_pb2, queue_pb2
from slatemq.v1.consumer_pb2 import Command
from slatemq.v1.queue_pb2 import (
    ENTRY_STATE_AVAILABLE,
    ENTRY_STATE_DELAYED,
    ENTRY_STATE_DONE,
    ENTRY_STATE_FAILED,
    ENTRY_STATE_IN_FLIGHT,
)
from tests.integration.broker.compared import Compared, is_refused
from tests.integration.broker.plain_queue import Held, PlainQueue, Waiting
from tests.integration.broker.rig import Rig

QUEUES = ("red", "green", "blue")
LEASE_MS = 30_000
LEASE_MS_MIN = 1000
GRACE_MS = 30_000

Step = Callable[[], Coroutine[Any, Any, None]]


class Differential(Compared):
    """One history. Give it a rig with `use`, do `steps`, and `compare` whenever you like."""

    def __init__(self, seed: int) -> None:
        super().__init__(random.Random(seed))
        self.next_id = 1
        self.done_count = 0
        weighted: dict[Step, int] = {
            self.assign: 14,
            self.claim: 16,
            self.ack: 10,
            self.nack: 10,
            self.release: 4,
            self.extend: 4,
            self.execute: 8,
            self.cancel: 4,
            self.reschedule: 5,
            self.redrive: 3,
            self.purge: 1,
            self.pause_or_resume: 2,
            self.update: 2,
            self.delete_and_create: 1,
            self.let_time_pass: 10,
        }
        self._steps, self._weights = list(weighted), list(weighted.values())

    async def use(self, rig: Rig) -> None:
        """Goes on with this broker: the first one, or the same after a restart."""
        first = not self.queues
        self.connect(rig)
        for name in QUEUES:
            if first:
                await self._create(name)
        # A restart gives the leases that run some grace.
        now_ms = self.now_ms
        for queue in self.queues.values():
            for token, held in queue.held.items():
                ends_ms = max(held.ends_ms, now_ms + min(held.length_ms, GRACE_MS))
                queue.held[token] = Held(
                    token, held.was, held.consumer, held.claimed_ms, ends_ms, held.length_ms
                )

    async def steps(self, count: int) -> None:
        """So many random commands."""
        for step in self.random.choices(self._steps, self._weights, k=count):
            await self._advance(self.random.randint(1, 20))
            await step()
            self.done_count += 1

    async def _advance(self, by_ms: int) -> None:
        await self.rig.pass_time(by_ms)
        for queue in self.queues.values():
            for token in queue.ended(self.now_ms):
                queue.failed_attempt(token, "lease expired", None, self.now_ms)

    def _queue(self) -> tuple[str, PlainQueue]:
        name = self.random.choice(QUEUES)
        return name, self.queues[name]

    def _token(self) -> tuple[PlainQueue, str] | None:
        held = [(queue, token) for queue in self.queues.values() for token in queue.held]
        return self.random.choice(held) if held else None

    # --- Messages come and go -----------------------------------------------

    async def assign(self) -> None:
        name, queue = self._queue()
        count = self.random.choice((1, 1, 2, 5, 40))
        ids = range(self.next_id, self.next_id + count)
        self.next_id += count
        now_ms = self.now_ms
        priorities = [self.random.choice((0, 5, 128, 255)) for _ in ids]
        visible = [
            now_ms + self.random.randint(1, 60_000) if self.random.random() < 0.3 else 0
            for _ in ids
        ]
        deadlines = [
            now_ms + self.random.randint(1, 90_000) if self.random.random() < 0.1 else 0
            for _ in ids
        ]
        await self.rig.assign(
            ids,
            name,
            priorities=priorities,
            visible_at_ms=visible,
            retention_deadlines_ms=deadlines,
        )
        for row in zip(ids, priorities, visible, deadlines, strict=True):
            queue.add(Waiting(*row), now_ms)

    async def claim(self) -> None:
        name, queue = self._queue()
        most = self.random.choice((1, 1, 3, 20))
        consumer = self.random.choice(("ann", "bob"))
        length_ms = self.random.choice((LEASE_MS_MIN, 5_000, LEASE_MS))
        wish = {"max_messages": most, "lease_ms": length_ms, "consumer_id": consumer}
        if queue.paused:
            assert await is_refused(self.rig.claim(name, **wish), "QUEUE_PAUSED")
            return
        claimed = await self.rig.claim(name, **wish)
        now_ms = self.now_ms
        expected = queue.claimable(now_ms)
        # It may answer with less than is there, but not with nothing.
        assert min(1, len(expected)) <= len(claimed) <= min(most, len(expected))
        for place, message in enumerate(claimed):
            message_id = message.message.message_id
            due = expected[place]
            given = queue.waiting[message_id]
            # Of those that fell due in one millisecond either may be first.
            assert (given.priority, given.since_ms) == (due.priority, due.since_ms), place
            assert message.attempts_count == given.attempts + 1
            assert message.priority == given.priority
        for message in claimed:
            token = message.lease_token
            queue.claim(message.message.message_id, token, consumer, length_ms, now_ms)

    async def ack(self) -> None:
        found = self._token()
        if found:
            queue, token = found
            assert await self.rig.ack(token) == [0]
            queue.complete(token)
            assert await self.rig.ack(token) == [0]

    async def nack(self) -> None:
        found = self._token()
        if found:
            queue, token = found
            delay_ms = self.random.choice((None, 0, 1, 2_000, 40_000))
            item = consumer_pb2.NackItem(lease_token=token, reason="no", delay_ms=delay_ms)
            await self._nack(item)
            queue.failed_attempt(token, "nack: no", delay_ms, self.now_ms)

    async def release(self) -> None:
        found = self._token()
        if found:
            queue, token = found
            delay_ms = self.random.choice((None, 0, 3_000))
            await self._nack(
                consumer_pb2.NackItem(lease_token=token, release=True, delay_ms=delay_ms)
            )
            queue.give_back(token, delay_ms or 0, self.now_ms)

    async def _nack(self, item: consumer_pb2.NackItem) -> None:
        answer = await self.rig.consumers.Nack(consumer_pb2.NackRequest(items=[item]))
        assert [status.code for status in answer.results] == [0]

    async def extend(self) -> None:
        found = self._token()
        if found:
            queue, token = found
            length_ms = self.random.choice((LEASE_MS_MIN, 60_000))
            request = consumer_pb2.ExtendLeaseRequest(lease_tokens=[token], lease_ms=length_ms)
            (result,) = (await self.rig.consumers.ExtendLease(request)).results
            assert result.lease_deadline_ms == self.now_ms + length_ms
            held = queue.held[token]
            queue.held[token] = Held(
                token,
                held.was,
                held.consumer,
                held.claimed_ms,
                result.lease_deadline_ms,
                held.length_ms,
            )

    # --- Commands together --------------------------------------------------

    async def execute(self) -> None:
        held = [(queue, token) for queue in self.queues.values() for token in queue.held]
        chosen = self.random.sample(held, min(len(held), self.random.randint(1, 4)))
        commands: list[Command] = []
        effects: list[Callable[[], object]] = []
        now_ms = self.now_ms
        arriving: set[tuple[str, int]] = set()
        for queue, token in chosen:
            kind = self.random.choice(("complete", "fail", "release", "transfer"))
            command = Command()
            if kind == "complete":
                command.complete.lease_token = token
                effects.append(partial(queue.complete, token))
            elif kind == "fail":
                command.fail.lease_token, command.fail.reason = token, "bad"
                effects.append(partial(queue.give_up, token, "fail: bad", now_ms))
            elif kind == "release":
                command.release.lease_token = token
                effects.append(partial(queue.give_back, token, 0, now_ms))
            else:
                was = queue.held[token].was
                target = self.random.choice(QUEUES)
                # The plain queues hold a message once each.
                if self.queues[target].has(was.message_id) or (target, was.message_id) in arriving:
                    continue
                arriving.add((target, was.message_id))
                priority = self.random.choice((0, 128))
                delay_ms = self.random.choice((0, 5_000))
                command.transfer.lease_token = token
                command.transfer.target_queue_id = target
                command.transfer.priority = priority
                command.transfer.delay_ms = delay_ms
                entry = Waiting(was.message_id, priority, now_ms + delay_ms, was.deadline_ms)
                effects += (
                    partial(queue.complete, token, target),
                    partial(queue.carry_history, was.message_id, self.queues[target]),
                    partial(self.queues[target].add, entry, now_ms),
                )
            commands.append(command)
        if not commands:
            return
        if self.random.random() < 0.2:
            bad = Command()
            bad.complete.lease_token = "0-00000000000000aa"
            request = consumer_pb2.ExecuteRequest(commands=[*commands, bad])
            assert await is_refused(self.rig.consumers.Execute(request), "LEASE_UNKNOWN")
            return
        request = consumer_pb2.ExecuteRequest(request_id=f"r{self.done_count}", commands=commands)
        for _ in range(self.random.choice((1, 2))):
            await self.rig.consumers.Execute(request)
        for effect in effects:
            effect()

    # --- Repair -------------------------------------------------------------

    def _waiting(self) -> tuple[str, PlainQueue, Waiting] | None:
        name, queue = self._queue()
        there = [one for one in queue.waiting.values() if not one.over(self.now_ms)]
        return (name, queue, self.random.choice(there)) if there else None

    async def _handle(self, name: str, entry: Waiting) -> str:
        delayed = entry.since_ms > self.now_ms
        state = ENTRY_STATE_DELAYED if delayed else ENTRY_STATE_AVAILABLE
        for listed in await self.list_entries(name, state):
            if listed.message_id == entry.message_id:
                return str(listed.handle)
        raise AssertionError(f"{entry} is not listed in {name}")

    async def cancel(self) -> None:
        found = self._waiting()
        if found:
            name, queue, entry = found
            handle = await self._handle(name, entry)
            await self.entries.CancelEntry(entry_pb2.CancelEntryRequest(handle=handle))
            del queue.waiting[entry.message_id]

    async def reschedule(self) -> None:
        found = self._waiting()
        if found:
            name, queue, entry = found
            handle = await self._handle(name, entry)
            at_ms = self.now_ms + self.random.choice((-5, 1, 700, 30_000))
            request = entry_pb2.RescheduleEntryRequest(handle=handle, visible_at_ms=at_ms)
            await self.entries.RescheduleEntry(request)
            del queue.waiting[entry.message_id]
            queue.add(
                Waiting(entry.message_id, entry.priority, at_ms, entry.deadline_ms, entry.attempts),
                self.now_ms,
            )

    async def redrive(self) -> None:
        name, queue = self._queue()
        target = self.random.choice(QUEUES)
        plain = self.queues[target]
        ids = [
            one
            for one, _, _ in queue.failed
            if self.random.random() < 0.5 and (target == name or not plain.has(one))
        ]
        if len(set(ids)) < len(ids) or not ids:
            return
        if target == name and any(one in queue.waiting for one in ids):
            return
        request = entry_pb2.StartRedriveRequest(
            queue_id=name, target_queue_id=target, message_ids=ids
        )
        redrive = (await self.entries.StartRedrive(request)).redrive
        while redrive.state == entry_pb2.Redrive.STATE_RUNNING:
            asked = entry_pb2.GetRedriveRequest(redrive_id=redrive.redrive_id)
            redrive = (await self.entries.GetRedrive(asked)).redrive
        assert redrive.state == entry_pb2.Redrive.STATE_DONE, redrive
        queue.redrive(ids, plain, self.now_ms)

    async def purge(self) -> None:
        name, queue = self._queue()
        state = self.random.choice(
            (ENTRY_STATE_AVAILABLE, ENTRY_STATE_IN_FLIGHT, ENTRY_STATE_DONE, ENTRY_STATE_FAILED)
        )
        request = queue_pb2.PurgeQueueRequest(queue_id=name, states=[state])
        await self.rig.queues.PurgeQueue(request)
        if state == ENTRY_STATE_AVAILABLE:
            queue.waiting.clear()
        elif state == ENTRY_STATE_IN_FLIGHT:
            queue.held.clear()
        elif state == ENTRY_STATE_DONE:
            queue.done.clear()
        else:
            queue.failed.clear()

    # --- Queues -------------------------------------------------------------

    async def pause_or_resume(self) -> None:
        name, queue = self._queue()
        if queue.paused:
            await self.rig.queues.ResumeQueue(queue_pb2.ResumeQueueRequest(queue_id=name))
        else:
            await self.rig.queues.PauseQueue(queue_pb2.PauseQueueRequest(queue_id=name))
        queue.paused = not queue.paused

    async def update(self) -> None:
        name, queue = self._queue()
        queue.backoff_ms = self.random.choice((0, 1_000, 20_000))
        settings = queue_pb2.Queue(queue_id=name)
        if queue.backoff_ms:
            settings.backoff.kind = queue_pb2.Backoff.KIND_FIXED
            settings.backoff.initial_ms = queue.backoff_ms
        await self.rig.queues.UpdateQueue(
            queue_pb2.UpdateQueueRequest(queue=settings, update_mask=FieldMask(paths=["backoff"]))
        )

    async def delete_and_create(self) -> None:
        name, _ = self._queue()
        await self.rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id=name))
        await self._create(name)

    async def _create(self, name: str) -> None:
        max_attempts = self.random.choice((1, 2, 3))
        while await is_refused(
            self.rig.create(name, max_attempts=max_attempts), "QUEUE_BEING_REMOVED"
        ):
            continue
        self.queues[name] = PlainQueue(name, max_attempts)

    async def let_time_pass(self) -> None:
        await self._advance(self.random.choice((100, 1_000, 10_000)))
