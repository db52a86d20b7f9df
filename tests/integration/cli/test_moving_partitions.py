"""`slatemq shard` empties shards that have partitions of queues."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.integration.cli import ready_command
from tests.integration.cli.stack import RUN_SECONDS
from tests.integration.janitor.instances import Instance, instance

pytestmark = pytest.mark.stack


async def ran(made: Instance, *arguments: str) -> tuple[int, str, str]:
    """The code, the output and the errors of a command."""
    environ = {**os.environ, "SLATEMQ_ENDPOINT": made.brokers[0].address}
    done = await asyncio.to_thread(ready_command.run, arguments, environ, b"", RUN_SECONDS)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def test_a_drained_shard_loses_its_queues_and_partitions(tmp_path: Path) -> None:
    async with instance(tmp_path, 3, ()) as made:
        queue = await made.client.create_queue("clicks", partitions=2)
        first, second = queue.broker_shards
        (free,) = {0, 1, 2} - {first, second}
        await made.client.create_queue("orders", shard=first)
        ids = await made.publish("clicks", 100)
        await made.routed()

        code, out, err = await ran(made, "shard", "drain", str(first), "--move", "--json")

        assert code == 0, err
        *moved, shard = [json.loads(line) for line in out.splitlines()]
        assert {"queue_id": "clicks", "broker_shard": free, "partition": 0} in moved
        assert "orders" in {one["queue_id"] for one in moved}
        assert shard["queues_count"] == 0
        queue = await made.client.get_queue("clicks")
        assert queue.broker_shards == (free, second)
        assert await made.listed("clicks", "available") == ids

        # The other partition stays where it has no place
        code, _, err = await ran(made, "shard", "drain", str(second), "--move")
        left = f"no broker shard without the queue takes it (being drained: {first})"
        assert (code, f"slatemq: partition 1 of clicks: {left}" in err) == (1, True), err
        code, _, err = await ran(made, "shard", "move", "clicks", "--partition", "1")
        assert (code, f"slatemq: {left}" in err) == (1, True), err
        code, _, err = await ran(made, "shard", "move", "clicks", "absent", "--partition", "1")
        assert (code, f"partition 1 of clicks: {left}" in err) == (1, True), err
        assert "partition 1 of absent: queue 'absent' does not exist" in err
        code, _, err = await ran(made, "shard", "move", "clicks", "--to", str(second))
        assert (code, "which of the 2 partitions" in err) == (1, True), err
        await made.client.drain_shard("broker", first, cancel=True)
        code, out, err = await ran(
            made, "shard", "move", "clicks", "--partition", "1", "--to", str(first)
        )
        assert code == 0, err
        assert out == f"partition 1 of clicks is on broker shard {first}\n"
        assert await made.listed("clicks", "available") == ids

        # Another broker that is down holds up no queue
        await made.client.delete_queue("clicks")
        for shard in range(3):
            await made.client.drain_shard("broker", shard, cancel=True)
        await made.client.create_queue("refunds", shard=0)
        await made.brokers[2].kill()
        code, out, err = await ran(made, "shard", "drain", "0", "--move")
        assert code == 0, err
        assert "refunds is on broker shard 1\n" in out
        assert "broker shard 2 does not answer" in err

        # And nothing is said of what it has
        _, out, _ = await ran(made, "shard", "ls", "--json")
        listed = {(one["service"], one["shard"]): one for one in map(json.loads, out.splitlines())}
        down = listed["broker", 2]
        known = [down[name] for name in ("state", "messages_count", "database_bytes")]
        assert known == ["down", None, None]
        assert listed["broker", 1]["database_bytes"] > 0
