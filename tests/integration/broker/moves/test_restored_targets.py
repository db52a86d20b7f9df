"""A queue whose target was set back to an older copy of its database is not lost with it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import QueueNames
from tests.integration.broker.moves.movers import (
    begin_move,
    claimed,
    gone,
    has_queue,
    listed_moves,
    move,
    route,
    route_all,
    swept,
)
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import Rig, introduce, running


class Held:
    """Keeps the calls of a source from its target, until the target is another one."""

    def __init__(self, source: Rig, name: str) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        targets = source.broker.departures._targets
        self._call: Callable[..., Awaitable[Any]] = getattr(targets, name)
        setattr(targets, name, self)

    async def __call__(self, *args: Any, **options: Any) -> Any:
        self.reached.set()
        await self.go.wait()
        return await self._call(*args, **options)


class WithoutLast:
    """Keeps the last page of a queue from a target."""

    def __init__(self, target: Rig) -> None:
        self.reached = asyncio.Event()
        arrivals = target.broker.arrivals
        self._receive = arrivals.receive
        arrivals.receive = self  # type: ignore[method-assign]

    async def __call__(self, *args: Any, is_last: bool, **options: Any) -> None:
        if is_last:
            self.reached.set()
            await asyncio.Event().wait()
        await self._receive(*args, is_last=is_last, **options)


def copy_of(folder: Path) -> Path:
    copy = folder / "copy"
    shutil.copytree(folder / "broker/1", copy)
    return copy


def put_back(folder: Path, copy: Path) -> None:
    shutil.rmtree(folder / "broker/1")
    shutil.move(copy, folder / "broker/1")


async def shards_of_q(folder: Path) -> tuple[int, ...]:
    return (await QueueNames(open_root(folder.as_uri()).objects).get("q")).broker_shards


@pytest.mark.parametrize("is_begun", [False, True], ids=["before the move", "while it copied"])
async def test_a_queue_whose_target_has_lost_it_stays(tmp_path: Path, is_begun: bool) -> None:
    async with running(tmp_path, shard=0) as source:
        await source.create("q")
        await route_all(source, 10)
        async with running(tmp_path, shard=1) as target:
            await introduce(source, target)
            await route(target, 10)
            # Given a copy of the target's database, from before it had all of the queue
            if is_begun:
                last = WithoutLast(target)
                await begin_move(source, target)
                await last.reached.wait()
        copy = copy_of(tmp_path)
        held = Held(source, "arrive")
        async with running(tmp_path, shard=1) as target:
            await introduce(source, target)
            if not is_begun:
                await begin_move(source, target)
            await held.reached.wait()
        assert await shards_of_q(tmp_path) == (1,)

        # When it is put back before the source knows that the queue has arrived
        put_back(tmp_path, copy)
        async with running(tmp_path, shard=1) as target:
            await introduce(source, target)
            held.go.set()

            # Then the queue is served by the source, with all that it had, and can move again
            await gone(source)
            assert await has_queue(source)
            assert [one.problem for one in await listed_moves(source)] == [
                "broker 1 has lost what came of it"
            ]
            assert await shards_of_q(tmp_path) == (0,)
            await route_all(source, 20)
            await route(target, 20)
            await moved(source, target)
            assert sorted(await claimed(target)) == list(range(1, 21))


async def moved(source: Rig, target: Rig) -> None:
    """Moves q, once the target has dropped what it got before."""
    async with asyncio.timeout(60):
        while not await has_queue(target):
            with suppress(grpc.aio.AioRpcError):
                await move(source, target)


async def test_a_queue_that_its_target_may_have_deleted_stays_until_that_is_known(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, shard=0) as source, running(tmp_path, shard=1) as target:
        await introduce(source, target)
        await source.create("q")
        await route_all(source, 10)
        await route(target, 10)
        held = Held(source, "arrive")
        await begin_move(source, target)
        await held.reached.wait()
        target.broker.arrivals._heard.clear()
        async with asyncio.timeout(60):
            while not await has_queue(target):
                await asyncio.sleep(0.01)

        # Given a queue that was deleted on the target, whose name is claimed still
        async def fail(queue_id: str) -> None: ...

        names = target.broker.queues._names
        free = names.free
        names.free = fail  # type: ignore[method-assign]
        await delete(target)
        held.go.set()

        # Then its former shard does not bring it back, nor forget it
        async with asyncio.timeout(60):
            while not any("may have deleted" in one.problem for one in await listed_moves(source)):
                await asyncio.sleep(0.01)
        assert await has_queue(source) is None
        assert not await has_queue(target)

        # And forgets it once the name is free
        await free("q")
        await gone(source)
        await swept(source)
        assert not await has_queue(source)
