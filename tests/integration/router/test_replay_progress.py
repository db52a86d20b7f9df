"""How far a replay is, in messages."""

from __future__ import annotations

import asyncio

from slatemq.v1 import queue_pb2
from tests.integration.broker.queue_calls import get
from tests.integration.router.replay_rig import create, replayed, world


async def test_progress_is_counted_in_messages_though_the_ids_of_a_log_jump() -> None:
    async with world(2) as there:
        async with there.broker() as rig:
            # Given logs whose ingests restarted between publishes, which passed over IDs
            ids: list[int] = []
            async with there.router():
                for _ in range(3):
                    ids += await there.log.publish([{}] * 20)
                    there.log.skip(1_000_000)
                ids += await there.log.publish([{}])
                others = await there.logs[1].publish([{}] * 7)
                await there.routed(rig)
            made = await create(rig, "late")
            assert not made.replay.HasField("message_count")
            assert made.replay.replayed_count == 0

        # When it is replayed, and the broker restarts
        seen: set[int] = set()
        whole = len(ids + others)
        for _ in range(4):
            async with there.broker() as rig, there.router():
                before = (await get(rig, "late")).replay.replayed_count
                async with asyncio.timeout(60):
                    while (await get(rig, "late")).replay.replayed_count == before < whole:
                        await asyncio.sleep(0.001)
                seen.add(before)
        async with there.broker() as rig, there.router():
            done = await replayed(rig, "late")

        # Then what is shown is what was published, whatever the IDs say
        assert [(one.replayed_count, one.message_count) for one in done.ranges] == [
            (len(ids), len(ids)),
            (len(others), len(others)),
        ]
        assert (done.replayed_count, done.message_count) == (whole, whole)
        assert len(seen) > 1, "a broker began in the middle"


async def test_the_messages_in_all_are_known_from_the_first_piece_on() -> None:
    async with world() as there, there.broker() as rig:
        async with there.router():
            ids: list[int] = []
            for _ in range(4):
                there.log.skip(1_000_000)
                ids += await there.log.publish([{}] * 20)
            await there.routed(rig)
        await create(rig, "late")
        replays: list[queue_pb2.Replay] = []
        async with there.router():
            while not replays or not replays[-1].done:
                replays.append((await get(rig, "late")).replay)
                await asyncio.sleep(0)
        begun = [one for one in replays if one.replayed_count]
        assert {one.message_count for one in begun} == {len(ids)}
        assert len({one.replayed_count for one in begun}) > 1
