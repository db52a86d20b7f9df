"""Random histories, the part about repair: cancelled, rescheduled, redriven, purged."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable
from dataclasses import replace
from typing import NamedTuple

from slatemq.v1 import entry_pb2, queue_pb2
from slatemq.v1.queue_pb2 import (
    ENTRY_STATE_AVAILABLE,
    ENTRY_STATE_DELAYED,
    ENTRY_STATE_DONE,
    ENTRY_STATE_FAILED,
    ENTRY_STATE_IN_FLIGHT,
)
from tests.integration.broker.core.compared import QUEUES, why_refused
from tests.integration.broker.core.executed import Executed
from tests.integration.broker.core.plain_queue import PlainQueue, Waiting


class Noted(NamedTuple):
    """An entry that waits, or waited once, and the handle that it was listed with."""

    name: str
    queue: PlainQueue
    entry: Waiting
    handle: str


class Repaired(Executed):
    """Its steps repair queues by hand."""

    def __init__(self, chosen: random.Random) -> None:
        super().__init__(chosen)
        self._noted: deque[Noted] = deque(maxlen=20)

    async def cancel(self) -> None:
        found = await self._an_entry()
        if found:
            request = entry_pb2.CancelEntryRequest(handle=found.handle)
            if await self._is_done(found, self.entries.CancelEntry(request)):
                del self.queues[found.name].waiting[found.entry.message_id]

    async def reschedule(self) -> None:
        found = await self._an_entry()
        if not found:
            return
        at_ms = self.now_ms + self.random.choice((-5, 1, 700, 30_000))
        request = entry_pb2.RescheduleEntryRequest(handle=found.handle, visible_at_ms=at_ms)
        if await self._is_done(found, self.entries.RescheduleEntry(request)):
            queue = self.queues[found.name]
            entry = queue.waiting.pop(found.entry.message_id)
            queue.add(replace(entry, since_ms=at_ms), self.now_ms)

    async def _an_entry(self) -> Noted | None:
        """One that waits, or one that did when its handle was given."""
        if self._noted and self.random.random() < 0.3:
            return self.random.choice(self._noted)
        name, queue = self.a_queue()
        there = [one for one in queue.waiting.values() if not one.over(self.now_ms)]
        if not there:
            return None
        entry = self.random.choice(there)
        delayed = entry.since_ms > self.now_ms
        state = ENTRY_STATE_DELAYED if delayed else ENTRY_STATE_AVAILABLE
        listed = await self.list_entries(name, state)
        [handle] = [one.handle for one in listed if one.message_id == entry.message_id]
        self._noted.append(Noted(name, queue, entry, str(handle)))
        return self._noted[-1]

    async def _is_done(self, found: Noted, call: Awaitable[object]) -> bool:
        """Whether a call took effect, which it must have if the entry has not moved since."""
        queue = self.queues[found.name]
        waits = queue.waiting.get(found.entry.message_id)
        if waits is not None and waits.over(self.now_ms):
            waits = None
        why = await why_refused(call, "WRONG_STATE", "ENTRY_UNKNOWN")
        if waits is found.entry and queue is found.queue:
            assert why == ""
        elif waits is None:
            assert why != ""
        else:
            assert why in ("", "ENTRY_UNKNOWN")
        return why == ""

    async def redrive(self) -> None:
        name, queue = self.a_queue()
        target = self.random.choice(QUEUES)
        plain = self.queues[target]
        # In the broker's order: the model knows none of what failed together.
        dead_letters = [one.message_id for one in await self.list_entries(name, ENTRY_STATE_FAILED)]
        ids = [
            one
            for one in dead_letters
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
        queue.redrive(ids, target, plain, self.now_ms)

    async def purge(self) -> None:
        name, queue = self.a_queue()
        state = self.random.choice(
            (ENTRY_STATE_AVAILABLE, ENTRY_STATE_IN_FLIGHT, ENTRY_STATE_DONE, ENTRY_STATE_FAILED)
        )
        request = queue_pb2.PurgeQueueRequest(queue_id=name, states=[state])
        await self.rig.queues.PurgeQueue(request)
        if state == ENTRY_STATE_AVAILABLE:
            queue.waiting.clear()
        elif state == ENTRY_STATE_IN_FLIGHT:
            for token in queue.held:
                self.note(token, "ended")
            queue.held.clear()
        elif state == ENTRY_STATE_DONE:
            queue.done.clear()
        else:
            queue.failed.clear()
