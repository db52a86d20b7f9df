"""Queues that start in the past: what they get, and that nothing comes twice."""

from __future__ import annotations

import asyncio

import pytest

from services.router import backfill
from services.router.pieces import PieceLimits
from slatemq.v1 import assignment_pb2, queue_pb2
from tests.integration.broker.queue_calls import delete, get, update
from tests.integration.router.replay_rig import (
    SMALL,
    World,
    create,
    drained,
    patiently,
    replayed,
    spans,
    world,
)
from tests.integration.waiting import eventually


async def publish(there: World, count: int, log: int = 0, **fields: int) -> list[int]:
    """This many entries of two messages, `n` being 0 and 1 in each."""
    ids = []
    for _ in range(count):
        ids += await there.logs[log].publish([{"n": "0"}, {"n": "1"}], **fields)
    return ids


async def test_from_the_beginning_a_queue_gets_what_one_that_always_was_got() -> None:
    async with world(2) as there, there.broker() as rig, there.router():
        await rig.create("always", filter='headers["n"] == "1"')
        for log in (0, 1):
            await publish(there, 30, log)
        await there.routed(rig)

        made = await create(rig, "late", source='headers["n"] == "1"')
        for log in (0, 1):
            await publish(there, 10, log)
        await there.routed(rig)
        replay = await replayed(rig, "late")

        ends = [span.end_sequence for span in made.replay.ranges]
        assert spans(replay) == [(0, 0, ends[0], ends[0]), (1, 0, ends[1], ends[1])]
        got = await drained(rig, "late")
        assert len(got) == 80
        assert sorted(got) == sorted(await drained(rig, "always"))


async def test_from_a_time_a_queue_gets_what_was_received_at_it_and_later() -> None:
    async with world() as there, there.broker() as rig, there.router():
        old = await publish(there, 8, received_at_ms=1_000)
        new = await publish(there, 8, received_at_ms=2_000)
        await there.routed(rig)

        made = await create(rig, "late", since_ms=2_000)
        await replayed(rig, "late")

        assert made.replay.ranges[0].start_sequence == old[-1]
        assert await drained(rig, "late") == new


@pytest.mark.parametrize("start", [{}, {"start_from_beginning": False}, {"start_from_ms": 9_999}])
async def test_from_now_on_there_is_no_replay(start: dict[str, int]) -> None:
    async with world() as there, there.broker() as rig, there.router():
        await publish(there, 3)
        await there.routed(rig)

        queue = queue_pb2.Queue(queue_id="q", filter="true")
        request = queue_pb2.CreateQueueRequest(queue=queue, **start)  # type: ignore[arg-type]
        made = (await rig.queues.CreateQueue(request)).queue
        ids = await publish(there, 1)
        await there.routed(rig)

        assert not made.HasField("replay")
        assert await drained(rig, "q") == ids
        # The first message of a log raises the epoch in any case.
        assert bool(set(there.log.asked) - {"raise"}) == ("start_from_ms" in start)


async def test_what_is_not_routed_yet_is_left_to_live_routing() -> None:
    async with world(2) as there, there.broker() as rig:
        ids = await publish(there, 3)

        made = await create(rig, "q")
        assert not made.HasField("replay")
        async with there.router():
            await there.routed(rig)

        assert await drained(rig, "q") == ids


async def test_the_epoch_of_each_log_is_raised_before_it_is_searched() -> None:
    async with world(3) as there, there.broker() as rig:
        await create(rig, "q")
        assert [log.asked for log in there.logs] == [["raise", "find"]] * 3


async def test_an_ingest_that_is_down_holds_up_the_replay_of_its_own_log_alone() -> None:
    async with world(2, try_s=3.0) as there, there.broker() as rig:
        await rig.create("always", filter="true")
        async with there.router():
            for log in (0, 1):
                await publish(there, 3, log)
            wanted = [await publish(there, 3, log, received_at_ms=3_000) for log in (0, 1)]
            await there.routed(rig)
            # Given an ingest that is down
            await there.servers[1].stop()

            # When a queue is created that starts in the past
            made = await create(rig, "q", since_ms=3_000)

            # Then it is, and says what it waits for; the other log is replayed
            waits = {one.ingest_shard: one.waits_for_ingest for one in made.replay.ranges}
            assert waits == {0: False, 1: True}
            async with asyncio.timeout(60):
                got: list[int] = []
                while len(got) < len(wanted[0]):
                    got += await drained(rig, "q")
            assert got == wanted[0]
            assert not (await get(rig)).replay.done

            # And when it is back, its log is, too, from the time that was asked for
            await there.servers[1].start()
            replay = await replayed(rig, "q")
            assert not any(one.waits_for_ingest for one in replay.ranges)
            assert await drained(rig, "q") == wanted[1]
            assert there.logs[1].asked[-2:] == ["raise", "find"]


async def test_a_replay_goes_on_after_routers_and_brokers_have_died() -> None:
    async with world() as there:
        async with there.broker() as rig:
            await rig.create("always", filter="true")
            async with there.router():
                ids = await publish(there, 40)
                await there.routed(rig)
            await create(rig, "late")
        for _ in range(3):  # A broker at another address, and another router.
            async with there.broker() as rig, there.router():
                before = (await get(rig, "late")).replay.ranges[0].cursor
                async with asyncio.timeout(60):
                    while (await get(rig, "late")).replay.ranges[0].cursor == before < ids[-2]:
                        await asyncio.sleep(0.001)
        async with there.broker() as rig, there.router():
            await replayed(rig, "late")

            assert await drained(rig, "late") == ids
            assert await drained(rig, "always") == ids


async def test_a_piece_whose_router_died_before_the_answer_comes_once() -> None:
    async with world() as there, there.broker() as rig:
        async with there.router():
            ids = await publish(there, 20)
            await there.routed(rig)
        await create(rig, "late")

        there.disk.free.clear()
        async with there.router():
            await eventually(lambda: rig.owner.shard.replays.of("late")[0].cursor > 0)
        async with there.router():
            there.disk.free.set()
            await replayed(rig, "late")

        assert await drained(rig, "late") == ids


async def test_a_broker_that_does_not_answer_holds_the_log_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backfill, "ANSWER_SECONDS", 0.2)
    async with world() as there, there.broker() as rig:
        ids = await publish(there, 9)
        async with there.router():
            await there.routed(rig)
        await create(rig, "q")
        there.disk.free.clear()
        async with there.router():
            await eventually(lambda: "the replay of log 0 into broker 0" in caplog.text)
            there.disk.free.set()
            await replayed(rig, "q")
        assert await drained(rig, "q") == ids


async def test_a_replay_goes_on_at_an_ingest_that_has_moved() -> None:
    async with world() as there, there.broker() as rig, there.router():
        ids = await publish(there, 20)
        await there.routed(rig)
        there.ingests[0].free.clear()
        there.ingests[0].held_before = there.log.end
        await create(rig, "late")
        await eventually(lambda: there.ingests[0].streams_count == 2)

        await there.servers[0].stop()
        there.ingests[0].free.set()
        await there.servers[0].start()
        await replayed(rig, "late")

        assert await drained(rig, "late") == ids


async def test_two_routers_bring_nothing_in_twice() -> None:
    async with world() as there, there.broker() as rig:
        async with there.router():
            ids = await publish(there, 60)
            await there.routed(rig)
        await create(rig, "a")
        await create(rig, "b", since_ms=0)
        others = SMALL._replace(messages_max=3)
        async with there.router(), there.router(others):
            await replayed(rig, "a")
            await replayed(rig, "b")
            assert await drained(rig, "a") == ids
            assert await drained(rig, "b") == ids


async def test_queues_with_overlapping_replays_each_get_their_own() -> None:
    async with world() as there, there.broker() as rig, there.router():
        first = await publish(there, 20, received_at_ms=1_000)
        second = await publish(there, 20, received_at_ms=2_000)
        await there.routed(rig)

        for number in range(4):
            await create(rig, f"all{number}", source=f'headers["n"] == "{number % 2}"')
        await create(rig, "later", since_ms=2_000)
        for queue_id in ("all0", "all1", "all2", "all3", "later"):
            await replayed(rig, queue_id)

        for number in range(4):
            assert await drained(rig, f"all{number}") == (first + second)[number % 2 :: 2]
        assert await drained(rig, "later") == second


async def test_live_messages_do_not_wait_for_a_replay_that_hangs() -> None:
    async with world() as there, there.broker() as rig, there.router():
        old = await publish(there, 20)
        await there.routed(rig)
        there.ingests[0].free.clear()
        there.ingests[0].held_before = there.log.end

        await create(rig, "late")
        live = await publish(there, 5)
        await there.routed(rig)

        assert await drained(rig, "late") == live
        assert (await get(rig, "late")).replay.ranges[0].cursor == 0
        there.ingests[0].free.set()
        await replayed(rig, "late")
        assert await drained(rig, "late") == old


async def test_many_replays_open_few_streams() -> None:
    async with world() as there, there.broker() as rig, there.router():
        await publish(there, 10)
        await there.routed(rig)
        there.ingests[0].free.clear()
        there.ingests[0].held_before = there.log.end

        for number in range(20):
            await create(rig, f"q{number}", since_ms=0)

        assert there.ingests[0].streams_count <= 2  # The live one, and one for the replays.
        there.ingests[0].free.set()
        for number in range(20):
            await replayed(rig, f"q{number}")


async def test_a_changed_filter_judges_what_the_replay_has_not_reached() -> None:
    async with world() as there, there.broker() as rig:
        async with there.router():
            await publish(there, 10)
            await there.routed(rig)
        await create(rig, "late", source='headers["n"] == "0"')
        await update(rig, ["filter"], "late", filter='headers["n"] == "1"')
        async with there.router():
            await replayed(rig, "late")
            headers = [there.log.headers[i]["n"] for i in await drained(rig, "late")]
        assert headers == ["1"] * 10


async def test_a_filter_that_changes_while_a_piece_is_under_way_judges_it_again() -> None:
    async with world() as there, there.broker() as rig, there.router(PieceLimits(hold_ms=10)):
        await publish(there, 10)
        await there.routed(rig)
        there.ingests[0].free.clear()
        there.ingests[0].held_before = there.log.end
        await create(rig, "late", source='headers["n"] == "0"')
        await eventually(lambda: there.ingests[0].streams_count == 2)

        # The piece is being read, for the filter of before.
        await update(rig, ["filter"], "late", filter='headers["n"] == "1"')
        there.ingests[0].free.set()
        await replayed(rig, "late")

        headers = [there.log.headers[i]["n"] for i in await drained(rig, "late")]
        assert headers == ["1"] * 10


async def test_a_deleted_queue_leaves_no_replay_behind() -> None:
    async with world() as there:
        async with there.broker() as rig:
            async with there.router():
                await publish(there, 10)
                await there.routed(rig)
            await create(rig, "late")
            await delete(rig, "late")
            await patiently(lambda: rig.create("late", filter="true"))
            assert not (await get(rig, "late")).HasField("replay")
        async with there.broker() as rig, there.router():
            assert not (await get(rig, "late")).HasField("replay")
            live = await publish(there, 2)
            await there.routed(rig)
            assert await drained(rig, "late") == live


async def test_what_is_past_its_retention_is_left_out_and_delays_count_from_the_receipt() -> None:
    async with world() as there, there.broker() as rig, there.router():
        now_ms = there.clock.now_ms()
        await there.log.publish([{}], retention_s=5, received_at_ms=now_ms - 5_000)
        [kept] = await there.log.publish([{}], retention_s=6, received_at_ms=now_ms - 5_000)
        [due] = await there.log.publish([{}], visible_at_ms=now_ms + 500)
        await there.routed(rig)

        await create(rig, "late")
        await replayed(rig, "late")

        assert await drained(rig, "late") == [kept]
        there.clock.advance(499)
        assert await drained(rig, "late") == []
        there.clock.advance(1)
        assert await drained(rig, "late") == [due]


async def test_messages_pushed_to_other_queues_are_left_out() -> None:
    async with world() as there, there.broker() as rig, there.router():
        await there.log.publish([{}], direct_queue_id="other")
        mine = await there.log.publish([{}], direct_queue_id="late")
        ids = await publish(there, 1)
        await there.routed(rig)

        await create(rig, "late")
        await replayed(rig, "late")

        assert await drained(rig, "late") == mine + ids


async def test_a_replay_ends_where_the_log_was_cleared_meanwhile() -> None:
    async with world() as there, there.broker() as rig:
        async with there.router():
            await publish(there, 10)
            await there.routed(rig)
        await create(rig, "late")
        there.log.remove(there.log.end)
        async with there.router():
            await replayed(rig, "late")
            assert await drained(rig, "late") == []


async def test_progress_is_reported_wherever_the_queue_is() -> None:
    async with world() as there, there.broker() as rig:
        async with there.router():
            await publish(there, 3)
            await there.routed(rig)
        made = await create(rig, "late")
        end = there.log.end

        state = await rig.assignments.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
        watch = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest())
        listed = await rig.queues.ListQueues(queue_pb2.ListQueuesRequest())
        watched = await watch.read()
        assert isinstance(watched, queue_pb2.WatchQueuesResponse)
        items = [
            made,
            await get(rig, "late"),
            listed.queues[0],
            state.changes[0].queue,
            watched.changes[0].queue,
        ]
        watch.cancel()

        for queue in items:
            assert spans(queue.replay) == [(0, 0, 0, end)]
            assert not queue.replay.done
