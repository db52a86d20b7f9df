"""Verification of a store that was worked on and then damaged in one place, record by record."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind as DatabaseKind
from libs.storage.database.slate import Batch, Database
from libs.storage.layout.ids import decode_seq_block, message_id
from libs.storage.layout.keys import RecordType, key_head, log_range, queue_state_range
from libs.storage.layout.own_keys import (
    CLOCK_KEY,
    CONFIG_REVISION_KEY,
    FORGOTTEN_REVISION_KEY,
    ID_BLOCK_KEY,
    archived_key,
    outbox_key,
    redrive_key,
    routing_cursor_key,
)
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.archived_records import ArchivedMessage, encode_archived
from libs.storage.records.execution_records import OutboxRecord, encode_outbox
from libs.storage.records.payload_packs import pack_range
from libs.storage.records.redrive_records import RedriveRecord, RedriveState, encode_redrive
from libs.storage.records.states import (
    ArchivedRecord,
    decode_queue_state,
    encode_config_revision,
    encode_forgotten_revision,
    encode_queue_state,
    encode_routing_cursor,
)
from services.janitor.giving_up.command import give_up
from services.janitor.verify.command import verify_stopped
from services.janitor.verify.findings import ALIKE_MAX, Finding, Kind
from slatemq.errors import FailedPrecondition
from tests.faults.rot import copy_of, fill


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of an instance whose processes were killed."""
    folder = tmp_path_factory.mktemp("lived")
    asyncio.run(fill(folder))
    return folder


@pytest.fixture
def root(lived: Path) -> Root:
    return open_root(copy_of(lived).as_uri(), sync=False)


async def change(root: Root, name: str, make: Callable[[Database], Any]) -> None:
    """Write what `make` returns into a database: rows, None deletes one."""
    database = await root.database(name, DatabaseKind(name.partition("/")[0]))
    batch = Batch()
    batch.put_all(await make(database))
    await database.commit(batch)
    await database.close()


async def rows_of(database: Database, span: KeyRange) -> list[tuple[bytes, bytes]]:
    return [row async for rows in database.scan(*span) for row in rows]


async def found(root: Root) -> list[Finding]:
    return (await verify_stopped(root)).all()


def of(kind: RecordType) -> KeyRange:
    return KeyRange(key_head(kind), key_head(kind) + b"\xff")


async def test_what_needs_a_lost_shard_without_an_entry_is_said_to_become_dead_letters(
    root: Root,
) -> None:
    folder = root.address.folder
    assert folder is not None
    shutil.rmtree(folder / "ingest" / "0")
    (folder / "topology" / "ingest-0.json").unlink(missing_ok=True)

    faults = await found(root)

    needed = [one for one in faults if one.kind is Kind.MESSAGE]
    assert {one.queue_id for one in needed} >= {"orders-0", "orders-1"}
    assert all("becomes a dead letter when it is claimed" in one.what_to_do for one in needed)
    (cursor,) = [one for one in faults if one.record == "routing cursor"]
    assert "To do without it, give the shard up" in cursor.what_to_do


async def test_of_a_shard_that_was_given_up_only_the_messages_are_missing(root: Root) -> None:
    await give_up(root, "ingest/0")

    faults = await found(root)

    assert {one.kind for one in faults} == {Kind.MESSAGE}
    assert all("becomes a dead letter when it is claimed" in one.what_to_do for one in faults)


async def test_an_instance_that_was_killed_has_no_faults_and_stays_as_it_is(root: Root) -> None:
    folder = root.address.folder
    assert folder is not None
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    findings = await verify_stopped(root)

    assert findings.all() == []
    assert findings.counts["databases"] == 2
    assert findings.counts["messages"] == 2 * (60 + 40 + 3 + 5)
    assert findings.counts["payload objects"] == 2 * 3
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


async def test_counts_that_differ_from_their_buckets_are_found(root: Root) -> None:
    async def wrong_counts(database: Database) -> list[Any]:
        rows = await rows_of(database, queue_state_range())
        (key, value) = next(row for row in rows if b"orders-1" in row[0])
        state = decode_queue_state(value)
        (lane,) = state.lanes
        lane = lane._replace(waiting_count=lane.waiting_count + 1)
        state = state._replace(
            lanes=(lane,),
            in_flight_count=state.in_flight_count + 2,
            done_count=state.done_count + 3,
            failed_count=state.failed_count - 1,
        )
        return [(key, encode_queue_state(state))]

    await change(root, "broker/0", wrong_counts)

    faults = await found(root)
    assert {one.kind for one in faults} == {Kind.COUNT}
    assert {one.queue_id for one in faults} == {"orders-1"}
    words = " ".join(one.wrong for one in faults)
    for part in ("ready", "in flight", "done", "failed"):
        assert part in words
    assert len(faults) == 4


@pytest.mark.parametrize("kind", [RecordType.ACTIVE, RecordType.DONE, RecordType.FAILED])
async def test_a_bucket_that_is_gone_is_found_by_its_queue(root: Root, kind: RecordType) -> None:
    async def lose_one(database: Database) -> list[Any]:
        rows = [row for row in await rows_of(database, of(kind)) if b"orders-0" in row[0]]
        return [(max(rows, key=lambda row: len(row[1]))[0], None)]

    await change(root, "broker/0", lose_one)

    (fault,) = await found(root)
    assert (fault.kind, fault.shard, fault.queue_id) == (Kind.COUNT, "broker/0", "orders-0")


async def test_archived_messages_without_an_archive_are_found_by_their_queue(root: Root) -> None:
    archived = ArchivedMessage(1, 1000, 2000, 3, 128, 0, "a-run")

    async def archive_one(database: Database) -> list[Any]:
        rows = await rows_of(database, queue_state_range())
        (key, value) = next(row for row in rows if b"orders-0" in row[0])
        state = decode_queue_state(value)
        order = state.last_order
        changed = state._replace(archived=ArchivedRecord(1, order))
        return [
            (key, encode_queue_state(changed)),
            (archived_key("orders-0", order), encode_archived([archived])),
        ]

    await change(root, "broker/0", archive_one)

    (fault,) = await found(root)
    assert (fault.kind, fault.queue_id, fault.message_ids) == (Kind.OBJECT, "orders-0", (1,))
    assert "archive/dead-letters/queue=orders-0/day=1970-01-01 has no content" in fault.wrong


async def test_redrives_and_forgotten_changes_beyond_their_ends_are_found(root: Root) -> None:
    async def go_on_beyond(database: Database) -> list[Any]:
        rows = await rows_of(database, queue_state_range())
        state = decode_queue_state(next(value for key, value in rows if b"orders-0" in key))
        last = state.last_order

        def running(next_order: int, end_order: int, revision: int) -> bytes:
            counts = (0, 1000, 0, 5, 0, 0)
            return encode_redrive(
                RedriveRecord(
                    *(revision, RedriveState.RUNNING, *counts, next_order, 0, end_order),
                    queue_id="orders-0",
                    target_queue_id="orders-0",
                )
            )

        revision = state.created_revision
        return [
            (redrive_key(100), running(1, last, revision)),
            (redrive_key(101), running(last + 1, last, revision)),
            (redrive_key(102), running(last + 2, last, revision)),
            (redrive_key(103), running(1, last + 1, revision)),
            (redrive_key(104), running(1, last + 1, revision + 1)),  # of a queue that was deleted
            (FORGOTTEN_REVISION_KEY, encode_forgotten_revision(1 << 40)),
        ]

    await change(root, "broker/0", go_on_beyond)

    faults = await found(root)
    assert {one.kind for one in faults} == {Kind.ORDER}
    assert [one.record for one in faults].count("redrive") == 2
    assert sum("were forgotten" in one.wrong for one in faults) == 1
    assert len(faults) == 3


async def test_a_row_that_no_codec_reads_is_named_and_the_rest_is_read(root: Root) -> None:
    async def damage(database: Database) -> list[Any]:
        rows = await rows_of(database, of(RecordType.FAILED))
        (key, value) = next(row for row in rows if b"orders-0" in row[0] and len(row[1]) > 20)
        return [
            (key, value[:-1]),
            (b"\x01\x7fx", b"unknown type"),
            (b"\x02\x02x", b"unknown version"),
            (key_head(RecordType.PAYLOAD) + bytes(8), b"of an ingest"),
        ]

    await change(root, "broker/0", damage)

    findings = await verify_stopped(root)
    faults = findings.all()
    assert {one.kind for one in faults} == {Kind.ROW}
    assert sorted(one.record for one in faults) == ["failed messages", "payload", "row", "row"]
    assert any("queue orders-0" in one.key for one in faults)
    assert findings.counts["rows/queue state"] == 4


async def test_a_message_without_its_payload_is_found_in_the_log(root: Root) -> None:
    async def lose_pack(database: Database) -> list[Any]:
        return [((await rows_of(database, pack_range()))[0][0], None)]

    await change(root, "ingest/0", lose_pack)

    (fault,) = await found(root)
    assert (fault.kind, fault.shard, fault.record) == (Kind.PAYLOAD, "ingest/0", "log entry")
    assert "the payloads of" in fault.wrong
    assert fault.message_ids


async def test_a_log_entry_that_is_gone_is_found_by_log_and_queues(root: Root) -> None:
    async def lose_entry(database: Database) -> list[Any]:
        rows = await rows_of(database, log_range(0))
        return [(max(rows, key=lambda row: len(row[1]))[0], None)]

    await change(root, "ingest/0", lose_entry)

    found_kinds = {(one.kind, one.shard, one.record) for one in await found(root)}
    assert (Kind.MESSAGE, "ingest/0", "log entry") in found_kinds
    assert (Kind.MESSAGE, "broker/0", "active messages") in found_kinds
    assert (Kind.MESSAGE, "ingest/0", "payload pack") in found_kinds or (
        Kind.MESSAGE,
        "ingest/0",
        "payload",
    ) in found_kinds


async def test_single_records_that_lag_behind_what_is_used_are_found(root: Root) -> None:
    async def lose_block(_: Database) -> list[Any]:
        return [(ID_BLOCK_KEY, None), (CLOCK_KEY, None)]

    async def wrong_places(_: Database) -> list[Any]:
        return [
            (routing_cursor_key(0), encode_routing_cursor(1 << 40)),
            (routing_cursor_key(7), encode_routing_cursor(1)),
            (CONFIG_REVISION_KEY, encode_config_revision(1)),
            (outbox_key(0, 1), encode_outbox(OutboxRecord(0, "q", b"", 0, {}))),
        ]

    await change(root, "ingest/0", lose_block)
    await change(root, "broker/0", wrong_places)

    records = {(one.shard, one.record) for one in await found(root) if one.is_fault}
    assert records == {
        ("ingest/0", "ID block"),
        ("ingest/0", "clock"),
        ("broker/0", "routing cursor"),
        ("broker/0", "queue state"),
        ("broker/0", "outbox row"),
    }


@pytest.mark.parametrize(
    ("beyond_block", "advice"),
    [(-1, "no new one gets their IDs"), (0, "Do not publish before")],
)
async def test_new_messages_get_used_ids_only_where_the_block_of_ids_was_lost_too(
    root: Root, beyond_block: int, advice: str
) -> None:
    reader = await root.open_latest("ingest/0")
    stored = await reader.get(ID_BLOCK_KEY)
    await reader.close()
    assert stored is not None
    cursor_id = message_id(0, decode_seq_block(stored).end + beyond_block)

    async def go_on_beyond(_: Database) -> list[Any]:
        return [(routing_cursor_key(0), encode_routing_cursor(cursor_id))]

    await change(root, "broker/0", go_on_beyond)

    (cursor,) = await found(root)
    assert cursor.record == "routing cursor"
    assert advice in cursor.what_to_do


async def test_single_records_that_are_gone_are_found(root: Root) -> None:
    async def lose(_: Database) -> list[Any]:
        return [(CONFIG_REVISION_KEY, None), (routing_cursor_key(0), None)]

    await change(root, "broker/0", lose)

    faults = [one for one in await found(root) if one.is_fault]
    assert {(one.shard, one.record) for one in faults} == {
        ("broker/0", "queue state"),
        ("broker/0", "routing cursor"),
    }
    (cursor,) = [one for one in faults if one.record == "routing cursor"]
    assert "before its process starts" in cursor.what_to_do


async def test_objects_beside_the_databases_are_verified_too(root: Root) -> None:
    folder = root.address.folder
    assert folder is not None
    names = sorted(path for path in folder.glob("queue-names/*/*") if path.is_file())
    names[0].write_text("{")
    names[1].unlink()
    (folder / "topology" / "broker-0.json").unlink()
    for path in folder.glob("instance/*"):
        path.write_text("no JSON")
    orphan = folder / "blobs" / "00" / ("0" * 62)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"nothing names it")
    os.utime(orphan, (1, 1))

    findings = await found(root)
    faults = {(one.shard, one.record) for one in findings if one.is_fault}
    assert faults == {
        ("queue-names", "queue name"),
        ("broker/0", "queue name"),
        ("instance", "settings"),
    }
    leftovers = {(one.shard, one.record) for one in findings if not one.is_fault}
    assert leftovers == {("blobs", "payload object")}


@pytest.mark.parametrize(
    ("path", "damage", "advice"),
    [
        ("topology/ingest-0.json", b"\xf3", "restart the shard's process"),
        ("topology/ingest-0.json", b'{"service": "broker", "shard": 0}', "restart the shard's"),
        (f"shard-owners/ingest/0/{1:020}.json", b"\xf3", "the next claim replaces it"),
        (f"queue-names/{'0' * 64}/{1:020}.json", b"\xf3", "calls that need to know where"),
        ("queue-names/README", b"\xf3", "SlateMQ did not write it"),
        (f"instance/{2:020}.json", b"\xf3", "no process starts without it"),
    ],
)
async def test_what_to_do_about_a_damaged_object_is_said_of_what_it_is(
    root: Root, path: str, damage: bytes, advice: str
) -> None:
    await root.objects.put(path, damage)

    (finding,) = await found(root)

    assert path in str(finding)
    assert str(finding).count(path) == 1
    assert advice in finding.what_to_do


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ('"replay_window_s"', '"seplay_window_s"', "seplay_window_s"),
        ('"retention_s": ', '"retention_s": -', "retention_s must be at least 0"),
    ],
)
async def test_an_instance_record_with_which_no_process_starts_is_a_fault(
    root: Root, before: str, after: str, named: str
) -> None:
    path = f"instance/{1:020}.json"
    stored = (await root.objects.get(path)).decode()
    await root.objects.put(path, stored.replace(before, after).encode())

    (fault,) = await found(root)

    assert (fault.kind, fault.shard) == (Kind.OBJECT, "instance")
    assert path in fault.wrong
    assert named in fault.wrong


@pytest.mark.parametrize("damage", ["flip", "delete"])
async def test_a_payload_object_that_has_rotted_is_named_with_its_message(
    root: Root, damage: str
) -> None:
    folder = root.address.folder
    assert folder is not None
    path = next(path for path in sorted(folder.glob("blobs/*/*")))
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\0")

    (fault,) = await found(root)
    assert (fault.kind, fault.record) == (Kind.OBJECT, "payload")
    assert str(path.relative_to(folder)) in fault.wrong
    assert len(fault.message_ids) == 1
    without_reading = (await verify_stopped(root, sizes_only=True)).faults_count
    assert without_reading == (1 if damage == "delete" else 0)


async def test_findings_that_are_alike_are_counted_beyond_some(root: Root) -> None:
    async def many(_: Database) -> list[Any]:
        return [(b"\x01\x7f%03d" % number, b"") for number in range(ALIKE_MAX + 5)]

    await change(root, "ingest/0", many)

    findings = await verify_stopped(root)
    assert findings.faults_count == ALIKE_MAX + 5
    assert len(findings.all()) == ALIKE_MAX + 1
    assert "5 more" in findings.all()[0].wrong


async def test_a_database_that_is_in_use_is_refused(root: Root) -> None:
    database = await root.database("ingest/0", DatabaseKind.INGEST)
    real = root.objects.list
    written = False

    async def writing(prefix: str, matching: re.Pattern[str] | None = None) -> list[str]:
        nonlocal written
        listed = await real(prefix, matching)
        if prefix == "ingest/0/wal" and not written:
            written = True
            batch = Batch()
            batch.put(b"\x01\x7f", b"")
            await database.commit(batch)
        return listed

    root.objects.list = writing  # type: ignore[method-assign]
    with pytest.raises(FailedPrecondition, match="ingest/0 changed meanwhile"):
        await verify_stopped(root)
    await database.close()


def test_the_command_prints_what_is_wrong_and_what_to_do(root: Root) -> None:
    folder = root.address.folder
    assert folder is not None
    command = [sys.executable, "-m", "services.janitor", "verify", "--root", root.url]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("0 faults, 0 leftovers; read 2 databases")
    assert "looking at the instance (0 of 2 databases done)" in ran.stderr

    next(folder.glob("blobs/*/*")).unlink()
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    (finding,) = json.loads(ran.stdout)["findings"]
    assert finding["shard"] == "ingest/0"
    assert "is gone" in finding["wrong"]
    assert "restore this object" in finding["what_to_do"]
    assert ran.stderr == ""


def test_a_root_without_databases_or_of_a_wrong_form_is_a_wrong_call(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.janitor", "verify", "--root"]
    ran = subprocess.run([*command, "ftp://x"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "unknown scheme" in ran.stderr

    for url, code, why in (
        (f"{tmp_path.as_uri()}/typo", 2, "there is no folder"),
        (tmp_path.as_uri(), 1, "has no databases"),
    ):
        ran = subprocess.run([*command, url], capture_output=True, text=True, check=False)
        assert (ran.returncode, why in ran.stderr) == (code, True)
    assert list(tmp_path.iterdir()) == []
