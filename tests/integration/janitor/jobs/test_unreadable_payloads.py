"""Dead letters whose payloads cannot be read: they stay until they can be, or are dropped."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from services.broker.entries.handles import parse_handle
from services.janitor.jobs.archive import DEAD_LETTERS
from services.janitor.jobs.dead_letter_jobs import DeadLetterArchive
from services.janitor.jobs.standing import read_last_ids
from services.janitor.snapshots import snapshots_of_all
from tests.integration.janitor.instances import Instance, instance

pytestmark = pytest.mark.slow  # Four processes start, with the databases of two of them

BLOB = bytes(100_000)
EDITED = b"edited" * 20_000

ROWS = pa.schema(
    [
        *(one for one in DEAD_LETTERS if one.name not in ("payload", "run")),
        ("queue", pa.string()),
        ("day", pa.date32()),
        ("failed_at_ms", pa.int64()),
        ("bucket_order", pa.int64()),
    ]
)


async def dead_letters(made: Instance) -> pa.RecordBatch:
    """Those of the queue `orders`, as the job hands them to its tasks."""
    queue = await made.client.get_queue("orders")
    listed = [one async for one in made.client.list_entries("orders", "failed")]
    entries = sorted(listed, key=lambda one: one.finished_at_ms)
    moments = [datetime.fromtimestamp(one.finished_at_ms / 1000, UTC) for one in entries]
    rows = [
        {
            "message_id": one.message_id,
            "failed_at": moment,
            "failed_at_ms": one.finished_at_ms,
            "day": moment.date(),
            "queue": "orders",
            "broker_shard": queue.broker_shard,
            "created_revision": queue.revision,
            "bucket_order": parse_handle(one.handle, 0).number,
            "attempts": one.attempts_count,
            "priority": one.priority,
            "reason": one.reason,
            "payload_bytes": len(BLOB),
        }
        for one, moment in zip(entries, moments, strict=True)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=ROWS)


@asynccontextmanager
async def archiving(made: Instance) -> AsyncIterator[Callable[[], pa.RecordBatch]]:
    """A run that has its snapshots, and knows its dead letters: what archives them, and counts."""
    root = open_root(made.url)
    directory = TopologyDirectory(root.objects)
    channels = Channels(directory)
    async with snapshots_of_all(directory, channels) as taken:
        ingests = tuple(name for name in taken.names if name.service == "ingest")
        last_ids = await read_last_ids(root, ingests)
        task = DeadLetterArchive(made.url, ingests, last_ids, frozenset(), "run")
        due = await dead_letters(made)
        yield lambda: next(iter(task(iter([due]))))
    await channels.close()
    await directory.close()


async def archive(made: Instance) -> Counter[str]:
    async with archiving(made) as run:
        return counted(await asyncio.to_thread(run))


def counted(batch: pa.RecordBatch) -> Counter[str]:
    return Counter({row["name"]: row["count"] for row in batch.to_pylist()})


def archived_payloads(made: Instance) -> dict[int, bytes | None]:
    """The payloads of all rows in the archive."""
    table = pq.read_table(made.data / "archive/dead-letters", partitioning="hive")
    found = {row["message_id"]: row["payload"] for row in table.to_pylist()}
    assert len(found) == table.num_rows
    return found


def rot(path: Path) -> None:
    path.write_bytes(b"\x01" + path.read_bytes()[1:])


@pytest.mark.parametrize("spoil", [rot, os.unlink])
async def test_a_dead_letter_whose_payload_object_cannot_be_read_stays_until_it_is_restored(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with instance(tmp_path) as made:
        await made.client.create_queue("orders", max_attempts=1)
        (whole,) = await made.publish("orders", 1)
        (spoilt,) = await made.publish("orders", 1, payload=BLOB)
        for message in await made.claim("orders", {whole, spoilt}):
            await message.nack("boom")
        (path,) = (made.data / one for one in made.objects)
        spoil(path)

        # When it is archived, then the other one goes alone, and the log says what stays and why.
        with caplog.at_level(logging.ERROR):
            counts = await archive(made)
        assert await made.listed("orders", "failed") == {spoilt}
        assert await made.listed("orders", "archived") == {whole}
        assert (counts["dead_letters_archived"], counts["dead_letters_left"]) == (1, 1)
        assert archived_payloads(made) == {whole: b"payload"}
        (line,) = [one.getMessage() for one in caplog.records if "stay" in one.getMessage()]
        assert "orders" in line
        assert str(path.relative_to(made.data)) in line

        # Once the object is back, the next run archives it whole.
        path.write_bytes(BLOB)
        counts = await archive(made)
        assert await made.listed("orders", "failed") == set()
        assert (counts["dead_letters_archived"], counts["dead_letters_left"]) == (1, 0)
        assert archived_payloads(made) == {whole: b"payload", spoilt: BLOB}


async def test_a_dead_letter_whose_message_was_edited_since_the_snapshot_keeps_its_payload(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path) as made:
        client = made.client
        await client.create_queue("orders", max_attempts=1)
        await client.create_queue("copies", filter="true")
        (message_id,) = await made.publish("orders", 1, payload=BLOB)
        for queue, delay in (("orders", 0), ("copies", 600)):
            (message,) = await made.claim(queue, {message_id})
            await message.nack("boom", delay)
        before = made.objects

        # When an edit gives it another object, and another janitor removes the first one
        async with archiving(made) as run:
            (entry,) = [one async for one in client.list_entries("copies", "delayed")]
            await client.edit_message(entry.handle, payload=EDITED)
            for path in before & made.objects:
                (made.data / path).unlink()
            counts = counted(await asyncio.to_thread(run))

        # Then it is left to the next run, which finds the new one.
        assert counts == {"dead_letters_left": 1}
        assert await made.listed("orders", "failed") == {message_id}
        assert (await archive(made))["dead_letters_archived"] == 1
        assert archived_payloads(made) == {message_id: EDITED}
