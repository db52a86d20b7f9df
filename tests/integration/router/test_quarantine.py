"""A filter that takes too long, between the real processes: others go on, its messages wait."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf import field_mask_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.filters import Allowance, TooSlow
from services.router import routing, shares
from slatemq.v1 import (
    assignment_pb2,
    ingest_pb2,
    ingest_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
)
from tests.integration.broker.rig import running as broker
from tests.integration.router.peers import MemoryBroker, Running, ShardMemory
from tests.integration.router.stack import peers
from tests.integration.stack.processes import WAIT_SECONDS, Service, Stack, patiently, running
from tests.integration.waiting import eventually

SLOW = '!headers.kind.matches("^[0-9]") && !headers.kind.matches("\\\\w{46}")'
"""True for all messages here; the library compiles the pattern for each, in ten milliseconds."""


async def publish(stack: Stack, count: int) -> list[int]:
    """This many messages that the slow filter alone takes, and then one that both take."""
    stub = ingest_pb2_grpc.IngestServiceStub(stack.ingest.there)
    request = ingest_pb2.PublishRequest(
        runs=[
            # Unlike one another, or they would be judged as one.
            ingest_pb2.PublishRun(payloads=[b""], headers={"kind": kind})
            for kind in [*(f"b{n}" for n in range(count)), "a"]
        ],
        request_id=str(uuid.uuid4()),
    )
    return list((await patiently(lambda: stub.Publish(request))).message_ids)


async def queue(stack: Stack, queue_id: str) -> queue_pb2.Queue:
    stub = queue_pb2_grpc.QueueServiceStub(stack.broker.there)
    request = queue_pb2.GetQueueRequest(queue_id=queue_id)
    return (await patiently(lambda: stub.GetQueue(request))).queue


async def in_quarantine(stack: Stack, queue_id: str) -> queue_pb2.Quarantine:
    """Waits until it is."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not (found := await queue(stack, queue_id)).HasField("quarantine"):
            await asyncio.sleep(0.05)
    return found.quarantine


async def repair(stack: Stack, queue_id: str, source: str) -> queue_pb2.Queue:
    stub = queue_pb2_grpc.QueueServiceStub(stack.broker.there)
    request = queue_pb2.UpdateQueueRequest(
        queue=queue_pb2.Queue(queue_id=queue_id, filter=source),
        update_mask=field_mask_pb2.FieldMask(paths=["filter"]),
    )
    return (await patiently(lambda: stub.UpdateQueue(request))).queue


async def is_healthy(service: Service) -> None:
    stub: Any = health_pb2_grpc.HealthStub(service.there)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow  # Four processes start.
async def test_a_slow_filter_holds_up_no_other_queue_and_gets_each_message_once_when_repaired(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as stack:
        await stack.create_queue("fine", 'headers["kind"] == "a"')
        await stack.create_queue("slow", SLOW)
        sent = await publish(stack, 150)

        reason = (await in_quarantine(stack, "slow")).reason
        assert "ms for one message" in reason
        await stack.routed()
        assert await stack.drained("fine") == Counter(sent[-1:])

        # It outlives those who decided it and those who keep it; what comes meanwhile waits, too.
        for service in (stack.broker, *stack.routers):
            await service.kill()
            await service.start()
        more = await publish(stack, 150)
        await stack.routed()
        kept = await queue(stack, "slow")
        assert kept.quarantine.reason == reason
        assert not kept.HasField("replay")
        assert await stack.drained("fine") == Counter(more[-1:])

        # Lifted as it is, it comes back into quarantine, and loses nothing by it.
        stub = queue_pb2_grpc.QueueServiceStub(stack.broker.there)
        lifted = await stub.LiftQuarantine(queue_pb2.LiftQuarantineRequest(queue_id="slow"))
        assert not lifted.queue.HasField("quarantine")
        await in_quarantine(stack, "slow")
        last = await publish(stack, 5)
        await stack.routed()

        repaired = await repair(stack, "slow", "true")
        assert not repaired.HasField("quarantine")
        after = await publish(stack, 5)
        await stack.routed()
        await stack.replayed("slow")
        got: Counter[int] = Counter()
        async with asyncio.timeout(WAIT_SECONDS):
            while len(got) < len(sent + more + last + after):
                got += await stack.drained("slow")
        got += await stack.drained("slow")
        assert got == Counter([*sent, *more, *last, *after])


@pytest.mark.slow  # Four processes start.
async def test_routers_answer_while_they_judge_an_entry_by_many_filters(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        # Each takes a millisecond a message, and far too small a part of the time for quarantine.
        for n in range(20):
            await stack.create_queue(f"q{n}", f'headers.kind.matches("^x{n}\\\\w{{4}}")')
        await publish(stack, 60)
        routed = asyncio.create_task(stack.routed())
        answers = 0
        while not routed.done():
            for router in stack.routers:
                await is_healthy(router)
            answers += not routed.done()
        await routed

        # One that waited for the entry's end would have answered once.
        assert answers >= 2


async def test_a_quarantine_of_a_queue_that_changed_or_is_gone_is_none() -> None:
    async with broker() as rig:
        judged_by = (await rig.create("q", filter="size > 5")).revision
        update = queue_pb2.UpdateQueueRequest(
            queue=queue_pb2.Queue(queue_id="q", filter="size > 6"),
            update_mask=field_mask_pb2.FieldMask(paths=["filter"]),
        )
        changed = (await rig.queues.UpdateQueue(update)).queue
        request = assignment_pb2.QuarantineQueueRequest(
            queue_id="q", queue_revision=judged_by, reason="slow"
        )
        await rig.assignments.QuarantineQueue(request)
        asked = queue_pb2.GetQueueRequest(queue_id="q")
        assert not (await rig.queues.GetQueue(asked)).queue.HasField("quarantine")

        request.queue_revision = changed.revision
        await rig.assignments.QuarantineQueue(request)
        assert (await rig.queues.GetQueue(asked)).queue.quarantine.reason == "slow"
        request.queue_id = "gone"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.assignments.QuarantineQueue(request)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


class Quarantining(MemoryBroker):
    """Takes queues into quarantine, and notes which, and why.

    Attributes:
        asked: The calls for that.
        company: It answers none of them before so many have come.
        states_count: How often a router has read its queues.
    """

    def __init__(self, memory: ShardMemory, company: int = 1) -> None:
        super().__init__(memory)
        self.asked: list[assignment_pb2.QuarantineQueueRequest] = []
        self.company = company
        self.states_count = 0
        self._has_company = asyncio.Event()

    async def GetRoutingState(  # noqa: N802
        self, request: assignment_pb2.GetRoutingStateRequest, context: Any
    ) -> assignment_pb2.GetRoutingStateResponse:
        self.states_count += 1
        return await super().GetRoutingState(request, context)

    async def QuarantineQueue(  # noqa: N802
        self, request: assignment_pb2.QuarantineQueueRequest, context: Any
    ) -> assignment_pb2.QuarantineQueueResponse:
        self.asked.append(request)
        if len(self.asked) >= self.company:
            self._has_company.set()
        await self._has_company.wait()
        await self.memory.quarantine(request.queue_id, request.reason)
        return assignment_pb2.QuarantineQueueResponse()


async def test_of_filters_that_hold_up_a_log_together_the_costliest_goes_into_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given bounds that any two filters break together, and messages that wait since long ago
    monkeypatch.setattr(shares, "WINDOW_NS", 1)
    monkeypatch.setattr(shares, "SHARE", 0.0)
    monkeypatch.setattr(shares, "MESSAGE_NS", 0)
    monkeypatch.setattr(shares, "BEHIND_MS", -1)
    # And the processor's time, since whom others interrupt would be the costliest
    monkeypatch.setattr(routing, "Allowance", partial(Allowance, now_ns=time.thread_time_ns))
    async with peers(tmp_path) as stack:
        await stack.broker_server.stop()
        broker = Quarantining(stack.shard)
        server = Running(stack.directory, broker)
        await server.start()
        await stack.shard.set_queue("plain", 'headers["kind"] == "a"')
        await stack.shard.set_queue("cheap", "size > 1")
        turns = ", ".join(["1"] * 60)
        nest = f"[{turns}].all(x, [{turns}].all(y, x == y))"
        await stack.shard.set_queue("costly", f"size > 1 && {nest}")
        published = await stack.log.publish([{"kind": "a", "n": str(n)} for n in range(20)])

        # When they are routed
        async with stack.router():
            await eventually(lambda: broker.asked)
            # Then the costliest is left out, and the others are routed
            assert broker.asked[0].queue_id == "costly"
            assert "while a log was behind" in broker.asked[0].reason
            await eventually(lambda: stack.got("plain") == published)
        await server.stop()


async def test_queues_that_go_together_share_commits_and_one_look_at_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"q{n:02}" for n in range(40)]
    found = [[TooSlow(name, "slow") for name in names]]
    monkeypatch.setattr(shares, "WINDOW_NS", 1)
    monkeypatch.setattr(shares.FilterShare, "too_slow", lambda *_: found.pop() if found else [])
    async with peers(tmp_path) as stack:
        # Given a broker that commits once several calls wait for it
        await stack.broker_server.stop()
        broker = Quarantining(stack.shard, company=10)
        broker.watchable = False
        server = Running(stack.directory, broker)
        await server.start()
        for name in [*names, "fine"]:
            await stack.shard.set_queue(name, "true")
        # When a router has many queues left out at once
        async with stack.router():
            await eventually(lambda: len(broker.asked) == len(names))
            # Then it routes on by what changed, which it has read once
            published = await stack.log.publish([{}])
            await eventually(lambda: stack.shard.assigned == {"fine": published})
        assert broker.states_count == 2
        await server.stop()
