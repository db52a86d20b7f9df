"""The copy of a queue that moves: several pages at a time, several queues, and rows that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import slatemq
from libs.storage.errors import DamagedStore, StorageError, StoreUnavailable
from services.broker.moves import copies, departures, rows
from slatemq.v1 import move_pb2
from tests.integration.broker.moves.movers import (
    Steps,
    begin_move,
    claimed,
    down_ingest,
    gone,
    listed_moves,
    move,
    queue_on,
    route_all,
    then,
    two_brokers,
)
from tests.integration.broker.rig import Rig, close_channel, introduce, refusal, running
from tests.integration.waiting import eventually, hang


async def route_in_turns(first: Rig, second: Rig) -> None:
    """Give the first a queue with 40 messages, of several routings; the second has none."""
    await first.create("q")
    for last in (10, 20, 30, 40):
        await route_all(first, last)
    await route_all(second, 40)


async def test_pages_share_the_commits_of_a_target_that_paces_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PAGE_ROWS_MAX", 1)
    async with (
        running(tmp_path, shard=0) as first,
        running(tmp_path, shard=1, settings={"commit_interval_ms": "500"}) as second,
    ):
        await introduce(first)
        await first.create("q")
        for last in range(10, 310, 10):
            await route_all(first, last)
        await route_all(second, 300)
        sent = []
        targets = first.broker.departures._targets

        async def count() -> None:
            sent.append(1)

        then(targets, "send", count)
        before = second.owner.commits._number

        await move(first, second)

        assert len(sent) > 30
        assert second.owner.commits._number - before < 15
        assert sorted(await claimed(second)) == list(range(1, 301))


async def test_pages_in_flight_are_bounded_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PAGE_ROWS_MAX", 1)
    monkeypatch.setattr(copies, "SENT_BYTES_MAX", 1)
    async with two_brokers(tmp_path) as (first, second):
        await route_in_turns(first, second)
        targets = first.broker.departures._targets
        send, now, most = targets.send, 0, 0

        async def count(*args: Any, **options: Any) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await send(*args, **options)
            now -= 1

        monkeypatch.setattr(targets, "send", count)
        await move(first, second)

        assert most == 1
        assert sorted(await claimed(second)) == list(range(1, 41))


@pytest.mark.parametrize(
    ("call", "step"), [("receive", 1), ("receive", 3), ("arrive", 1)], ids=["header", "page", "end"]
)
async def test_nothing_is_lost_where_the_channel_to_the_target_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, step: int
) -> None:
    monkeypatch.setattr(rows, "PAGE_ROWS_MAX", 1)
    async with two_brokers(tmp_path) as (first, second):
        await route_in_turns(first, second)
        steps = Steps(step)
        steps.between(second.broker.arrivals, call)
        await begin_move(first, second)
        await steps.reached.wait()

        await close_channel(first.service.channels, "broker", 1)
        leaving = first.owner.shard.moves.departures
        await eventually(lambda: "q" not in leaving or first.ended.done())

        assert not first.ended.done()
        assert sorted(await claimed(second)) == list(range(1, 41))


async def test_a_queue_is_served_until_it_can_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MOVES_AT_ONCE", 1)
    async with (
        two_brokers(tmp_path) as (first, second),
        slatemq.connect(first.running.address) as client,
    ):
        for name in ("a", "b"):
            await first.create(name)
        steps = Steps(1)
        steps.between(first.broker.departures._targets, "send")
        await begin_move(first, second, "a")
        await steps.reached.wait()

        assert (await refusal(begin_move(first, second, "b")))[1] == "MOVES_RUNNING"
        assert (await queue_on(first, "b")).queue_id == "b"
        moving = asyncio.create_task(client.move_queue("b", 1))
        steps.thawed.set()
        assert await moving == 1


async def test_after_a_restart_queues_wait_for_their_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, shard=1) as target:
        async with running(tmp_path, shard=0) as source:
            hold_copies(monkeypatch, source)
            for name in ("a", "b", "c"):
                await source.create(name)
                await begin_move(source, target, name)
        monkeypatch.setattr(copies, "MOVES_AT_ONCE", 1)
        async with running(tmp_path, shard=0, clock=source.clock) as source:
            for name in ("a", "b", "c"):
                await gone(source, name)
                assert name in target.owner.shard.queues


async def test_queues_that_have_arrived_keep_no_other_from_moving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down_ingest(monkeypatch)
    async with two_brokers(tmp_path) as (first, second):
        for number in range(copies.MOVES_AT_ONCE + 2):
            name = f"q{number}"
            await first.create(name)
            await begin_move(first, second, name)
            async with asyncio.timeout(60):
                while name not in second.owner.shard.queues:
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("error", "give_up_s"),
    [(DamagedStore("a table is damaged"), 1e9), (StoreUnavailable("a table is refused"), 0.3)],
)
async def test_a_move_whose_rows_cannot_be_read_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StorageError, give_up_s: float
) -> None:
    monkeypatch.setattr(copies, "GIVE_UP_S", give_up_s)
    async with two_brokers(tmp_path) as (first, second):
        await filled(first, second)
        with monkeypatch.context() as damaged:
            fail_scans(damaged, first, error)
            await begin_move(first, second)
            await gone(first)

        [found] = await listed_moves(first)
        assert found.state == move_pb2.QueueMove.STATE_CANCELLED
        assert found.problem == str(error)
        assert sorted(await claimed(first)) == list(range(1, 11))


async def test_a_move_goes_on_once_its_rows_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await filled(first, second)
        with monkeypatch.context() as refused:
            failed = fail_scans(refused, first, StoreUnavailable("a table is refused"))
            await begin_move(first, second)
            await failed.wait()
        await gone(first)
        assert sorted(await claimed(second)) == list(range(1, 11))


def hold_copies(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    patch.setattr(rig.broker.departures._targets, "send", hang)


async def filled(first: Rig, second: Rig) -> None:
    await first.create("q")
    await route_all(first, 10)
    await route_all(second, 10)


def fail_scans(patch: pytest.MonkeyPatch, rig: Rig, error: StorageError) -> asyncio.Event:
    """Has the database refuse to read rows; the event is set once it did."""
    failed = asyncio.Event()

    async def scan(*_: object, **__: object) -> AsyncIterator[None]:
        failed.set()
        for raised in (error,):
            raise raised
        yield

    patch.setattr(rig.broker.departures._database, "scan", scan)
    return failed


async def test_the_newest_of_the_cancelled_moves_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "CANCELLED_KEPT", 2)
    async with two_brokers(tmp_path) as (first, second):
        targets = first.broker.departures._targets
        then(targets, "check", second.broker.placement.drain.begin)
        for name in ("c", "a", "b"):
            await second.broker.placement.drain.cancel()
            await first.create(name)
            await begin_move(first, second, name)
            await gone(first, name)
        found = await listed_moves(first)
        assert [one.queue_id for one in found] == ["a", "b"]
        assert {one.state for one in found} == {move_pb2.QueueMove.STATE_CANCELLED}
