"""What counts as left over, and what a repair removes of it, while an instance goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind as DatabaseKind
from libs.storage.database.slate import Batch
from libs.storage.layout.ids import message_id
from libs.storage.layout.keys import payload_key
from libs.storage.layout.own_keys import CLOCK_KEY
from libs.storage.records.payloads import encode_uri
from libs.storage.records.states import encode_clock
from services.janitor.orphans import ORPHAN_AGE_MS
from services.janitor.verify.findings import ALIKE_MAX, Findings, Kind
from services.janitor.verify.repairs import Repairs
from services.janitor.verify.verification import StoppedDatabases, Verification

PATH = f"blobs/00/{'0' * 62}"


async def write(root: Root, name: str, *rows: tuple[bytes, bytes]) -> None:
    database = await root.database(name, DatabaseKind(name.partition("/")[0]))
    batch = Batch()
    batch.put_all([(CLOCK_KEY, encode_clock(1)), *rows])
    await database.commit(batch)
    await database.close()


@pytest.fixture
async def root(tmp_path: Path) -> Root:
    """An instance with an object that no record names."""
    root = open_root(tmp_path.as_uri(), sync=False)
    for name in ("ingest/0", "broker/0"):
        await write(root, name)
    await root.objects.put(PATH, b"payload")
    return root


def leftovers(findings: Findings) -> list[str]:
    return [one.key for one in findings.all() if not one.is_fault]


def repairs_of(root: Root) -> Repairs:
    directory = TopologyDirectory(root.objects)
    return Repairs(root, directory, Channels(directory), dry_run=False)


async def test_how_old_an_object_is_counts_from_before_the_databases_were_read(root: Root) -> None:
    stored_ms = await root.objects.modified_ms(PATH)
    databases = await StoppedDatabases.find(root)
    # A run whose snapshots were begun within the day may last until long after it.
    for began_ms, found in (
        (stored_ms + ORPHAN_AGE_MS, []),
        (stored_ms + ORPHAN_AGE_MS + 1, [PATH]),
    ):
        findings = await Verification(root, databases, began_ms).run()
        assert leftovers(findings) == found


class GoesOn(StoppedDatabases):
    """An instance in which a push moves to its ingest after that was read."""

    @asynccontextmanager
    async def later_ingests(self) -> AsyncIterator[StoppedDatabases]:
        await write(self.root, "ingest/0", (payload_key(message_id(0, 9)), encode_uri(PATH)))
        yield StoppedDatabases(self.root, ["ingest/0"])


async def test_an_object_that_a_push_has_brought_to_an_ingest_meanwhile_is_not_left_over(
    root: Root,
) -> None:
    began_ms = await root.objects.modified_ms(PATH) + ORPHAN_AGE_MS + 1
    databases = GoesOn(root, ["ingest/0", "broker/0"])
    assert leftovers(await Verification(root, databases, began_ms).run()) == []


async def test_an_entry_whose_shard_has_no_database_even_now_is_removed_for_all_readers(
    root: Root, tmp_path: Path
) -> None:
    findings = Findings()
    for shard in (0, 9):  # 0 has come since the snapshots were taken
        path = f"topology/broker-{shard}.json"
        peer = {"service": "broker", "shard": shard, "address": "127.0.0.1:1"}
        await root.objects.put(path, json.dumps(peer).encode())
        os.utime(tmp_path / path, (time.time() - 2 * 3600,) * 2)
        findings.add(Kind.LEFTOVER, "topology", "entry", path, "there is no database")

    # Another process, which reads the entries again only after a noted change.
    reader = TopologyDirectory(root.objects)
    await TopologyDirectory(root.objects).announce(Peer("router", 0, "127.0.0.1:1"))
    assert len((await reader.read()).peers) == 3

    repairs = repairs_of(root)
    await repairs.repair(findings)

    assert (await reader.read(max_age_ms=0)).brokers.keys() == {0}
    assert repairs.counts == {"topology_entries_removed": 1}


async def test_a_repair_removes_all_objects_that_are_left_over_not_only_those_that_are_named(
    root: Root,
) -> None:
    count = 2 * ALIKE_MAX
    for number in range(1, count):
        await root.objects.put(f"blobs/00/{number:062x}", b"payload")
    began_ms = await root.objects.modified_ms(f"blobs/00/{count - 1:062x}") + ORPHAN_AGE_MS + 1

    databases = await StoppedDatabases.find(root)
    findings = await Verification(root, databases, began_ms).run()
    assert findings.leftovers_count == count
    assert len(leftovers(findings)) == ALIKE_MAX + 1

    repairs = repairs_of(root)
    await repairs.repair(findings)
    assert repairs.counts == {"objects_removed": count}
    assert await root.objects.list("blobs") == []
