"""A real broker beside plain queues: asks it for every list, and compares."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio

from slatemq.rpc_status import from_rpc_error
from slatemq.v1 import entry_pb2, entry_pb2_grpc
from slatemq.v1.queue_pb2 import (
    ENTRY_STATE_AVAILABLE,
    ENTRY_STATE_DELAYED,
    ENTRY_STATE_DONE,
    ENTRY_STATE_FAILED,
    ENTRY_STATE_IN_FLIGHT,
    EntryState,
)
from tests.integration.broker.plain_queue import PlainQueue
from tests.integration.broker.rig import Rig

if TYPE_CHECKING:
    from slatemq.v1.entry_pb2_grpc import EntryServiceAsyncStub


class Compared:
    """A rig and the plain queues that must be like its queues."""

    rig: Rig
    entries: EntryServiceAsyncStub

    def __init__(self, chosen: random.Random) -> None:
        self.random = chosen
        self.queues: dict[str, PlainQueue] = {}

    def connect(self, rig: Rig) -> None:
        """Goes on with this broker."""
        self.rig = rig
        self.entries = entry_pb2_grpc.EntryServiceStub(rig.channel)

    @property
    def now_ms(self) -> int:
        return self.rig.clock.now_ms()

    async def compare(self) -> None:
        """Every list of every queue, and its counts."""
        for name, queue in self.queues.items():
            now_ms = self.now_ms
            available = await self.list_entries(name, ENTRY_STATE_AVAILABLE)
            expected = queue.claimable(now_ms)
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
            failed = await self.list_entries(
                name, ENTRY_STATE_FAILED, entry_pb2.ENTRY_VIEW_ATTEMPTS
            )
            times = [one.finished_at_ms for one in failed]
            assert times == sorted(times)
            # Leases that ended together have no order.
            assert sorted(
                (one.message_id, one.attempts_count, one.reason) for one in failed
            ) == sorted(queue.failed)
            for one in failed:
                told = [
                    (attempt.consumer_id, attempt.outcome, attempt.queue_id)
                    for attempt in one.attempts
                ]
                assert told == [
                    (attempt.consumer, attempt.outcome, attempt.queue_id or name)
                    for attempt in queue.history[one.message_id]
                ]
            counts = await self.rig.counts(name)
            assert counts.get("done", 0) == len(queue.done)
            assert counts.get("failed", 0) == len(queue.failed)
            assert counts.get("in_flight", 0) == len(queue.held)

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


async def is_refused(call: Any, reason: str) -> bool:
    """Whether a call is refused, which it may be for this reason alone."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        told = from_rpc_error(error).reason
    else:
        return False
    if told != reason:
        raise AssertionError(f"refused for {told}, not {reason}")
    return True
