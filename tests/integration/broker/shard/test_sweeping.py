"""The rows of deleted queues go, whatever is done and stored meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from libs.storage.layout.primitives import KeyRange
from services.broker.shard import sweeper
from slatemq._rpc.rpc_status import from_rpc_error
from tests.integration.broker.queue_calls import delete, rows_of_lists, sweep_task, swept
from tests.integration.broker.rig import Disk, memory_root, running
from tests.manual_clock import ManualClock


async def test_the_rows_of_a_deleted_queue_go_and_those_of_others_stay() -> None:
    async with running() as rig:
        await rig.create("other")
        await rig.assign([100, 101], "other")
        before = await rows_of_lists(rig, with_attempts=True)
        await rig.create(max_attempts=2)
        for i in range(1, 40):
            await rig.assign([i], priorities=[i % 3])
        claimed = await rig.claim(max_messages=30)
        await rig.ack(*(m.lease_token for m in claimed[:10]))
        await rig.nack(*(m.lease_token for m in claimed[10:20]), delay_ms=1000)
        assert await rows_of_lists(rig, with_attempts=True) > before + 20

        await delete(rig)
        await swept(rig)

        assert await rows_of_lists(rig, with_attempts=True) == before
        assert await rig.counts("other") == {"available": 2}


async def test_a_sweep_cut_short_goes_on_after_the_restart() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create(max_attempts=2)
        for i in range(1, 300):
            await rig.assign([i])
        full = await rows_of_lists(rig, with_attempts=True)
        commits: list[int] = []
        rig.owner.commits.on_durable(commits.append)
        await delete(rig)
        while len(commits) < 2:  # the deletion, and the first piece of the sweep
            await asyncio.sleep(0)
        left = await rows_of_lists(rig, with_attempts=True)
        assert 0 < left < full
        sweep_task(rig).cancel()
        await rig.ended
    assert rig.exit is not None
    assert rig.exit.code == 1, "a background task that ends takes the process with it"
    async with running(root, clock, disk=disk) as rig:
        await swept(rig)
        assert await rows_of_lists(rig, with_attempts=True) == 0
        await rig.create()
        assert await rig.claim() == []


async def test_a_queue_re_created_during_the_sweep_keeps_its_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_anew, sweep_span = asyncio.Event(), sweeper.Sweeper._sweep_span

    async def sweep_later(self: sweeper.Sweeper, span: KeyRange) -> int:
        if not self._attempts_left:  # These go first, and a queue is not made again before.
            await made_anew.wait()
        return await sweep_span(self, span)

    monkeypatch.setattr(sweeper.Sweeper, "_sweep_span", sweep_later)
    async with running() as rig:
        await rig.create()
        for i in range(1, 300):
            await rig.assign([i])
        await delete(rig)
        while True:
            try:
                await rig.create()
                break
            except grpc.aio.AioRpcError as error:
                if from_rpc_error(error).reason != "QUEUE_BEING_REMOVED":
                    raise
        assert rig.owner.shard.queues["q"].garbage_epochs, "the lists are still to be swept"
        await rig.assign([400])
        made_anew.set()
        await swept(rig)

        left = await rows_of_lists(rig, with_attempts=True)
        assert left == 4, "three empty records and one bucket"
        assert [m.message.message_id for m in await rig.claim(max_messages=9)] == [400]


async def test_attempts_that_are_being_stored_when_their_queue_is_deleted_are_swept() -> None:
    # Given a nack that waits for the disk, behind as many commits as there may be
    async with running() as rig:
        await rig.create()
        await rig.assign([1, 2, 3])
        tokens = [one.lease_token for one in await rig.claim(max_messages=3)]
        rig.disk.free.clear()
        calls: list[asyncio.Task[Any]] = []
        for step in (rig.ack(tokens[0]), rig.ack(tokens[1]), rig.nack(tokens[2])):
            calls.append(asyncio.create_task(step))
            await asyncio.sleep(0.05)

        # When its queue is deleted, and someone sweeps it at once
        owner, shard = rig.owner, rig.owner.shard
        await owner.run(lambda _: shard.delete_queue(shard.queues["q"]))
        sweeping = sweeper.Sweeper(owner, owner._database)._sweep_epoch("q", 0)
        calls.append(asyncio.create_task(sweeping))
        await asyncio.sleep(0.05)
        rig.disk.free.set()
        await asyncio.gather(*calls)

        assert await rows_of_lists(rig, with_attempts=True) == 0
