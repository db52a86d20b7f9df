"""A table of a running ingest that rots: what it holds is never served, and the rest is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import slatemq
from slatemq.errors import Unavailable
from tests.integration.janitor.instances import WAIT_S, Instance, instance
from tests.integration.janitor.runs.janitors import janitor
from tests.integration.janitor.verify.test_running import cli, dead_letters, verified

BATCHES = 3
"""Each is a table: a verification takes a snapshot, for which all is flushed."""

MESSAGES = 10
PAYLOAD_BYTES = 5000


async def publish(made: Instance, luck: random.Random) -> dict[int, bytes]:
    payloads = [luck.randbytes(PAYLOAD_BYTES) for _ in range(MESSAGES)]
    outgoing = [slatemq.OutgoingMessage(one, {"queue": "orders"}) for one in payloads]
    ids = map(int, await made.client.publish_many(outgoing))
    await made.routed()
    return dict(zip(ids, payloads, strict=True))


async def delivered(made: Instance) -> AsyncGenerator[tuple[int, bytes], None]:
    """What is delivered, and acked, for as long as the caller wants more."""
    while True:
        try:
            messages = await made.client.claim("orders", BATCHES * MESSAGES, wait=1)
        except Unavailable:
            continue
        for one in messages:
            yield one.message_id, one.payload
            await one.ack()


async def test_messages_of_other_tables_are_delivered_and_the_damaged_ones_once_restored(
    tmp_path: Path,
) -> None:
    luck = random.Random(1)
    published: dict[int, bytes] = {}
    async with instance(tmp_path) as made, janitor(tmp_path, own_jobs=False) as there:
        await made.client.create_queue("orders", filter="true")
        for _ in range(BATCHES):
            published |= await publish(made, luck)
            assert (await verified(there, "verify"))["counts"]["faults"] == 0
    # Given an instance that has started, so that no payload is in memory, and a rotten table
    async with instance(tmp_path) as made, janitor(tmp_path, own_jobs=False) as there:
        tables = (made.data / "ingest" / "0" / "compacted").glob("*.sst")
        table = max(tables, key=lambda path: path.stat().st_size)
        good = table.read_bytes()
        place = len(good) // 2
        table.write_bytes(good[:place] + bytes((good[place] ^ 8,)) + good[place + 1 :])

        # Then it is named, with the messages that cannot be read
        run = await verified(there, "verify")
        named = {int(one) for finding in run["findings"] for one in finding["message_ids"]}
        assert any(table.name in finding["wrong"] for finding in run["findings"])
        assert named < published.keys()
        _, out, _ = await cli(there, "verify")
        assert "these messages wait until then" in out

        # And the others are delivered, with their bytes, and no message is a dead letter
        found: dict[int, bytes] = {}
        async with asyncio.timeout(WAIT_S), aclosing(delivered(made)) as messages:
            async for message_id, payload in messages:
                found[message_id] = payload
                if found.keys() | named == published.keys():
                    break
            assert found.keys() < published.keys()
            assert await dead_letters(made) == []

            # When the table is restored, then they come, too
            table.write_bytes(good)
            async for message_id, payload in messages:
                found[message_id] = payload
                if len(found) == len(published):
                    break
        assert found == published
