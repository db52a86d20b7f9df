"""What a command shows of a queue while the broker of one of its partitions is down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slatemq.textqueue import TextQueue
from tests.integration.cli.test_moving_partitions import ran
from tests.integration.janitor.instances import instance
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.stack


async def test_an_export_keeps_what_the_others_have_and_names_the_broker_that_is_down(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path, 3, ()) as made:
        await made.client.create_queue("clicks", partitions=3)
        await made.publish("clicks", 100)
        await made.routed()
        partitions = (await made.client.get_queue("clicks")).partitions.values()
        down = next(one for one in partitions if one.broker_shard)  # not the last partition
        left = 100 - down.counts.available_count
        await made.brokers[down.broker_shard].kill()
        file = tmp_path / "clicks.tq"
        export = "export", "clicks", "--state", "available", "--out"

        async with asyncio.timeout(WAIT_SECONDS):
            out = ""
            while not out.startswith(f"exported: {left} to {file}"):  # The others may be busy.
                file.unlink(missing_ok=True)
                code, out, err = await ran(made, *export, str(file))
                assert code == 3, err

        assert f"broker shard {down.broker_shard} does not answer" in err
        assert len(list(TextQueue(file))) == left
        async with asyncio.timeout(WAIT_SECONDS):
            while out.count("\\id=") != left:
                code, out, err = await ran(made, *export, "-")
                assert code == 3, err
