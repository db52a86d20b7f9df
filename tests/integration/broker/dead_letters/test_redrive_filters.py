"""Filters of redrives that take long: how much of a broker's time they get."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count

import pytest

from libs.filters import Filter
from libs.filters.allowance import Allowance
from libs.filters.engine import cel
from slatemq.v1 import entry_pb2
from tests.integration.broker.entry_calls import FAILED, fail, ids, redriven, start
from tests.integration.broker.rig import running
from tests.integration.waiting import eventually


async def test_a_redrive_whose_filter_takes_too_much_time_fails_with_that_reason() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 101))
        # Given a filter that takes ten milliseconds for each message
        clock = count(0, 10_000_000)
        redrives = rig.service.broker.redrives  # type: ignore[union-attr]
        redrives._allowance = Allowance(lambda: next(clock), lambda: next(clock), process="broker")

        ended = await redriven(rig, filter="size >= 0")

        assert ended.state == entry_pb2.Redrive.STATE_FAILED
        assert "more than 5% of the broker's time" in ended.error
        assert len(await ids(rig, FAILED)) == 100
        # And one without a filter moves them
        assert (await redriven(rig)).redriven_count == 100


async def test_redrives_judge_one_message_between_two_steps_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queues = [f"q{number}" for number in range(8)]
    async with running() as rig:
        for place, queue_id in enumerate(queues):
            await rig.create(queue_id, max_attempts=1)
            await fail(rig, range(20 * place + 1, 20 * place + 21), queue_id=queue_id)
        rounds, judged, matches = 0, Counter[int](), Filter.matches

        def counted(judge: Filter, message: cel.Context) -> bool:
            judged[rounds] += 1
            return matches(judge, message)

        async def turn() -> None:
            nonlocal rounds
            while True:
                await asyncio.sleep(0)
                rounds += 1

        monkeypatch.setattr(Filter, "matches", counted)
        turning = asyncio.create_task(turn())

        # When redrives of eight queues judge their dead letters at the same time
        rig.ingest.read_gate.clear()
        await asyncio.gather(*(start(rig, queue_id, filter="size < 0") for queue_id in queues))
        await eventually(lambda: len(rig.ingest.reads) >= 4)
        rig.ingest.read_gate.set()
        await eventually(lambda: judged.total() == 20 * len(queues))
        turning.cancel()

    assert max(judged.values()) <= 2
