"""A queue moves to another broker shard with all that it has."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

import slatemq
from libs.storage.database.roots import open_root
from libs.storage.layout.keys import RecordType
from libs.storage.objects.queue_names import QueueNames
from services.broker.core.moves import LISTED_MS
from services.broker.core.queue import Queue
from services.broker.core.shard import BEING_MOVED
from services.broker.entries.finder import EntryFinder, SearchStep
from services.broker.moves import copies, departures, rows
from slatemq.errors import FailedPrecondition, NotFound, Unavailable
from slatemq.v1 import consumer_pb2, entry_pb2, move_pb2, queue_pb2
from tests.integration.broker.entry_calls import entries
from tests.integration.broker.moves.movers import (
    Steps,
    backfill,
    begin_move,
    claimed,
    gone,
    has_queue,
    listed_moves,
    move,
    queue_on,
    replays,
    route,
    route_all,
    swept,
    then,
    two_brokers,
)
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import Rig, introduce, refusal, running


async def test_a_queue_arrives_with_its_settings_lists_and_attempts(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q", max_attempts=2, filter="true")
        now_ms = first.clock.now_ms()
        await first.assign([1, 2, 3, 4, 5])
        await first.assign([6, 7], visible_at_ms=[now_ms + 60_000, now_ms + 90_000])
        await route(second, 2)
        done, failed, nacked, held = await first.claim(max_messages=4)
        await first.ack(done.lease_token)
        await first.nack(failed.lease_token, nacked.lease_token, reason="no")
        again = {one.message.message_id: one for one in await first.claim(max_messages=5)}
        await first.nack(again[2].lease_token, reason="still no")
        before = await queue_on(first)

        await move(first, second)

        found = await queue_on(second)
        assert (found.broker_shard, found.filter, found.max_attempts) == (1, "true", 2)
        assert found.created_at_ms == before.created_at_ms
        assert found.etag == before.etag
        assert not found.HasField("quarantine")
        # The leases have ended, and their messages wait again, no attempt counted
        assert await second.counts() == {"available": 3, "delayed": 2, "done": 1, "failed": 1}
        assert await claimed(second) == {3: 2, 4: 1, 5: 1}
        assert await first.ack(held.lease_token, done.lease_token) == [9, 0]
        names = QueueNames(open_root(tmp_path.as_uri()).objects)
        assert (await names.get("q")).broker_shards == (1,)
        # And the former shard has nothing left
        assert await refusal(queue_on(first)) == (
            grpc.StatusCode.NOT_FOUND,
            "WRONG_SHARD",
            "queue 'q' is not on broker 0: ask broker 1",
        )
        await swept(first)
        assert await rows_of("q", first) == {RecordType.QUEUE_STATE}


async def rows_of(queue_id: str, rig: Rig) -> set[int]:
    """The kinds of rows that a broker has of a queue."""
    await rig.owner.durable()
    return {
        key[1]
        async for rows in rig.owner._database.scan(b"\x00", b"\xff")
        for key, _ in rows
        if key[2:].startswith(queue_id.encode() + b"\x00")
    }


async def test_what_the_target_has_judged_before_is_replayed(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        await route(first, 10, q=[3, 4])
        await route(second, 20)
        await route(second, 5, log=1)

        await move(first, second)

        assert replays(second) == [(0, 10, 20), (1, 0, 5)]
        assert await route(second, 30, q=[21, 30])
        await backfill(second, 20, [15])
        await backfill(second, 5, [1 << 48 | 2], log=1)
        assert replays(second) == []
        assert sorted(await claimed(second)) == [3, 4, 15, 21, 30, 1 << 48 | 2]


async def test_what_came_along_is_not_judged_again_by_a_target_that_lags(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        await route(first, 10)
        await route(second, 10)

        # Given a target that falls behind after it was asked
        async def fall_behind() -> None:
            await route(first, 30, q=[11, 25])
            await route(first, 5, log=1, q=[1 << 48 | 5])

        then(first.broker.departures._targets, "check", fall_behind)

        await move(first, second)

        assert (await queue_on(second)).quarantine.reason == BEING_MOVED
        lift = queue_pb2.LiftQuarantineRequest(queue_id="q")
        assert (await refusal(second.queues.LiftQuarantine(lift)))[1] == "QUEUE_MOVING"
        assert await route(second, 25)
        assert await route(second, 40)
        assert (await queue_on(second)).HasField("quarantine")
        assert await route(second, 5, log=1)
        async with asyncio.timeout(60):
            while (await queue_on(second)).HasField("quarantine"):
                await asyncio.sleep(0.01)
        assert replays(second) == [(0, 30, 40)]
        await backfill(second, 40, [33])
        assert await route(second, 50, q=[44])
        assert sorted(await claimed(second)) == [11, 25, 33, 44, 1 << 48 | 5]


async def test_a_log_that_only_the_source_knows_of_is_routed_from_its_beginning(
    tmp_path: Path,
) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        steps = Steps(3)
        steps.between(first.broker.departures._targets, "send")
        await begin_move(first, second)
        await steps.reached.wait()
        # When a log appears while the queue is on its way
        assert await route(first, 10)
        steps.thawed.set()
        await gone(first)

        assert not (await queue_on(second)).HasField("quarantine")
        assert await route(second, 10, q=[1, 10])
        assert replays(second) == []
        assert sorted(await claimed(second)) == [1, 10]
        # And back, where it was known before
        await swept(first)
        await move(second, first)
        assert replays(first) == []
        assert await route(first, 20, q=[11])
        assert sorted(await claimed(first)) == [1, 10, 11]


async def test_a_restart_goes_on_waiting_until_routing_has_caught_up(tmp_path: Path) -> None:
    async with running(tmp_path, shard=0) as first:
        async with running(tmp_path, shard=1) as second:
            await introduce(first)
            await first.create("q")

            async def fall_behind() -> None:
                await route(first, 30, q=[11, 25])

            then(first.broker.departures._targets, "check", fall_behind)
            await move(first, second)
        async with running(tmp_path, shard=1, clock=second.clock) as second:
            assert (await queue_on(second)).HasField("quarantine")
            assert await route(second, 40)
            async with asyncio.timeout(60):
                while (await queue_on(second)).HasField("quarantine"):
                    await asyncio.sleep(0.01)
            assert replays(second) == [(0, 30, 40)]


async def test_a_queue_in_quarantine_stays_in_it_and_loses_nothing(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        await route(first, 10, q=[3])
        queue = first.owner.shard.queues["q"]
        first.owner.shard.quarantine(queue, "too slow", 1)
        await route(first, 20)
        await route(second, 30)

        await move(first, second)

        assert (await queue_on(second)).quarantine.reason == "too slow"
        await second.queues.LiftQuarantine(queue_pb2.LiftQuarantineRequest(queue_id="q"))
        assert replays(second) == [(0, 10, 30)]


async def test_a_queue_that_moves_ten_times_keeps_all_its_messages(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        source, target = first, second
        for number in range(10):
            for rig in (source, target):
                await route_all(rig, 10 * number + 5)
            [one] = await source.claim(max_messages=1)
            await source.ack(one.lease_token)
            await swept(target)
            await move(source, target)
            for rig in (target, source):
                await route_all(rig, 10 * number + 10)
            source, target = target, source
        assert (await queue_on(source)).counts.done_count == 10
        assert sorted(await claimed(source)) == list(range(11, 101))
        # In the order in which they were published
        assert replays(source) == []


async def test_a_list_shows_a_queue_that_moves_once(tmp_path: Path) -> None:
    async with (
        two_brokers(tmp_path) as (first, second),
        slatemq.connect(first.running.address) as client,
    ):
        await first.create("before")
        await first.create("q")
        await second.create("r")

        async def listed() -> list[tuple[str, int, int | None]]:
            return [
                (one.queue_id, one.broker_shard, one.moving_to_broker_shard)
                async for one in client.list_queues()
            ]

        for step in range(1, 14):
            source, target = (first, second) if step % 2 else (second, first)
            shard = int(not step % 2)
            await swept(target)
            steps = Steps(step)
            steps.between(source.broker.departures._targets, "check", "send", "arrive")
            steps.between(source.broker.departures._names, "get", "place")
            moving = asyncio.create_task(move(source, target))
            reached = asyncio.create_task(steps.reached.wait())
            await asyncio.wait([moving, reached], return_when=asyncio.FIRST_COMPLETED)
            ids = [one[0] for one in await listed()]
            assert ids == ["before", "q", "r"], step
            steps.thawed.set()
            await moving
            reached.cancel()
            assert ("q", 1 - shard, None) in await listed()
            restore(source)
        # Also for a caller that asked the target before it had the queue
        page = await first.queues.ListQueues(queue_pb2.ListQueuesRequest())
        assert [(one.queue_id, one.HasField("moving_to_broker_shard")) for one in page.queues][
            :2
        ] == [("before", False), ("q", True)]
        first.clock.advance(20_000)
        page = await first.queues.ListQueues(queue_pb2.ListQueuesRequest())
        assert [one.queue_id for one in page.queues] == ["before"]


def restore(rig: Rig) -> None:
    """Takes the steps out of a broker again."""
    for owner in (rig.broker.departures._targets, rig.broker.departures._names):
        for name in ("check", "send", "arrive", "get", "place"):
            vars(owner).pop(name, None)


async def test_what_cannot_move_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "BEHIND_S", 0.3)
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")

        async def reason(queue_id: str, target: Rig = second) -> str:
            return (await refusal(begin_move(first, target, queue_id)))[1]

        assert await reason("q", first) == "INVALID_FIELD"
        assert await reason("absent") == "QUEUE_NOT_FOUND"
        await second.broker.placement.drain.begin()
        assert await reason("q") == "SHARD_DRAINING"
        await second.broker.placement.drain.cancel()
        await route(first, 5)
        assert await reason("q") == "TARGET_BEHIND"
        assert await has_queue(first)
        assert await first.counts() == {}


async def test_a_queue_with_a_running_redrive_stays(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q", max_attempts=1)
        await first.create("target")
        await first.assign([1])
        await route(second, 1)
        [one] = await first.claim()
        await first.nack(one.lease_token)
        first.broker.redrives._mover.pusher = None  # type: ignore[assignment]
        shard = first.owner.shard
        start = entry_pb2.StartRedriveRequest(queue_id="q", target_queue_id="target", rate=1)
        async with first.broker.redrives._mover.lock(
            "q", first.broker.redrives._mover.lists.failed, in_background=True
        ):
            await entries(first).StartRedrive(start)
            assert shard.redrives.running()
            assert (await refusal(begin_move(first, second)))[1] == "REDRIVE_RUNNING"


async def test_a_move_that_its_target_refuses_is_cancelled(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        await route_all(first, 10)
        await route_all(second, 10)
        [held] = await first.claim(max_messages=1)
        steps = Steps(3)
        steps.between(first.broker.departures._targets, "check", "send")
        await begin_move(first, second)
        await steps.reached.wait()
        assert await has_queue(first) is None

        # When the target takes no new queues since it was asked
        await second.broker.placement.drain.begin()
        steps.thawed.set()
        await gone(first)

        # Then the queue goes on where it was, and nothing is lost
        [found] = await listed_moves(first)
        assert found.state == move_pb2.QueueMove.STATE_CANCELLED
        assert "takes no new queues" in found.problem
        await route_all(first, 20)
        assert sorted(await claimed(first)) == list(range(1, 21))
        assert held.message.message_id == 1


async def test_a_move_whose_target_is_down_is_cancelled_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "GIVE_UP_S", 0.3)
    async with running(tmp_path, shard=0) as first:
        async with running(tmp_path, shard=1) as second:
            await introduce(first)
            await first.create("q")
            await route_all(first, 10)
            await route_all(second, 10)
            steps = Steps(5)
            steps.between(first.broker.departures._targets, "check", "send")
            await begin_move(first, second)
            await steps.reached.wait()
        steps.thawed.set()
        await gone(first)
        [found] = await listed_moves(first)
        assert found.state == move_pb2.QueueMove.STATE_CANCELLED
        await route_all(first, 20)
        async with running(tmp_path, shard=1, clock=second.clock) as second:
            await route_all(second, 20)
            async with asyncio.timeout(60):
                while await has_queue(second) is not True:
                    # What came at first is dropped by the claim, and swept
                    try:
                        await move(first, second)
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.05)
            await gone(first)  # It hears from the target, which has the queue before that.
            async with asyncio.timeout(60):
                while await listed_moves(first):  # Until that is durable.
                    await asyncio.sleep(0.01)
            assert sorted(await claimed(second)) == list(range(1, 21))


async def test_pages_that_fail_are_repeated_alone_however_long_all_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PAGE_ROWS_MAX", 1)
    monkeypatch.setattr(copies, "RETRY_S", 0.01)
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        for last in (10, 20, 30):
            await route_all(first, last)
        await route(second, 30)

        # Given that each page takes 10 s, two at a time, and that its first answer is lost
        clock, targets = ManualMonotonic(), first.broker.departures._targets
        monkeypatch.setattr(copies, "time", clock)
        send, sent = targets.send, Counter[str]()

        async def lose(*args: Any, **options: Any) -> None:
            clock.passed_s += 10
            await send(*args, **options)
            page = repr((args, options))
            sent[page] += 1
            if sent[page] == 1:
                raise Unavailable("the answer was lost")

        monkeypatch.setattr(targets, "send", lose)
        await move(first, second)

        assert [*sent.values()] == [2] * 4  # the header, and three pages
        assert sorted(await claimed(second)) == list(range(1, 31))


class ManualMonotonic:
    """The module `time` of a process for which more time has passed."""

    passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s


async def test_a_cancelled_move_is_over_before_its_target_knows(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second), running(tmp_path, shard=2) as third:
        await introduce(first, second)
        await first.create("q")
        for rig in (first, second, third):
            await route_all(rig, 10)
        steps = Steps(1)
        steps.between(first.broker.departures._targets, "arrive")
        targets = first.broker.departures._targets
        then(targets, "check", second.broker.placement.drain.begin)
        await begin_move(first, second)
        await steps.reached.wait()
        [found] = await listed_moves(first)
        assert found.state == move_pb2.QueueMove.STATE_CANCELLED

        # When the queue is to move elsewhere at once, and the former target does not answer
        vars(targets).pop("arrive")
        await begin_move(first, third)
        await gone(first)

        assert await has_queue(first) is False
        assert sorted(await claimed(third)) == list(range(1, 11))


async def test_a_target_takes_a_queue_whose_source_never_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, shard=1) as target:
        async with running(tmp_path, shard=0) as source:
            await source.create("q")
            await route_all(source, 10)
            await route_all(target, 10)
            steps = Steps(1)
            steps.between(source.broker.departures._targets, "arrive")
            await begin_move(source, target)
            await steps.reached.wait()
        target.broker.arrivals._heard.clear()
        async with asyncio.timeout(60):
            while not await has_queue(target):
                await asyncio.sleep(0.05)
        assert sorted(await claimed(target)) == list(range(1, 11))


async def test_pages_of_a_move_that_is_over_bring_nothing_back(tmp_path: Path) -> None:
    names = QueueNames(open_root(tmp_path.as_uri()).objects)
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        await route_all(first, 10)
        await route(second, 10)
        targets, pages = first.broker.departures._targets, list[Callable[[], Awaitable[None]]]()
        send = targets.send

        async def note(*args: Any, **options: Any) -> None:
            pages.append(partial(send, *args, **options))
            await send(*args, **options)

        vars(targets)["send"] = note
        await move(first, second)

        # Given that the queue was deleted since, and its shard killed before it freed the name
        await delete(second)
        await swept(second)
        async with asyncio.timeout(60):
            while (claim := await names.get("q")).broker_shards:
                await asyncio.sleep(0.01)
        assert await names.claim("q", (1,), claim)

        # When a process that stood still sends its pages
        for page in pages:
            with pytest.raises(FailedPrecondition) as refused:
                await page()
            assert refused.value.reason == "MOVE_OVER"
        shard = second.owner.shard
        assert "q" not in shard.queues
        assert not shard.moves.arrivals


async def test_what_came_of_a_queue_is_dropped_where_its_name_is_claimed_again(
    tmp_path: Path,
) -> None:
    names = QueueNames(open_root(tmp_path.as_uri()).objects)
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        steps = Steps(3)
        steps.between(first.broker.departures._targets, "send")
        await begin_move(first, second)
        await steps.reached.wait()
        assert second.owner.shard.moves.arrivals

        # When the name gets a claim for this shard, though not all has come
        assert await names.claim("q", (1,), await names.get("q"))
        second.broker.arrivals._heard.clear()

        async with asyncio.timeout(60):
            while second.owner.shard.moves.arrivals:
                await asyncio.sleep(0.01)
        await swept(second)
        assert await has_queue(second) is False


async def test_no_queue_is_created_under_a_name_that_moves(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second), running(tmp_path, shard=2) as third:
        await introduce(first, second)
        await first.create("q")
        for step in range(1, 8):
            source, target = (first, second) if step % 2 else (second, first)
            await swept(target)
            steps = Steps(step)
            steps.between(source.broker.departures._targets, "send", "arrive")
            moving = asyncio.create_task(move(source, target))
            reached = asyncio.create_task(steps.reached.wait())
            await asyncio.wait([moving, reached], return_when=asyncio.FIRST_COMPLETED)
            for rig in (source, target, third):
                assert (await refusal(rig.create("q")))[1] in (
                    "QUEUE_ALREADY_EXISTS",
                    "QUEUE_MOVING",
                    "QUEUE_CHANGING",
                    "QUEUE_BEING_REMOVED",
                )
            steps.thawed.set()
            await moving
            reached.cancel()
            restore(source)


async def test_a_consumer_goes_on_where_its_queue_is(tmp_path: Path) -> None:
    async with (
        two_brokers(tmp_path) as (first, second),
        slatemq.connect(first.running.address) as client,
    ):
        await first.create("q")
        await second.create("else")
        seen: dict[int, int] = {}
        async with client.consume("q", prefetch=4) as consumer:

            async def consume() -> None:
                async for message in consumer:
                    seen[message.message_id] = seen.get(message.message_id, 0) + 1
                    with suppress(FailedPrecondition):  # LEASE_ENDED: it comes once more.
                        await message.ack()

            consuming = asyncio.create_task(consume())
            source, target = first, second
            for number in range(4):
                for rig in (source, target):
                    await route_all(rig, 10 * number + 5)
                await swept(target)
                await move(source, target)
                for rig in (target, source):
                    await route_all(rig, 10 * number + 10)
                source, target = target, source
            async with asyncio.timeout(60):
                while len(seen) < 40:
                    await asyncio.sleep(0.02)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
        assert sorted(seen) == list(range(1, 41))


async def test_commands_about_a_queue_that_moves_are_repeated(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        await first.create("r")
        await first.assign([1], "r")
        await route(second, 1)
        [one] = await first.claim("r")
        steps = Steps(3)
        steps.between(first.broker.departures._targets, "send")
        await begin_move(first, second)
        await steps.reached.wait()

        async def reason(command: consumer_pb2.Command) -> str:
            request = consumer_pb2.ExecuteRequest(commands=[command])
            return (await refusal(first.consumers.Execute(request)))[1]

        push = consumer_pb2.Command(push=consumer_pb2.PushCommand(queue_id="q", payload=b"x"))
        transfer = consumer_pb2.Command(
            transfer=consumer_pb2.TransferCommand(lease_token=one.lease_token, target_queue_id="q")
        )
        assert await reason(push) == "QUEUE_MOVING"
        assert await reason(transfer) == "QUEUE_MOVING"
        assert (await refusal(first.claim("q")))[1] == "QUEUE_MOVING"
        delete = queue_pb2.DeleteQueueRequest(queue_id="q")
        assert (await refusal(first.queues.DeleteQueue(delete)))[1] == "QUEUE_MOVING"
        steps.thawed.set()
        await gone(first)
        await first.consumers.Execute(consumer_pb2.ExecuteRequest(commands=[push]))
        assert await reason(transfer) == "OTHER_SHARD"


async def test_a_search_that_may_have_passed_over_a_queue_that_moves_is_not_over(
    tmp_path: Path,
) -> None:
    async with (
        two_brokers(tmp_path) as (first, second),
        slatemq.connect(first.running.address, call_timeout=2) as client,
    ):
        await first.create("q")
        await first.create("stays")
        await route(first, 1, q=[1])
        await route(first, 2, stays=[2])
        await route(second, 2)

        async def search(message_id: int, *queue_ids: str) -> tuple[list[str], str]:
            """The queues that have the message, and why there may be others."""
            found: list[str] = []
            try:
                async for entry in client.find_message(message_id, queue_ids):
                    found.append(entry.queue_id)  # noqa: PERF401 - what came before an error counts
            except Unavailable as error:
                return found, error.reason
            return found, ""

        assert await search(1) == await search(1, "q") == (["q"], "")
        steps = Steps(3)
        steps.between(first.broker.departures._targets, "send")
        await begin_move(first, second)
        await steps.reached.wait()

        assert await search(1) == await search(1, "q") == ([], "QUEUE_MOVING")
        assert await search(2) == (["stays"], "QUEUE_MOVING")
        assert await search(2, "stays") == (["stays"], "")

        steps.thawed.set()
        await gone(first)
        assert await search(1, "q") == (["q"], "")
        # Without names, a broker may have been asked before the queue was there
        assert await search(1) == (["q"], "QUEUE_MOVING")
        first.clock.advance(20_000)
        assert await search(1) == (["q"], "")


async def test_a_search_says_so_where_a_queue_left_long_before_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, thawed = asyncio.Event(), asyncio.Event()
    search = EntryFinder.search

    async def held(
        self: EntryFinder, queue: Queue, message_id: int, since_ms: int
    ) -> AsyncIterator[SearchStep]:
        if queue.queue_id == "held":
            reached.set()
            await thawed.wait()
        async for step in search(self, queue, message_id, since_ms):
            yield step

    monkeypatch.setattr(EntryFinder, "search", held)
    async with two_brokers(tmp_path) as (first, second):
        for queue_id in ("held", "q", "deleted"):
            await first.create(queue_id)
        await route(first, 1, q=[1])
        await route(second, 1)

        # Given a search that is at the first of three queues, all of which are here
        async def find() -> list[int]:
            request = entry_pb2.FindMessageRequest(message_id=1)
            return [len(answer.entries) async for answer in entries(first).FindMessage(request)]

        searching = asyncio.create_task(refusal(find()))
        await reached.wait()

        # When the second one leaves, longer ago than a queue counts as one that has just left
        await move(first, second)
        first.clock.advance(LISTED_MS + 1_000)
        await delete(first, "deleted")
        thawed.set()

        # Then the search may have missed it, and the next one has not
        assert (await searching)[1:] == ("QUEUE_MOVING", "queue 'q' is moving to another shard")
        assert not any(await find())


async def test_waiting_claims_end_when_their_queue_leaves(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create("q")
        waiting = asyncio.create_task(first.claim("q", wait_ms=20_000))
        async with asyncio.timeout(60):
            while not first.delivery.has_waiters("q"):
                await asyncio.sleep(0.01)
        await move(first, second)
        assert (await refusal(waiting))[1] == "QUEUE_MOVING"


async def test_the_client_moves_queues_and_empties_shards(tmp_path: Path) -> None:
    async with (
        two_brokers(tmp_path) as (first, second),
        slatemq.connect(first.running.address) as client,
    ):
        for name in ("a", "b"):
            await client.create_queue(name, shard=0)
        seen: list[str] = []

        assert await client.move_queue("a", on_progress=lambda one: seen.append(one.state)) == 1
        assert await client.move_queue("a", 1) == 1  # it is there
        assert seen
        assert (await client.get_queue("a")).broker_shard == 1
        with pytest.raises(NotFound):
            await client.move_queue("absent", 1)
        with pytest.raises(NotFound):
            await client.move_queue("a", 7)
        await client.drain_shard("broker", 1)
        with pytest.raises(FailedPrecondition) as refused:
            await client.move_queue("b")
        assert refused.value.reason == "SHARD_DRAINING"
        await swept(first, "a")
        assert await client.move_queue("a") == 0
        assert await client.queue_moves(1) == []
        await gone(second, "a")
        shard = next(one for one in (await client.shards("broker")).shards if one.shard)
        assert shard.state == "drained"


async def test_the_client_says_why_a_move_was_cancelled(tmp_path: Path) -> None:
    async with (
        two_brokers(tmp_path) as (first, second),
        slatemq.connect(first.running.address) as client,
    ):
        await client.create_queue("q", shard=0)
        then(first.broker.departures._targets, "check", second.broker.placement.drain.begin)
        with pytest.raises(FailedPrecondition) as refused:
            await client.move_queue("q", 1)
        assert refused.value.reason == "MOVE_CANCELLED"
        assert "takes no new queues" in refused.value.message
        (found,) = await client.queue_moves(0)
        assert (found.queue_id, found.state, found.to_broker_shard) == ("q", "cancelled", 1)
        assert (await client.get_queue("q")).broker_shard == 0


async def test_a_repeat_without_a_shard_waits_for_the_move_that_is_under_way(
    tmp_path: Path,
) -> None:
    async with (
        two_brokers(tmp_path) as (first, second),
        running(tmp_path, shard=2) as third,
        slatemq.connect(first.running.address) as client,
    ):
        await introduce(first, second)
        source, other = first, third
        for name in ("send", "arrive"):
            # Given a move that its caller no longer waits for, before and after it is claimed
            await source.create("q")
            steps = Steps(1)
            steps.between(source.broker.departures._targets, name)
            await begin_move(source, second)
            await steps.reached.wait()

            progress: list[slatemq.QueueMove] = []
            repeat = asyncio.create_task(client.move_queue("q", on_progress=progress.append))
            async with asyncio.timeout(60):
                while not progress:
                    await asyncio.sleep(0.01)
            steps.thawed.set()

            assert await repeat == 1
            assert await has_queue(second)
            assert not await has_queue(other)
            await client.delete_queue("q")
            await swept(source)
            await swept(second)
