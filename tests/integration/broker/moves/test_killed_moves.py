"""A queue that moves loses and doubles nothing, whichever side is killed between two steps.

Nor does a partition, while another one of its queue moves, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import QueueNames
from services.broker.moves import arrivals
from slatemq.v1 import shard_pb2, shard_pb2_grpc
from tests.forms import proof
from tests.integration.broker.moves.movers import (
    Steps,
    begin_move,
    claimed,
    create_partitions,
    gone,
    has_queue,
    listed_moves,
    move,
    queue_on,
    route,
    route_all,
    settled_move,
    swept,
)
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import Disk, Rig, introduce, running

SOURCE_STEPS = 23
TARGET_STEPS = 14
"""More than a move has: the last ones are those of a move that nobody disturbs."""

KINDS = ["whole", "partition", "keyed"]
"""What moves: a queue without partitions; partition 0; partition 1 of a queue that is spread by the
value of a header."""


def variants(steps: int, short: Mapping[int, str]) -> list[Any]:
    """Each step, in each way, with all that may move; in the short form one thing at some steps."""
    briefly = [(step, True, kind) for step, kind in short.items()]
    everything = product(range(1, steps + 1), [False, True], KINDS)
    return [one if one in briefly else proof(*one) for one in everything]


@asynccontextmanager
async def brokers_beside(folder: Path, kind: str) -> AsyncIterator[Sequence[Rig]]:
    """The brokers between which another partition of the queue moves."""
    async with AsyncExitStack() as stack:
        shards = () if kind == "whole" else (2, 3)
        yield [await stack.enter_async_context(running(folder, shard=one)) for one in shards]


@asynccontextmanager
async def with_disk(folder: Path, shard: int) -> AsyncIterator[Rig]:
    """A broker whose disk can be held."""
    root, disk = open_root(folder.as_uri()), Disk()
    root.durability = disk
    async with running(root, disk=disk, shard=shard) as rig:
        yield rig


async def filled(kind: str, source: Rig, target: Rig, beside: Sequence[Rig]) -> None:
    """A queue with messages in all lists, some of them from before and some from after others."""
    await introduce(source, target, *beside)
    if kind == "whole":
        await source.create("q", max_attempts=2)
    elif kind == "partition":
        await create_partitions(source, beside[0], max_attempts=2)
    else:
        await create_partitions(beside[0], source, header="key", max_attempts=2)
    for rig in beside:
        await route_all(rig, 12)
    await route_all(source, 10)
    await route(target, 12)
    one, two, _ = await source.claim(max_messages=3)
    await source.ack(one.lease_token)
    await source.nack(two.lease_token)


async def check_whole(source: Rig, target: Rig) -> None:
    """All of the first 30 messages are in the queue, each once."""
    for rig in (source, target):
        await route_all(rig, 20)
    async with asyncio.timeout(60):
        while (await queue_on(target)).HasField("quarantine"):
            await asyncio.sleep(0.01)
    for rig in (source, target):
        await route_all(rig, 30)
    counts = (await queue_on(target)).counts
    assert (counts.available_count, counts.done_count, counts.in_flight_count) == (29, 1, 0)
    attempts = await claimed(target)
    assert sorted(attempts) == list(range(2, 31))
    assert attempts[2] == 2
    assert attempts[3] == 1


async def check_places(folder: Path, kind: str, beside: Sequence[Rig]) -> None:
    """Both partitions are where they moved to, that which nobody was killed for, too."""
    claim = await QueueNames(open_root(folder.as_uri()).objects).get("q")
    assert claim.broker_shards == {"whole": (1,), "partition": (1, 3), "keyed": (3, 1)}[kind]
    for rig in beside[1:]:
        assert sorted(await claimed(rig)) == list(range(1, 13))


async def killed(steps: Steps, source: Rig, target: Rig, beside: Sequence[Rig]) -> None:
    """Has the queue begin to move; returns once a side stands still, or the move is over."""
    moving = asyncio.create_task(begin_move(source, target))
    reached = asyncio.create_task(steps.reached.wait())
    await asyncio.wait([moving, reached], return_when=asyncio.FIRST_COMPLETED)
    done = asyncio.create_task(settled_move(source, target))
    await asyncio.wait([done, reached], return_when=asyncio.FIRST_COMPLETED)
    for task in (moving, reached, done):
        task.cancel()
    await asyncio.gather(moving, reached, done, return_exceptions=True)
    if beside:
        await move(beside[0], beside[1])


@pytest.mark.parametrize(
    ("step", "on_disk", "kind"),
    variants(SOURCE_STEPS, {3: "whole", 6: "partition", 9: "keyed", 14: "partition", 18: "whole"}),
)
async def test_the_source_may_be_killed_at_any_step(
    tmp_path: Path, step: int, on_disk: bool, kind: str
) -> None:
    async with (
        running(tmp_path, shard=1) as target,
        brokers_beside(tmp_path, kind) as beside,
        with_disk(tmp_path, 0) as old,
    ):
        await filled(kind, old, target, beside)
        steps = Steps(step, old.disk if on_disk else None)
        steps.of_source(old.broker.departures)
        await killed(steps, old, target, beside)
        async with running(tmp_path, shard=0, clock=old.clock) as source:
            steps.thawed.set()
            old.disk.free.set()
            await settled_move(source, target)
            await check_whole(source, target)
        await check_places(tmp_path, kind, beside)


@pytest.mark.parametrize(
    ("step", "on_disk", "kind"),
    variants(TARGET_STEPS, {2: "keyed", 4: "whole", 7: "partition", 10: "keyed"}),
)
async def test_the_target_may_be_killed_at_any_step(
    tmp_path: Path, step: int, on_disk: bool, kind: str
) -> None:
    async with (
        running(tmp_path, shard=0) as source,
        brokers_beside(tmp_path, kind) as beside,
        with_disk(tmp_path, 1) as old,
    ):
        await filled(kind, source, old, beside)
        steps = Steps(step, old.disk if on_disk else None)
        steps.of_target(old.broker.arrivals)
        await killed(steps, source, old, beside)
        async with running(tmp_path, shard=1, clock=old.clock) as target:
            steps.thawed.set()
            old.disk.free.set()
            await settled_move(source, target)
            await check_whole(source, target)
        await check_places(tmp_path, kind, beside)


@pytest.mark.parametrize("is_deleted", [False, True], ids=["moved-on", "deleted"])
async def test_a_source_has_done_with_a_queue_whose_target_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    async with running(tmp_path, shard=0) as old, running(tmp_path, shard=2) as last:
        async with running(tmp_path, shard=1) as target:
            # Given a source that was killed once it had claimed the name for the target
            await introduce(old, target, last)
            await old.create("q")
            for rig in (old, target, last):
                await route_all(rig, 10)
            steps = Steps(1)
            steps.between(old.broker.departures._targets, "arrive")
            await begin_move(old, target)
            async with asyncio.timeout(60):
                await steps.reached.wait()

                # And a target that took the queue in without it, and did not keep it
                monkeypatch.setattr(arrivals, "SILENT_S", 0)
                while await has_queue(target) is not True:
                    await asyncio.sleep(0.01)
                while (await queue_on(target)).HasField("quarantine"):
                    await asyncio.sleep(0.01)
                if is_deleted:
                    await delete(target)
                else:
                    await move(target, last)

                # When that is removed, and the source starts again
                shards = shard_pb2_grpc.ShardServiceStub(target.channel)
                await shards.DrainShard(shard_pb2.DrainShardRequest())
                await shards.RemoveShard(shard_pb2.RemoveShardRequest(database="broker/1"))
                await target.ended
        async with running(tmp_path, shard=0, clock=old.clock) as source:
            steps.thawed.set()

            # Then it has nothing left of the queue, which is where it was moved to, whole
            await gone(source)
            await swept(source)
            assert await listed_moves(source) == []
            assert await has_queue(source) is False
            if is_deleted:
                await source.create("q")
            else:
                assert sorted(await claimed(last)) == list(range(1, 11))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_move_has_as_many_steps_as_are_tried(tmp_path: Path, kind: str) -> None:
    async with (
        running(tmp_path, shard=0) as source,
        running(tmp_path, shard=1) as target,
        brokers_beside(tmp_path, kind) as beside,
    ):
        await filled(kind, source, target, beside)
        of_source, of_target = Steps(0), Steps(0)
        of_source.of_source(source.broker.departures)
        of_target.of_target(target.broker.arrivals)
        await begin_move(source, target)
        await settled_move(source, target)
        await check_whole(source, target)
        assert SOURCE_STEPS - 2 <= of_source.step <= SOURCE_STEPS
        assert TARGET_STEPS - 2 <= of_target.step <= TARGET_STEPS
