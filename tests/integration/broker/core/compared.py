"""A real broker beside plain queues: asks it for every list, and compares."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import grpc.aio

from services.broker.core.queue import ATTEMPTS_USED_UP
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.v1 import entry_pb2
from slatemq.v1.queue_pb2 import (
    ENTRY_STATE_AVAILABLE,
    ENTRY_STATE_DELAYED,
    ENTRY_STATE_DONE,
    ENTRY_STATE_FAILED,
    ENTRY_STATE_IN_FLIGHT,
    EntryState,
)
from tests.entry_stubs import EntryStubs
from tests.integration.broker.core.plain_queue import PlainQueue
from tests.integration.broker.rig import Rig

QUEUES = ("red", "green", "blue")

LOOKS = 100
"""So often is looked whether the broker's own look at what is due is over: for some ten seconds."""


class Compared:
    """A rig and the plain queues that must be like its queues."""

    rig: Rig
    entries: EntryStubs

    def __init__(self, chosen: random.Random) -> None:
        self.random = chosen
        self.queues: dict[str, PlainQueue] = {}
        self.over: dict[str, str] = {}
        """What became of leases: acked, nacked, ended, or gone with their queue."""

    def a_queue(self) -> tuple[str, PlainQueue]:
        name = self.random.choice(QUEUES)
        return name, self.queues[name]

    def a_lease(self) -> tuple[PlainQueue, str] | None:
        held = [(queue, token) for queue in self.queues.values() for token in queue.held]
        return self.random.choice(held) if held else None

    def connect(self, rig: Rig) -> None:
        """Goes on with this broker."""
        self.rig = rig
        self.entries = EntryStubs(rig.channel)

    @property
    def now_ms(self) -> int:
        return self.rig.clock.now_ms()

    async def compare(self) -> None:
        """Every list of every queue, and its counts."""
        for name, queue in self.queues.items():
            now_ms = self.now_ms
            available = await self.list_entries(name, ENTRY_STATE_AVAILABLE)
            expected = queue.available(now_ms)
            assert sorted(one.message_id for one in available) == sorted(
                one.message_id for one in expected
            )
            order = [(one.priority, one.since_ms) for one in expected]
            by_id = {one.message_id: one for one in expected}
            listed = [by_id[one.message_id] for one in available]
            assert [(one.priority, one.since_ms) for one in listed] == order
            delayed = {one.message_id for one in await self.list_entries(name, ENTRY_STATE_DELAYED)}
            assert delayed == queue.delayed(now_ms)
            held = {
                (one.message_id, one.consumer_id, one.attempts_count, one.lease_deadline_ms)
                for one in await self.list_entries(name, ENTRY_STATE_IN_FLIGHT)
            }
            assert held == {
                (one.was.message_id, one.consumer, one.was.attempts, one.ends_ms)
                for one in queue.held.values()
            }
            done = [
                (one.message_id, one.attempts_count, one.consumer_id, one.transferred_to)
                for one in await self.list_entries(name, ENTRY_STATE_DONE)
            ]
            assert done == queue.done
            await self._compare_failed(name, queue)
            await self._compare_counts(name, queue)

    async def _compare_failed(self, name: str, queue: PlainQueue) -> None:
        failed = await self.list_entries(name, ENTRY_STATE_FAILED, entry_pb2.ENTRY_VIEW_ATTEMPTS)
        times = [one.finished_at_ms for one in failed]
        assert times == sorted(times)
        # Leases that ended together have no order.
        assert sorted((one.message_id, one.attempts_count, one.reason) for one in failed) == sorted(
            queue.failed
        )
        for one in failed:
            items = [
                (attempt.consumer_id, attempt.outcome, attempt.queue_id) for attempt in one.attempts
            ]
            assert items == [
                (attempt.consumer, attempt.outcome, attempt.queue_id or name)
                for attempt in queue.history[one.message_id]
            ]

    async def _compare_counts(self, name: str, queue: PlainQueue) -> None:
        counts = await self._counts_at_rest(name, len(queue.delayed(self.now_ms)))
        assert counts.get("done", 0) == len(queue.done)
        assert counts.get("failed", 0) == len(queue.failed)
        assert counts.get("in_flight", 0) == len(queue.held)
        delayed = queue.delayed(self.now_ms)
        assert counts.get("delayed", 0) == len(delayed)
        # Of those past their retention, some that no one has come upon may still count.
        available = len(queue.available(self.now_ms))
        assert available <= counts.get("available", 0) <= len(queue.waiting) - len(delayed)

    async def _counts_at_rest(self, name: str, delayed: int) -> dict[str, int]:
        """The counts, once a look at what is due that the broker has begun itself is over."""
        for _ in range(LOOKS):
            await self.rig.owner.look_at_due()
            counts = await self.rig.counts(name)
            if counts.get("delayed", 0) == delayed:
                break
            await asyncio.sleep(0.1)
        return counts

    async def settle(self, name: str) -> None:
        """After a claim: takes over what it found to have no attempts left."""
        queue = self.queues[name]
        spent = {w.message_id for w in queue.waiting.values() if w.attempts >= queue.max_attempts}
        if spent:
            for one in await self.list_entries(name, ENTRY_STATE_FAILED):
                if one.message_id in spent and one.reason == ATTEMPTS_USED_UP:
                    queue.exhaust(one.message_id, ATTEMPTS_USED_UP)

    async def list_entries(
        self,
        name: str,
        state: EntryState.ValueType,
        view: entry_pb2.EntryView.ValueType = entry_pb2.ENTRY_VIEW_BASIC,
    ) -> Sequence[entry_pb2.Entry]:
        found: list[entry_pb2.Entry] = []
        token = ""
        while True:
            request = entry_pb2.ListEntriesRequest(
                queue_id=name,
                state=state,
                page_size=self.random.choice((1, 7, 1000)) if len(found) < 20 else 1000,
                page_token=token,
                view=view,
            )
            answer = await self.entries.ListEntries(request)
            found += answer.entries
            token = answer.next_page_token
            if not token:
                return found


async def is_refused(call: Any, *reasons: str) -> bool:
    """Whether a call is refused, which it may be for these reasons alone."""
    return await why_refused(call, *reasons) != ""


async def why_refused(call: Any, *reasons: str) -> str:
    """The reason for which a call is refused, which must be one of these; "" when it is not."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        reason = from_rpc_error(error).reason
    else:
        return ""
    if reason not in reasons:
        raise AssertionError(f"refused for {reason}, not {reasons}")
    return reason
