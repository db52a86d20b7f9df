"""Random histories, told to a real broker and to plain queues at once; the lists must agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from slatemq.v1 import queue_pb2
from tests.integration.broker.core.compared import QUEUES, is_refused
from tests.integration.broker.core.finished import LEASE_MS_MIN
from tests.integration.broker.core.plain_queue import PlainQueue, Waiting
from tests.integration.broker.core.repaired import Repaired
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.rig import Rig

LEASE_MS = 30_000
GRACE_MS = 30_000

Step = Callable[[], Coroutine[Any, Any, None]]


class Differential(Repaired):
    """One history. Give it a rig with `use`, do `steps`, and `compare` whenever you like."""

    def __init__(self, seed: int) -> None:
        super().__init__(random.Random(seed))
        self.pushes = Pushes()
        self.next_id = 1
        self.done_count = 0
        weighted: dict[Step, int] = {
            self.assign: 14,
            self.claim: 16,
            self.ack: 8,
            self.nack: 10,
            self.release: 4,
            self.extend: 4,
            self.finish_again: 3,
            self.execute: 12,
            self.repeat: 3,
            self.route_pushes: 3,
            self.cancel: 4,
            self.reschedule: 5,
            self.redrive: 3,
            self.purge: 1,
            self.pause_or_resume: 2,
            self.update: 4,
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
        for queue in self.queues.values():
            queue.restarted(GRACE_MS, self.now_ms)
        if not first:
            await self.repeat()

    async def steps(self, count: int) -> None:
        """This many random commands."""
        for step in self.random.choices(self._steps, self._weights, k=count):
            await self._advance(self.random.randint(1, 20))
            await step()
            self.done_count += 1

    async def _advance(self, by_ms: int) -> None:
        await self.rig.pass_time(by_ms)
        for queue in self.queues.values():
            for token in queue.ended(self.now_ms):
                queue.failed_attempt(token, "lease expired", None, self.now_ms)
                self.note(token, "ended")

    # --- Messages come and go -----------------------------------------------

    async def assign(self) -> None:
        name, queue = self.a_queue()
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
        name, queue = self.a_queue()
        most = self.random.choice((1, 1, 3, 20))
        consumer = self.random.choice(("ann", "bob"))
        length_ms = self.random.choice((LEASE_MS_MIN, 5_000, LEASE_MS))
        options = {"max_messages": most, "lease_ms": length_ms, "consumer_id": consumer}
        if queue.paused:
            assert await is_refused(self.rig.claim(name, **options), "QUEUE_PAUSED")
            return
        claimed = await self.rig.claim(name, **options)
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
        await self.settle(name)

    # --- Queues -------------------------------------------------------------

    async def pause_or_resume(self) -> None:
        name, queue = self.a_queue()
        if queue.paused:
            await self.rig.queues.ResumeQueue(queue_pb2.ResumeQueueRequest(queue_id=name))
        else:
            await self.rig.queues.PauseQueue(queue_pb2.PauseQueueRequest(queue_id=name))
        queue.paused = not queue.paused

    async def update(self) -> None:
        name, queue = self.a_queue()
        settings = queue_pb2.Queue(queue_id=name)
        match self.random.choice(("backoff", "max_attempts", "max_total_lease_ms", "fallback")):
            case "backoff":
                paths = ["backoff"]
                queue.backoff_ms = self.random.choice((0, 1_000, 20_000))
                settings.backoff.kind = queue_pb2.Backoff.KIND_NONE
                if queue.backoff_ms:
                    settings.backoff.kind = queue_pb2.Backoff.KIND_FIXED
                    settings.backoff.initial_ms = queue.backoff_ms
            case "max_attempts":
                paths = ["max_attempts"]
                queue.max_attempts = settings.max_attempts = self.random.choice((1, 2, 3))
            case "max_total_lease_ms":
                paths = ["max_total_lease_ms"]
                queue.total_lease_ms = self.random.choice((LEASE_MS, 45_000, 43_200_000))
                settings.max_total_lease_ms = queue.total_lease_ms
            case _:
                paths = ["fallback_priority"]
                queue.fallback_priority = settings.fallback_priority = self.random.choice((3, 200))
        await self.rig.queues.UpdateQueue(
            queue_pb2.UpdateQueueRequest(queue=settings, update_mask=FieldMask(paths=paths))
        )

    async def delete_and_create(self) -> None:
        name, queue = self.a_queue()
        await self.rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id=name))
        for token in queue.held:
            self.note(token, "gone")
        await self._create(name)

    async def _create(self, name: str) -> None:
        max_attempts = self.random.choice((1, 2, 3))
        create = partial(self.rig.create, name, max_attempts=max_attempts, max_lease_ms=LEASE_MS)
        while await is_refused(create(), "QUEUE_BEING_REMOVED"):
            continue
        self.queues[name] = PlainQueue(name, max_attempts, max_lease_ms=LEASE_MS)

    async def let_time_pass(self) -> None:
        await self._advance(self.random.choice((100, 1_000, 10_000)))
