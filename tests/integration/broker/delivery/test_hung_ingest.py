"""An ingest that takes calls and never answers: it holds up only what is for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import open_root
from libs.storage.layout.ids import message_id
from services.broker.dead_letters import redrive_runner
from services.broker.dead_letters.redrive_runner import ASKING_MAX
from services.broker.delivery import message_cache
from services.broker.delivery.message_cache import Ingests
from services.broker.outbox import targets
from services.broker.outbox.targets import IngestPushes
from services.broker.shard import replay_starts
from slatemq.v1 import assignment_pb2, entry_pb2
from tests.integration.broker.entry_calls import (
    RUNNING,
    ended,
    fail,
    fail_again,
    redrive,
    start,
)
from tests.integration.broker.outbox.test_executing import execute, push
from tests.integration.broker.rig import Rig, close_channel, running
from tests.integration.ingest.server import message, serving
from tests.integration.waiting import WAIT_SECONDS, eventually
from tests.manual_clock import ManualClock

REAL: Any = Ingests
"""In place of the rig's ingest."""

STUCK = [f"q{number}" for number in range(30)]
"""Queues whose dead letters the hanging ingest has: far more than may wait for it at once."""

ONE_DEADLINE_S = WAIT_SECONDS
"""Below every deadline of a call to an ingest: who waits for one takes longer."""

DEADLINES = [
    (message_cache, "FETCH_DEADLINE_S"),
    (message_cache, "REPLACE_DEADLINE_S"),
    (targets, "PUSH_DEADLINE_S"),
    (replay_starts, "ASK_DEADLINE_S"),
]
"""Of a broker's calls to an ingest."""


@pytest.fixture(autouse=True)
def late_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in DEADLINES:
        monkeypatch.setattr(module, name, 5 * ONE_DEADLINE_S)


class Silent(grpc.GenericRpcHandler):
    """Takes every call, and never answers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._never = asyncio.Event()  # Referred to, or the calls could be collected as garbage.

    def service(self, handler_call_details: Any) -> Any:
        self.calls.append(handler_call_details.method)
        return grpc.unary_unary_rpc_method_handler(self._wait)

    async def _wait(self, request: bytes, context: Any) -> bytes:
        await self._never.wait()
        return b""


@asynccontextmanager
async def hung(root: Path, shard: int) -> AsyncIterator[list[str]]:
    """Announces an ingest that hangs and has a database; gives the calls that it took."""
    async with serving(root.as_uri(), shard=shard):
        pass
    silent, server = Silent(), grpc.aio.server()
    server.add_generic_rpc_handlers((silent,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    directory = TopologyDirectory(open_root(root.as_uri()).objects)
    await directory.announce(Peer("ingest", shard, f"127.0.0.1:{port}"))
    try:
        yield silent.calls
    finally:
        await server.stop(0)


async def assign_of_log_1(rig: Rig, queue_id: str, ids: Sequence[int]) -> None:
    state = await rig.assignments.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
    assignment = assignment_pb2.QueueAssignment(queue_id=queue_id, message_ids=ids)
    piece = assignment_pb2.LogRange(
        ingest_shard=1,
        last_sequence=max(ids),
        assignments=[assignment],
        config_revision=state.config_revision,
    )
    request = assignment_pb2.AssignRequest(ranges=[piece])
    await rig.assignments.Assign(request)


async def test_pushes_to_another_ingest_go_on_and_those_for_it_come_when_it_is_back(
    tmp_path: Path,
) -> None:
    # Given pushes for ingest 0, which hangs, in the outbox of broker 1
    clock = ManualClock()
    async with running(tmp_path, clock, pushes=IngestPushes, shard=1) as rig:
        await rig.create()
    async with hung(tmp_path, 0) as taken:
        async with running(tmp_path, clock, pushes=IngestPushes, shard=1) as rig:
            await execute(rig, push(payload=b"for 0"))
            await eventually(lambda: taken)
        # When the broker, started again, pushes to another one
        async with (
            serving(tmp_path.as_uri(), shard=1) as one,
            running(tmp_path, clock, pushes=IngestPushes, shard=1) as rig,
        ):
            outbox = rig.owner.shard.outbox
            async with asyncio.timeout(ONE_DEADLINE_S):
                for n in range(20):
                    await execute(rig, push(payload=b"%d" % n))
                    await eventually(lambda: outbox.waiting_count(1) == 0)
            # Then these are there at once
            log = await one.log()
            assert len(log) == 20
            assert outbox.waiting_count(0) == 1
    # And the other comes when its ingest answers
    async with (
        serving(tmp_path.as_uri()) as zero,
        running(tmp_path, clock, pushes=IngestPushes, shard=1) as rig,
    ):
        await eventually(lambda: rig.owner.shard.outbox.waiting_count(0) == 0)
        (entry,) = await zero.log()
        assert await zero.payloads(entry.message_id) == [b"for 0"]


async def test_redrives_of_what_another_ingest_has_go_on(tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        serving(tmp_path.as_uri(), shard=1) as one,
        running(tmp_path, shard=2) as other,
    ):
        # Given dead letters whose messages ingest 0 has, which hangs, and others that ingest 1 has
        await other.create("far")
        stored = await one.publish(*(message(b"%d" % n) for n in range(3)))
        async with running(tmp_path, clock, shard=1) as rig:
            await rig.create("p", max_attempts=1)
            for number, queue_id in enumerate(STUCK, 1):
                await rig.create(queue_id, max_attempts=1)
                await fail(rig, [message_id(0, number)], queue_id=queue_id)
            await assign_of_log_1(rig, "p", stored)
            await fail_again(rig, len(stored), queue_id="p")
        async with (
            hung(tmp_path, 0) as taken,
            running(tmp_path, clock, REAL, pushes=IngestPushes, shard=1) as rig,
        ):
            stuck = [
                await start(rig, queue_id=queue_id, target_queue_id="far") for queue_id in STUCK
            ]
            await eventually(lambda: len(taken) >= ASKING_MAX)

            # When those of the other queue are redriven, then they go at once
            async with asyncio.timeout(ONE_DEADLINE_S):
                result = await start(rig, queue_id="p", target_queue_id="far", rate=10)
                result = await ended(rig, result.redrive_id)
                await eventually(lambda: rig.owner.shard.outbox.waiting_count(1) == 0)
            assert (result.state, result.redriven_count) == (entry_pb2.Redrive.STATE_DONE, 3)
            for each in stuck:
                assert (await redrive(rig, each.redrive_id)).state == RUNNING
            assert len(taken) < len(STUCK)
        assert len(await one.log()) == 6


async def test_a_redrive_asks_again_where_the_channel_to_the_ingest_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive_runner, "RETRY_S", 0.01)
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create(max_attempts=1)
        await fail(rig, [message_id(0, 1)])
    async with hung(tmp_path, 0) as taken, running(tmp_path, clock, REAL) as rig:
        started = await start(rig, filter="size == 0")
        await eventually(lambda: taken)

        await close_channel(rig.service.channels, "ingest", 0)
        await eventually(lambda: len(taken) > 1 or rig.ended.done())

        assert not rig.ended.done()
        assert (await redrive(rig, started.redrive_id)).state == RUNNING
