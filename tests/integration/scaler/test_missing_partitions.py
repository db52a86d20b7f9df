"""What is answered of a queue while the broker of one of its partitions is down."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest

from services.scaler.readings import Readings
from services.scaler.triggers import Mode, Trigger
from slatemq.errors import Unavailable
from tests.integration.janitor.instances import instance
from tests.integration.waiting import WAIT_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.stack]


async def test_a_queue_without_all_its_partitions_is_never_said_to_have_less(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path, 2, (), call_timeout=5) as made:
        client = made.client
        await client.create_queue("work", partitions=2)
        down = (await client.get_queue("work")).partitions[1].broker_shard
        readings = Readings(client)
        triggers = [Trigger("work", mode, 1.0) for mode in get_args(Mode)]
        for one in triggers:
            assert await readings.value(one) == 0
            assert not await readings.is_active(one)

        # When one broker is down, and what is at the other says nothing of it
        await made.brokers[down].kill()

        for one in triggers:
            with pytest.raises(Unavailable):
                await readings.value(one)
            with pytest.raises(Unavailable):
                await readings.is_active(one)

        # Then work that is known is work all the same
        await made.publish("work", 20)
        async with asyncio.timeout(WAIT_SECONDS):
            while not (await client.get_queue("work")).counts.available_count:
                await asyncio.sleep(0.05)
        assert await readings.is_active(Trigger("work", "depth", 1.0))
        with pytest.raises(Unavailable):
            await readings.value(Trigger("work", "depth", 1.0))
