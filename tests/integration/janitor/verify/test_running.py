"""`slatemq verify` and `slatemq repair` against a running instance, through its janitor."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import UNCLAIMED, QueueNames
from slatemq.errors import Unavailable
from tests.integration.cli import ready_command
from tests.integration.janitor.instances import Instance, instance
from tests.integration.janitor.runs.janitors import WAIT_S, Janitor, janitor

OBJECT_BYTES = 70_000


async def cli(there: Janitor, *words: str) -> tuple[int | None, str, str]:
    ended = await asyncio.to_thread(ready_command.run, words, there.environ, b"", WAIT_S)
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


async def verified(there: Janitor, *words: str) -> dict[str, Any]:
    code, out, err = await cli(there, *words, "--json")
    run: dict[str, Any] = json.loads(out)
    assert run["state"] == "done", err
    assert code == (1 if run["counts"]["faults"] else 0)
    return run


async def dead_letters(made: Instance) -> list[tuple[int, str]]:
    listed = made.client.list_entries("orders", "failed")
    return [(one.message_id, one.reason) async for one in listed]


def age(path: Path) -> None:
    os.utime(path, (time.time() - 2 * 24 * 3600,) * 2)


async def leave_over(made: Instance) -> Path:
    """What crashes leave: an object, and claims of names; of broker 9, which is not there, too."""
    orphan = made.data / "blobs" / "00" / ("0" * 62)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"an upload that was never committed")
    names = QueueNames(open_root(made.url).objects)
    for queue_id, shard in (("never-created", 0), ("of-broker-9", 9)):
        assert await names.claim(queue_id, (shard,), UNCLAIMED)
    for path in (orphan, *made.data.glob("queue-names/*/*")):
        age(path)
    return orphan


async def test_a_running_instance_is_verified_and_what_is_left_over_is_repaired(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path) as made:
        await made.client.create_queue("orders", filter="true")
        small = await made.publish("orders", 50)
        large = await made.publish("orders", 2, payload=os.urandom(OBJECT_BYTES))
        await made.routed()
    # Started again, so that no payload is in memory.
    async with instance(tmp_path) as made, janitor(tmp_path, own_jobs=False) as there:
        run = await verified(there, "verify")
        assert (run["counts"]["faults"], run["counts"]["leftovers"]) == (0, 0)
        assert run["counts"]["messages"] == 52
        assert run["counts"]["entries"] == 52
        assert run["counts"]["payload_objects"] == 2
        code, out, _ = await cli(there, "verify", "--sizes-only")
        assert (code, out.splitlines()[-1][:22]) == (0, "0 faults, 0 leftovers;")

        # A payload rots: it is named with its message, and never delivered.
        path = made.data / sorted(made.objects)[0]
        path.write_bytes(b"\0" + path.read_bytes()[1:])
        (fault,) = (await verified(there, "verify"))["findings"]
        assert (fault["kind"], fault["shard"], fault["is_fault"]) == ("object", "ingest/0", True)
        assert str(path.relative_to(made.data)) in fault["wrong"]
        (rotten,) = fault["message_ids"]
        assert int(rotten) in large
        claimed = await made.claim("orders", (small | large) - {int(rotten)})
        for message in claimed:
            await message.ack()
        async with asyncio.timeout(WAIT_S):
            while not (failed := await dead_letters(made)):
                with suppress(Unavailable):  # Its ingest has not read the payload yet.
                    assert await made.client.claim("orders", 10, wait=1) == []
        assert failed == [(int(rotten), "payload damaged")]
        assert await made.client.claim("orders", 10) == []

        # While a shard's database is lost, nothing is removed: the shard may need it.
        orphan = await leave_over(made)
        entry = made.data / "topology" / "broker-9.json"
        entry.write_text(json.dumps({"service": "broker", "shard": 9, "address": "127.0.0.1:1"}))
        age(entry)
        kept = await verified(there, "repair")
        assert (kept["counts"]["leftovers"], kept["counts"]["shards_unread"]) == (0, 1)
        assert ("file", "broker/9") in {(one["kind"], one["shard"]) for one in kept["findings"]}
        assert orphan.exists()
        assert entry.exists()
        code, _, err = await cli(there, "repair")
        assert (code, "removes nothing while 1 of the shards" in err) == (1, True)

        # Once it is given up, what is left over is named, then repaired, and nothing else goes.
        entry.unlink()
        dry = await verified(there, "repair", "--dry-run")
        assert dry["counts"]["leftovers"] == 3
        assert all(one["repaired"] for one in dry["findings"] if not one["is_fault"])
        assert orphan.exists()
        repaired = await verified(there, "repair")
        assert repaired["counts"]["objects_removed"] == 1
        assert repaired["counts"]["names_freed"] == 2
        assert not orphan.exists()
        assert path.exists()
        assert (await verified(there, "verify"))["counts"]["leftovers"] == 0
        for queue_id in ("never-created", "of-broker-9"):
            await made.client.create_queue(queue_id, filter="true")


async def test_publishes_that_were_stored_already_leave_nothing_that_looks_lost(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path) as made:
        await made.client.create_queue("orders", filter="true")
        for n in range(3):
            first = await made.client.publish("stored", dedupe_key=f"key {n}")
            again = await made.client.publish("stored", dedupe_key=f"key {n}")
            assert (again, again.duplicate) == (first, True)
        await made.routed()
        async with janitor(tmp_path, own_jobs=False) as there:
            run = await verified(there, "verify")
    assert (run["counts"]["messages"], run["findings"]) == (3, [])


async def test_verify_takes_no_fields_of_other_jobs(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there:
        code, _, err = await cli(there, "janitor", "run", "verify", "--queue", "orders")
        assert code == 1
        assert "queue_ids" in err
        code, _, err = await cli(there, "janitor", "run", "verify", "--days", "3")
        assert (code, "days" in err) == (1, True)
