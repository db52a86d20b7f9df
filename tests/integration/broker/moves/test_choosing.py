"""A move that names no shard chooses one."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import slatemq
from services.broker.rpc.queues import QueueServicer
from slatemq._admin import placement
from tests.integration.broker.moves.movers import has_queue, two_brokers


async def test_a_broker_that_says_its_load_late_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given brokers of which the only target leaves the first question unanswered
    monkeypatch.setattr(placement, "ANSWER_S", 0.1)
    answer, asked = QueueServicer.GetShardLoad, Counter[int]()

    async def answer_again(servicer: QueueServicer, request: Any, context: Any) -> Any:
        asked[servicer._shard] += 1
        if asked[servicer._shard] == 1:
            await asyncio.Event().wait()
        return await answer(servicer, request, context)

    monkeypatch.setattr(QueueServicer, "GetShardLoad", answer_again)
    async with (
        two_brokers(tmp_path) as (first, second),
        slatemq.connect(first.running.address) as client,
    ):
        await first.create("q")

        assert await client.move_queue("q") == 1

        assert asked[1] > 1
        assert await has_queue(second)
