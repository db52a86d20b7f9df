"""How far back a queue may start, and that it starts at no time to come."""

from __future__ import annotations

import grpc
import pytest

from libs.serving.process.instance import InstanceSettings
from tests.integration.broker.rig import refusal
from tests.integration.router.replay_rig import World, create, drained, replayed, world


async def publish(there: World, received_at_ms: int) -> list[int]:
    """Three messages."""
    return await there.log.publish([{}, {}, {}], received_at_ms=received_at_ms)


@pytest.mark.parametrize("since_ms", [None, 0, 1_000])
async def test_no_queue_starts_before_the_replay_window(since_ms: int | None) -> None:
    async with world(window_s=3600) as there, there.broker() as rig, there.router():
        begin_ms = there.clock.now_ms() - 3_600_000
        await publish(there, begin_ms - 1)
        within = await publish(there, begin_ms)
        later = await publish(there, begin_ms + 1)
        await there.routed(rig)

        await create(rig, "q", since_ms=since_ms)
        await replayed(rig, "q")
        assert await drained(rig, "q") == within + later

        await create(rig, "late", since_ms=begin_ms + 1)
        await replayed(rig, "late")
        assert await drained(rig, "late") == later


def test_the_replay_window_is_a_week_unless_the_instance_says_otherwise() -> None:
    assert InstanceSettings().replay_window_s == 7 * 24 * 3600


async def test_a_start_that_is_no_time_up_to_now_is_refused() -> None:
    async with world() as there, there.broker() as rig:
        now_ms = there.clock.now_ms()
        for since_ms in (-1, now_ms + 60_001, now_ms * 1000):
            result = await refusal(create(rig, "q", since_ms=since_ms))
            assert result == (grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_RANGE", "start_from_ms")
        assert there.log.asked == []
        # By a clock that is ahead of the broker's it may have been now.
        assert not (await create(rig, "q", since_ms=now_ms + 60_000)).HasField("replay")
