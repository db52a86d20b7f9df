"""Which redrives a broker still tells of."""

from __future__ import annotations

import grpc
import pytest

from services.broker.dead_letters import redrive_runner
from slatemq.v1 import entry_pb2
from tests.integration.broker.entry_calls import entries, fail, redrive, redriven, start, until
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running
from tests.manual_clock import ManualClock

NOT_FOUND = grpc.StatusCode.NOT_FOUND
HOUR_MS = 60 * 60 * 1000

LETTERS = 300
"""At one a second, more than a redrive moves during a test."""


async def cancelled(rig: Rig) -> str:
    """A redrive that was stopped on its way."""
    one = await start(rig, rate=1, message_ids=[*range(1, 1001)])
    request = entry_pb2.CancelRedriveRequest(redrive_id=one.redrive_id)
    await entries(rig).CancelRedrive(request)
    return one.redrive_id


async def redrive_ids(rig: Rig) -> list[str]:
    answer = await entries(rig).ListRedrives(entry_pb2.ListRedrivesRequest())
    return [one.redrive_id for one in answer.redrives]


async def test_those_that_ended_long_ago_are_forgotten_permanently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given redrives that are done, cancelled, and running, and a retention of an hour
    monkeypatch.setattr(redrive_runner, "FORGET_EVERY_S", 0.01)
    disk, clock = Disk(), ManualClock()
    root = memory_root(disk)
    settings = {"redrive_retention_s": 3600}
    async with running(root, clock, disk=disk, settings=settings) as rig:
        await rig.create(max_attempts=1)
        await rig.create("other", max_attempts=1)
        await fail(rig, range(1, LETTERS + 1))
        stopped = await cancelled(rig)
        await redriven(rig, "other")
        runs = await start(rig, rate=1, message_ids=[*range(2, LETTERS + 1)])
        clock.advance(HOUR_MS // 2)
        late = await redriven(rig, "other")
        newest = await redriven(rig, "other")
        assert len(await redrive_ids(rig)) == 5

        # When the hour is over for some of them
        clock.advance(HOUR_MS // 2 + 1)

        # Then what ended before it is gone, on disk too, and what runs is there however old
        async def is_reported(*expected: str) -> None:
            await until(rig, runs.redrive_id, lambda _: True)
            while await redrive_ids(rig) != [*expected]:
                await until(rig, newest.redrive_id, lambda _: True)

        await is_reported(newest.redrive_id, late.redrive_id, runs.redrive_id)
        assert (await refusal(redrive(rig, stopped)))[0] == NOT_FOUND
        request = entry_pb2.ResumeRedriveRequest(redrive_id=stopped)
        assert (await refusal(entries(rig).ResumeRedrive(request)))[0] == NOT_FOUND
        clock.advance(24 * HOUR_MS)
        await is_reported(newest.redrive_id, runs.redrive_id)
    async with running(root, clock, disk=disk, settings={"redrive_retention_s": 0}) as rig:
        # One that keeps them for ever has none of the others: they are gone on disk, too.
        assert await redrive_ids(rig) == [newest.redrive_id, runs.redrive_id]
        # No number is given twice, though all before it are forgotten.
        assert (await redriven(rig, "other")).redrive_id == "0-6"


async def test_only_so_many_are_kept_and_the_ids_that_they_named_are_let_go() -> None:
    async with running(settings={"redrives_kept": 2}) as rig:
        await rig.create(max_attempts=1)
        await rig.create("other", max_attempts=1)
        await fail(rig, range(1, LETTERS + 1))
        stopped = [await cancelled(rig) for _ in range(3)]
        assert await redrive_ids(rig) == [stopped[2], stopped[1]]
        done = await redriven(rig, message_ids=[7, 9])
        assert await redrive_ids(rig) == [done.redrive_id, stopped[2]]
        record = rig.owner.shard.redrives.get(4)
        assert record is not None
        assert record.message_ids == ()
