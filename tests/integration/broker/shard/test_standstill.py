"""A broker that stood still, as under SIGSTOP or on a starved machine; that starts, or drains."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
import pytest

from libs.storage.database.slate import Database
from services.broker import service
from services.broker.core import lease_table
from services.broker.core.lease_table import LeaseGrace
from services.broker.core.queue import Queue
from services.broker.core.shard import Shard
from services.broker.shard import owner
from services.broker.shard.loading import load_shard
from slatemq.v1 import entry_pb2, entry_pb2_grpc
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running
from tests.integration.waiting import eventually
from tests.turns import Turns


@pytest.fixture(autouse=True)
def no_standstill() -> None:
    """Replaces that of all tests: here some brokers stand still."""


async def test_a_lease_that_was_alive_when_the_broker_stood_still_goes_on() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1, lease_ms=5000)
        await rig.assign([1, 2])
        held, ended = await rig.claim(max_messages=2)
        await asyncio.sleep(0.2)  # the loop has looked at the leases

        rig.clock.advance(8000)
        time.sleep(1.3)  # noqa: ASYNC251 - the event loop itself must stand still
        assert await rig.ack(held.lease_token) == [0]
        await rig.owner.durable()

        assert await rig.counts() == {"in_flight": 1, "done": 1}
        await rig.pass_time(5001)  # no one acks in its grace
        assert await rig.ack(ended.lease_token) == [9]
        assert await rig.counts() == {"done": 1, "failed": 1}


async def test_a_lease_that_was_alive_when_the_clock_stepped_goes_on() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1, lease_ms=5000)
        await rig.assign([1, 2])
        held, ended = await rig.claim(max_messages=2)

        rig.clock.step(120_000)
        await rig.owner.end_leases_once()

        assert await rig.counts() == {"in_flight": 2}
        assert await rig.ack(held.lease_token) == [0]
        await rig.pass_time(5001)  # no one acks in its grace
        assert await rig.ack(ended.lease_token) == [9]
        assert await rig.counts() == {"done": 1, "failed": 1}


async def leased(rig: Rig, count: int) -> list[str]:
    """Messages in flight, each in a bucket of its own."""
    await rig.create(max_attempts=1, lease_ms=5000)
    await rig.assign(range(1, count + 1))
    return [(await rig.claim())[0].lease_token for _ in range(count)]


async def test_others_have_turns_while_leases_get_their_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_table, "STEP_LEASES", 1)
    async with running() as rig:
        tokens = await leased(rig, 8)
        seen = list[int]()

        def step(grace: LeaseGrace) -> list[Queue]:
            seen.append(turns.count)
            return take(grace)

        take = LeaseGrace.step
        monkeypatch.setattr(LeaseGrace, "step", step)
        rig.clock.step(120_000)
        with Turns() as turns:
            await rig.owner.end_leases_once()

        assert len(set(seen)) == len(seen) > len(tokens)
        assert await rig.ack(*tokens) == [0] * len(tokens)


async def test_a_standstill_while_leases_get_their_grace_gives_all_of_them_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_table, "STEP_LEASES", 1)
    async with running() as rig:
        tokens = await leased(rig, 4)
        steps = 0

        def step(grace: LeaseGrace) -> list[Queue]:
            nonlocal steps
            steps += 1
            if steps == 3:
                asyncio.get_running_loop().call_soon(stand_still)
            return take(grace)

        def stand_still() -> None:
            rig.clock.advance(8000)
            time.sleep(1.3)

        take = LeaseGrace.step
        monkeypatch.setattr(LeaseGrace, "step", step)
        rig.clock.step(120_000)
        await rig.owner.end_leases_once()

        assert steps > len(tokens) + 3
        assert await rig.ack(*tokens) == [0] * len(tokens)


async def test_a_standstill_while_another_lease_ends_takes_no_time_of_leases() -> None:
    disk = Disk()
    async with running(disk=disk) as rig:
        await rig.create(max_attempts=2)
        await rig.assign([1, 2])
        await rig.claim(lease_ms=1000)
        (held,) = await rig.claim(lease_ms=20_000)
        disk.free.clear()
        rig.clock.advance(1200)
        await eventually(lambda: rig.owner.queue("q").leases.count == 1)

        rig.clock.advance(30_000)
        time.sleep(1.3)  # noqa: ASYNC251 - the event loop itself must stand still
        disk.free.set()
        await rig.owner.durable()
        await rig.owner.end_leases_once()

        assert await rig.ack(held.lease_token) == [0]


async def test_the_time_that_a_start_takes_is_none_of_the_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk()
    root = memory_root(disk)
    async with running(root, disk=disk) as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1, 2, 3])
        (over,) = await rig.claim(lease_ms=1000)
        held = [(await rig.claim(lease_ms=ms))[0] for ms in (5000, 600_000)]
        rig.clock.advance(1500)
        await rig.create("other")  # the last commit
    clock = rig.clock
    clock.advance(500)

    async def slow(database: Database, last_ms: int) -> Shard:
        shard = await load_shard(database, last_ms)
        clock.advance(6000)
        return shard

    monkeypatch.setattr(service, "load_shard", slow)
    async with running(root, clock, disk=disk) as rig:
        await rig.pass_time(4000)
        assert await rig.ack(over.lease_token, *(one.lease_token for one in held)) == [9, 0, 0]
        assert await rig.counts() == {"done": 2, "failed": 1}


async def test_no_lease_ends_while_a_broker_starts_or_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk()
    root = memory_root(disk)
    async with running(root, disk=disk) as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1, 2], visible_at_ms=[0, rig.clock.now_ms() + 3_600_000])
        (held,) = await rig.claim(lease_ms=5000)
        rig.ingest.edit_gate.clear()
        slow = asyncio.create_task(edit(rig, "q/2/"))
        await eventually(lambda: bool(rig.ingest.edits))
        rig.signals.first.set()
        await eventually(lambda: rig.owner.lost_time.held_ms is not None)
        for _ in range(4):  # The store goes on, so that other commits may be the last.
            rig.clock.advance(3000)
            await rig.owner.end_leases_once()
            assert rig.owner.queue("q").leases.count == 1
            rig.owner.write_rows([(b"\x01\x7f", None)])
            await rig.owner.durable()
        refused = await refusal(rig.ack(held.lease_token))
        assert refused[:2] == (grpc.StatusCode.UNAVAILABLE, "NOT_SERVING")
        rig.ingest.edit_gate.set()
        await asyncio.wait([slow])
    rig.clock.advance(30_000)
    async with running(root, rig.clock, disk=disk) as rig:
        await rig.pass_time(4000)
        assert await rig.ack(held.lease_token) == [0]


async def test_each_commit_keeps_the_leases_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    root = memory_root(disk)
    async with running(root, disk=disk) as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1, 2])
        (over,) = await rig.claim(lease_ms=1000)
        (held,) = await rig.claim(lease_ms=5000)
        with monkeypatch.context() as slow:
            slow.setattr(owner, "OVERDUE_MS", 0)  # No one looks at leases, for the store is slow.
            rig.clock.advance(1500)
            rig.broker.drain()
            for _ in range(2):
                rig.clock.advance(6000)
                rig.owner.write_rows([(b"\x01\x7f", None)])
                await rig.owner.durable()
    async with running(root, rig.clock, disk=disk) as rig:
        await rig.pass_time(4000)
        assert await rig.ack(over.lease_token, held.lease_token) == [9, 0]


async def test_a_standstill_right_before_a_drain_ends_no_lease() -> None:
    disk = Disk()
    root = memory_root(disk)
    async with running(root, disk=disk) as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1])
        (held,) = await rig.claim(lease_ms=5000)
        rig.clock.step(120_000)
        rig.broker.drain()
        rig.owner.write_rows([(b"\x01\x7f", None)])
        await rig.owner.durable()
    async with running(root, rig.clock, disk=disk) as rig:
        await rig.pass_time(4000)
        assert await rig.ack(held.lease_token) == [0]


async def edit(rig: Rig, handle: str) -> None:
    stub = entry_pb2_grpc.DelayedServiceStub(rig.channel)
    await stub.EditMessage(entry_pb2.EditMessageRequest(handle=handle, payload=b"x"))
