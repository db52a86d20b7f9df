"""Brokers between which a queue moves, a log routed to them, and kills between two steps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.broker.moves.arrivals import Arrivals
from services.broker.moves.departures import Departures
from services.broker.moves.targets import PurgeEpochs
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import NotFound, Unavailable
from slatemq.v1 import assignment_pb2, move_pb2, move_pb2_grpc, queue_pb2, shard_pb2, shard_pb2_grpc
from tests.integration.broker.rig import NO_BACKOFF, Disk, Rig, introduce, running

NEVER = 10**9


@asynccontextmanager
async def two_brokers(folder: Path) -> AsyncIterator[tuple[Rig, Rig]]:
    async with running(folder, shard=0) as first, running(folder, shard=1) as second:
        await introduce(first, second)
        yield first, second


@asynccontextmanager
async def brokers(folder: Path, count: int = 4) -> AsyncIterator[Sequence[Rig]]:
    async with AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(running(folder, shard=shard)) for shard in range(count)
        ]
        await introduce(*rigs)
        yield rigs


def shard_of(rig: Rig) -> int:
    return rig.service._config.shard


async def create_partitions(*rigs: Rig, header: str = "", **settings: Any) -> None:
    """Creates q with a partition on each of these brokers, and has all routed."""
    shards = [shard_of(rig) for rig in rigs]
    for index, rig in enumerate(rigs):
        partition = queue_pb2.Partition(index=index, count=len(rigs), ordering_header=header)
        queue = queue_pb2.Queue(queue_id="q", partition=partition, backoff=NO_BACKOFF, **settings)
        request = queue_pb2.CreateQueueRequest(queue=queue, broker_shards=shards)
        await rig.queues.CreateQueue(request)
    for rig in reversed(rigs):
        await rig.queues.LiftQuarantine(
            queue_pb2.LiftQuarantineRequest(queue_id="q", all_created=True)
        )


async def begin_move(source: Rig, target: Rig, queue_id: str = "q") -> move_pb2.QueueMove:
    request = move_pb2.MoveQueueRequest(queue_id=queue_id, to_broker_shard=shard_of(target))
    return (await move_pb2_grpc.MoveServiceStub(source.channel).MoveQueue(request)).move


async def listed_moves(source: Rig) -> Sequence[move_pb2.QueueMove]:
    stub = move_pb2_grpc.MoveServiceStub(source.channel)
    return (await stub.ListMoves(move_pb2.ListMovesRequest())).moves


async def move(source: Rig, target: Rig, queue_id: str = "q") -> None:
    """Moves a queue; returns when it has arrived, and its former shard has none of it."""
    await begin_move(source, target, queue_id)
    await gone(source, queue_id)


async def remove(rig: Rig) -> None:
    """Removes a shard that has nothing."""
    shards = shard_pb2_grpc.ShardServiceStub(rig.channel)
    await shards.DrainShard(shard_pb2.DrainShardRequest())
    database = f"broker/{shard_of(rig)}"
    await shards.RemoveShard(shard_pb2.RemoveShardRequest(database=database))
    await rig.ended


async def gone(source: Rig, queue_id: str = "q") -> None:
    async with asyncio.timeout(60):
        while queue_id in source.owner.shard.moves.departures:
            await asyncio.sleep(0.01)


async def routing_state(rig: Rig) -> assignment_pb2.GetRoutingStateResponse:
    return await rig.assignments.GetRoutingState(assignment_pb2.GetRoutingStateRequest())


async def route(rig: Rig, last: int, log: int = 0, **matches: Sequence[int]) -> bool:
    """Routes a log up to a message; `matches` has the messages of each queue."""
    state = await routing_state(rig)
    cursors = {one.ingest_shard: one.sequence for one in state.cursors}
    piece = assignment_pb2.LogRange(
        ingest_shard=log,
        previous_sequence=cursors.get(log, 0),
        last_sequence=last,
        assignments=[
            assignment_pb2.QueueAssignment(queue_id=queue_id, message_ids=ids)
            for queue_id, ids in matches.items()
        ],
        config_revision=state.config_revision,
    )
    answer = await rig.assignments.Assign(assignment_pb2.AssignRequest(ranges=[piece]))
    return answer.results[0].applied


async def backfill(rig: Rig, last: int, ids: Sequence[int], log: int = 0) -> None:
    """Brings the next part of a replay in, up to a message."""
    part = rig.owner.shard.replays.range_of("q", log)
    assert part is not None
    piece = assignment_pb2.LogRange(
        ingest_shard=log,
        previous_sequence=part.cursor,
        last_sequence=last,
        assignments=[assignment_pb2.QueueAssignment(queue_id="q", message_ids=ids)] if ids else [],
    )
    request = assignment_pb2.BackfillRequest(
        queue_id="q", queue_revision=rig.owner.shard.revision, range=piece
    )
    assert (await rig.assignments.Backfill(request)).applied


async def route_all(rig: Rig, last: int) -> None:
    """Routes log 0 up to a message, every one of which matches q; brings its replay in, too."""
    cursors = {one.ingest_shard: one.sequence for one in (await routing_state(rig)).cursors}
    if cursors.get(0, 0) < last:
        ids = range(cursors.get(0, 0) + 1, last + 1)
        queue = rig.owner.shard.queues.get("q")
        if queue is not None and not queue.settings.quarantine:
            assert await route(rig, last, q=ids)
        else:
            assert await route(rig, last)
    for log, cursor, end in replays(rig):
        assert log == 0
        queue = rig.owner.shard.queues.get("q")
        if queue is not None and not queue.settings.quarantine:
            await backfill(rig, end, range(cursor + 1, end + 1))


def replays(rig: Rig) -> list[tuple[int, int, int]]:
    """What is still to be replayed: by log, from where to where."""
    found = rig.owner.shard.replays.of("q")
    return [(one.ingest_shard, one.cursor, one.end) for one in found if one.cursor < one.end]


async def queue_on(rig: Rig, queue_id: str = "q") -> queue_pb2.Queue:
    request = queue_pb2.GetQueueRequest(queue_id=queue_id)
    return (await rig.queues.GetQueue(request)).queue


async def has_queue(rig: Rig) -> bool | None:
    """Whether the broker has q; None while it moves."""
    try:
        await queue_on(rig)
    except grpc.aio.AioRpcError as error:
        problem = from_rpc_error(error)
        if isinstance(problem, Unavailable) and problem.reason == "QUEUE_MOVING":
            return None
        if not isinstance(problem, NotFound):
            raise
        return False
    return True


async def claimed(rig: Rig) -> dict[int, int]:
    """The attempts of all messages that can be claimed, this one too, by ID; each is there once."""
    messages = await rig.claim(max_messages=1000)
    counts = Counter(one.message.message_id for one in messages)
    assert not counts or max(counts.values()) == 1, counts
    return {one.message.message_id: one.attempts_count for one in messages}


async def swept(rig: Rig, queue_id: str = "q") -> None:
    async with asyncio.timeout(60):
        while not rig.broker.sweeper.is_done_with(queue_id):
            await asyncio.sleep(0.01)


def then(owner: object, name: str, action: Callable[[], Awaitable[None]]) -> None:
    """Does something after each call of a method."""
    call = getattr(owner, name)

    async def calls(*args: Any, **options: Any) -> Any:
        result = await call(*args, **options)
        await action()
        return result

    setattr(owner, name, calls)


def down_ingest(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Has an ingest be down for queues that leave their brokers, until the event is set."""
    raise_all, up = PurgeEpochs.raise_all, asyncio.Event()

    async def fail(epochs: PurgeEpochs, raised: Collection[set[int]]) -> Set[int]:
        if not up.is_set():
            raise Unavailable("an ingest is down")
        return await raise_all(epochs, raised)

    monkeypatch.setattr(PurgeEpochs, "raise_all", fail)
    return up


class Steps:
    """Counts the steps of a broker's part in a move, and has it stand still at one of them."""

    def __init__(self, held_step: int, disk: Disk | None = None) -> None:
        """With a disk, it stands still instead, so that nothing gets durable from then on."""
        self.step = 0
        self.reached = asyncio.Event()
        self.thawed = asyncio.Event()
        self._held_step = held_step
        self._disk = disk

    async def _pass(self) -> None:
        self.step += 1
        if self.step != self._held_step:
            return
        self.reached.set()
        if self._disk is not None:
            self._disk.free.clear()
        else:
            await self.thawed.wait()

    def between(self, owner: object, *names: str) -> None:
        """Counts a step before and after each call of these methods."""
        for name in names:
            setattr(owner, name, self._stepped(getattr(owner, name)))

    def _stepped(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def stepped(*args: Any, **options: Any) -> Any:
            await self._pass()
            result = await call(*args, **options)
            await self._pass()
            return result

        return stepped

    def of_source(self, departures: Departures) -> None:
        self.between(departures._targets, "check", "send", "arrive")
        self.between(departures._names, "get", "place")
        self.between(departures._arrived._epochs, "raise_all")
        self.between(departures._owner, "run_alone")

    def of_target(self, arrivals: Arrivals) -> None:
        self.between(arrivals, "check", "receive", "arrive")
        self.between(arrivals._names, "get")


async def settled_move(source: Rig, target: Rig) -> None:
    """Has q on the target, however often it must be asked for; and what it left is swept."""
    async with asyncio.timeout(60):
        while await has_queue(target) is not True or await has_queue(source) is not False:
            if await has_queue(source):
                with suppress(grpc.aio.AioRpcError):
                    await begin_move(source, target)
            await asyncio.sleep(0.02)
    await swept(source)
