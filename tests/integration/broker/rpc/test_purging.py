"""Purges over the wire, and what a broker removes behind everybody's back."""

from __future__ import annotations

import asyncio

import pytest

from libs.storage.database.slate import Batch, Database
from services.broker.core.commands import Purge
from services.broker.core.waiting.available import Available
from services.broker.shard import owner, sweeper
from slatemq.v1 import queue_pb2
from tests.integration.broker.queue_calls import has_garbage, rows_of_lists, sweep_task, swept
from tests.integration.broker.rig import Disk, Rig, memory_root, running
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock

AVAILABLE = queue_pb2.ENTRY_STATE_AVAILABLE
IN_FLIGHT = queue_pb2.ENTRY_STATE_IN_FLIGHT
DONE = queue_pb2.ENTRY_STATE_DONE
FAILED = queue_pb2.ENTRY_STATE_FAILED


async def purge(rig: Rig, *states: queue_pb2.EntryState.ValueType) -> int:
    request = queue_pb2.PurgeQueueRequest(queue_id="q", states=states)
    return (await rig.queues.PurgeQueue(request)).purged_count


async def busy(rig: Rig) -> None:
    """A queue with 200 available messages in 100 rows, and some of every other state."""
    await rig.create(max_attempts=1)
    for number in range(100):
        await rig.assign([2 * number + 1, 2 * number + 2], priorities=[9, 9])
    await rig.assign([1001, 1002], visible_at_ms=[rig.clock.now_ms() + 5000] * 2)
    await rig.assign([2001, 2002, 2003], priorities=[0] * 3)
    acked, nacked, _ = await rig.claim(max_messages=3)
    await rig.ack(acked.lease_token)
    await rig.nack(nacked.lease_token)


async def test_purged_rows_go_and_the_others_stay() -> None:
    async with running() as rig:
        await busy(rig)
        full = await rows_of_lists(rig)

        assert await purge(rig) == 202
        assert await rig.counts() == {"in_flight": 1, "done": 1, "failed": 1}
        await rig.assign([5001])
        await swept(rig)

        # 100 ready ones and a timed one are gone, one has come; the record of the creation stays.
        assert await rows_of_lists(rig) == full - 100
        assert [m.message.message_id for m in await rig.claim(max_messages=9)] == [5001]


async def test_each_state_is_purged_by_itself_and_all_at_once() -> None:
    async with running() as rig:
        await busy(rig)
        (held,) = await rig.claim(max_messages=1)

        assert await purge(rig, DONE) == 1
        assert await purge(rig, FAILED) == 1
        assert await purge(rig, IN_FLIGHT) == 2
        assert await rig.counts() == {"available": 199, "delayed": 2}
        assert await rig.ack(held.lease_token) == [9], "FAILED_PRECONDITION: it has ended"
        assert await purge(rig, AVAILABLE, IN_FLIGHT, DONE, FAILED) == 201
        assert await rig.counts() == {}
        await swept(rig)

        assert await rows_of_lists(rig) == 3, "the empty records of its creation"


async def test_a_sweep_of_purged_rows_cut_short_goes_on_after_the_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeper, "SWEEP_ROWS", 7)
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await busy(rig)
        full = await rows_of_lists(rig)
        commits: list[int] = []
        rig.owner.commits.on_durable(commits.append)
        await purge(rig, AVAILABLE, DONE, FAILED)
        while len(commits) < 4:  # the purge, and some pieces of the sweep
            await asyncio.sleep(0)
        assert 0 < await rows_of_lists(rig) < full
        sweep_task(rig).cancel()
    async with running(root, clock, disk=disk) as rig:
        await swept(rig)
        assert await rows_of_lists(rig) == 4, "three empty records, and what is in flight"
        assert await rig.counts() == {"in_flight": 1}
        await rig.assign([5001])
        assert [m.message.message_id for m in await rig.claim(max_messages=9)] == [5001]


async def test_a_queue_deleted_while_its_purge_is_swept_is_swept_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeper, "SWEEP_ROWS", 7)
    async with running() as rig:
        await busy(rig)
        await purge(rig)
        await rig.assign([5001])
        await rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="q"))
        await swept(rig)

        assert await rows_of_lists(rig) == 0
        await rig.create()
        await rig.assign([6001])
        assert [m.message.message_id for m in await rig.claim(max_messages=9)] == [6001]


async def test_a_message_that_ends_before_its_delay_leaves_without_consumers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, "LOOK_EVERY_S", 0.01)
    async with running() as rig:
        await rig.create()
        now_ms = rig.clock.now_ms()
        await rig.assign(
            [1, 2],
            visible_at_ms=[now_ms + 60_000, now_ms + 60_000],
            retention_deadlines_ms=[now_ms + 100, 0],
        )
        assert await rig.counts() == {"delayed": 2}

        rig.clock.advance(100)
        await eventually(lambda: rig.owner.shard.queues["q"].waiting.timed_count == 1)

        rig.clock.advance(60_000)
        assert [m.message.message_id for m in await rig.claim(max_messages=9)] == [2]


@pytest.mark.parametrize("kind", [Purge.DONE, Purge.AVAILABLE])
async def test_rows_that_are_being_written_when_their_queue_is_purged_are_swept(
    monkeypatch: pytest.MonkeyPatch, kind: Purge
) -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1, 2])
        token = (await rig.claim(max_messages=2))[0].lease_token
        # Given a commit on its way into the database: an ack, or a message that comes back
        write, gate, came = Database.write, asyncio.Event(), asyncio.Event()

        async def slow(self: Database, batch: Batch, alone: bool = False) -> bool:
            came.set()
            await gate.wait()
            return await write(self, batch, alone)

        monkeypatch.setattr(Database, "write", slow)
        finish = rig.ack(token) if kind is Purge.DONE else rig.nack(token)
        finishing = asyncio.create_task(finish)
        await came.wait()

        # When its queue is purged, and someone sweeps it at once
        shard = rig.owner.shard
        queue = shard.queues["q"]
        await rig.owner.run(lambda _: shard.purge(queue, {kind}))
        assert has_garbage(queue)
        sweeping = asyncio.create_task(sweeper.Sweeper(rig.owner, rig.owner._database)._sweep("q"))
        await asyncio.sleep(0.05)
        gate.set()
        await asyncio.gather(finishing, sweeping)

        assert not has_garbage(queue)
        assert await rows_of_lists(rig) == 4, "the empty records, and what is in flight"


async def test_only_queues_with_garbage_are_looked_at_by_the_sweeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[str] = []
    sweep = sweeper.Sweeper._sweep

    async def noting(self: sweeper.Sweeper, queue_id: str) -> None:
        looked_at.append(queue_id)
        await sweep(self, queue_id)

    async with running() as rig:
        for number in range(5):
            await rig.create(f"other{number}")
        await rig.create()
        await rig.assign([1])
        monkeypatch.setattr(sweeper.Sweeper, "_sweep", noting)
        await purge(rig)
        await swept(rig)
        assert looked_at == ["q"]


async def test_what_is_not_due_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "LOOK_EVERY_S", 1000)
    looked_at: list[str] = []
    has_due = Available.has_due

    def noting(self: Available, now_ms: int) -> bool:
        looked_at.append(self.queue_id)
        return has_due(self, now_ms)

    async with running() as rig:
        now_ms = rig.clock.now_ms()
        for name, ms in (("ready", 0), ("soon", 1000), ("later", 9000), ("empty", 1000)):
            await rig.create(name)
            await rig.assign([1], name, visible_at_ms=[now_ms + ms])
        await rig.assign([2], "later", visible_at_ms=[now_ms + 5000])
        rig.clock.advance(500)
        await rig.queues.PurgeQueue(queue_pb2.PurgeQueueRequest(queue_id="empty"))
        monkeypatch.setattr(Available, "has_due", noting)
        items: list[set[str]] = []
        for by_ms in (0, 499, 1, 4000, 4000):
            rig.clock.advance(by_ms)
            looked_at.clear()
            await rig.owner.look_at_due()
            items.append(set(looked_at))
        # What is due and still there may be looked at again.
        assert items[:2] == [set(), set()]
        assert "soon" in items[2]
        assert "later" not in items[2]
        assert "later" in items[3]
        assert "later" in items[4]
        assert not any("ready" in one for one in items)
        # A queue that is gone is not kept, though its messages were due much later.
        await rig.create("gone")
        await rig.assign([1], "gone", visible_at_ms=[now_ms + 10**9])
        await rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="gone"))
        rig.owner._due._clean_up()
        assert {queue.queue_id for queue in rig.owner._due._at_ms} == {"soon", "later"}
