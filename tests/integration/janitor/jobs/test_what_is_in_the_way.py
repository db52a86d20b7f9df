"""What jobs read beside the tables: where brokers stand, what names objects, which shards exist."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import DamagedObject, ObjectNotFound, StoreUnavailable
from libs.storage.layout.ids import message_id
from libs.storage.layout.keys import log_key, payload_key
from libs.storage.layout.own_keys import (
    LOG_BOUNDS_KEY,
    outbox_key,
    refused_push_key,
    replay_key,
    routing_cursor_key,
    task_key,
)
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.task_folders import body_name
from libs.storage.records.execution_records import (
    RefusedPushRecord,
    encode_outbox,
    encode_refused_push,
)
from libs.storage.records.log_bounds import LogBoundsRecord, encode_log_bounds
from libs.storage.records.metadata import MessageMetadata, encode_log_entry
from libs.storage.records.payloads import PayloadUri, encode_inline, encode_uri
from libs.storage.records.replay_records import ReplayRange, encode_replay
from libs.storage.records.states import encode_routing_cursor
from libs.storage.records.task_records import (
    AppliedTask,
    FailedTaskRecord,
    TaskRecord,
    WaitingTask,
    encode_task_record,
)
from services.broker.core.lists.replays import Replays
from services.janitor.jobs import contents as contents_module
from services.janitor.jobs.batches import grouped
from services.janitor.jobs.contents import Contents, Unreadable
from services.janitor.jobs.dead_letter_jobs import DeadLetterArchive
from services.janitor.jobs.leftovers import _PushUris
from services.janitor.jobs.owners import owners_of
from services.janitor.jobs.removable import judged_positions
from services.janitor.jobs.standing import read_judged, read_last_ids
from services.janitor.jobs.task_bodies import unneeded_bodies
from services.janitor.orphans import store_time_ms
from services.janitor.snapshots import SnapshotName, refuse_unknown_shards
from slatemq._admin.task_ids import TaskIds, parse_task_id
from slatemq.errors import Unavailable
from tests.unit.storage.records.golden_execution import LARGE_PUSH, PUSH

Rows = Sequence[tuple[bytes, bytes]]


async def snapshot(root: Root, name: str, rows: Rows) -> SnapshotName:
    """A snapshot of a database with these rows."""
    kind = Kind.INGEST if name.startswith("ingest") else Kind.BROKER
    database = await root.database(name, kind)
    batch = Batch()
    for key, value in rows:
        batch.put(key, value)
    await database.commit(batch)
    taken = SnapshotName(name, await root.snapshots(database).take(600_000))
    await database.close()
    return taken


async def test_logs_are_judged_up_to_the_broker_that_is_farthest_behind(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri(), sync=False)
    cursor = routing_cursor_key
    names = [
        await snapshot(root, "ingest/0", [(payload_key(1), encode_inline(b""))]),
        await snapshot(root, "ingest/1", [(payload_key(1), encode_inline(b""))]),
        await snapshot(root, "ingest/2", [(payload_key(1), encode_inline(b""))]),
        await snapshot(
            root,
            "broker/0",
            [
                (cursor(0), encode_routing_cursor(100)),
                (cursor(1), encode_routing_cursor(90)),
                (cursor(2), encode_routing_cursor(70)),
                (replay_key("old"), encode_replay([ReplayRange(1, 5, 40, 80)])),
                (replay_key("done"), encode_replay([ReplayRange(0, 5, 9, 9)])),
            ],
        ),
        await snapshot(
            root,
            "broker/1",
            [(cursor(0), encode_routing_cursor(60)), (cursor(1), encode_routing_cursor(95))],
        ),
    ]

    # 1 is replayed from 40 on; of 2 the second broker knows nothing.
    assert await read_judged(root, names) == {0: 60, 1: 40, 2: 0}


async def test_what_waits_for_a_queue_in_quarantine_is_not_judged_yet(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri(), sync=False)
    replays = Replays()
    replays.open("slow", {0: 40, 1: 90})
    names = [
        await snapshot(root, "ingest/0", [(payload_key(1), encode_inline(b""))]),
        await snapshot(root, "ingest/1", [(payload_key(1), encode_inline(b""))]),
        await snapshot(
            root,
            "broker/0",
            [
                (routing_cursor_key(0), encode_routing_cursor(100)),
                (routing_cursor_key(1), encode_routing_cursor(95)),
                *[(key, value) for key, value in replays.drain() if value is not None],
            ],
        ),
    ]

    assert await read_judged(root, names) == {0: 40, 1: 90}


async def test_a_dead_letter_whose_message_came_after_the_snapshot_of_its_ingest_is_not_archived(
    tmp_path: Path,
) -> None:
    root = open_root(tmp_path.as_uri(), sync=False)

    def entry(*ids: int) -> tuple[bytes, bytes]:
        messages = [MessageMetadata(one, 1, 1, 0, 0, {}) for one in ids]
        return log_key(ids[0]), encode_log_entry(messages)

    second = message_id(1, 1)
    names = [
        await snapshot(root, "ingest/0", [entry(3, 4), entry(8, 9)]),
        await snapshot(
            root,
            "ingest/1",
            [
                entry(second + 5, second + 6),
                (LOG_BOUNDS_KEY, encode_log_bounds(LogBoundsRecord(1, second + 9, second + 12))),
            ],
        ),
        await snapshot(root, "ingest/2", [(payload_key(1), encode_inline(b""))]),
        await snapshot(root, "broker/0", [(routing_cursor_key(0), encode_routing_cursor(9))]),
    ]

    last_ids = await read_last_ids(root, names)

    assert last_ids == {0: 9, 1: second + 12, 2: 0}
    archive = DeadLetterArchive(root.url, tuple(names[:3]), last_ids, frozenset({8}), "run")
    # Of 5 to 9 some are gone: that is known. What is behind the end may have all its content. Of an
    # ingest that is new nothing is known, and of one that was given up nothing will be.
    given_up = message_id(8, 1)
    ids = [5, 9, 10, second + 12, second + 13, message_id(2, 1), message_id(7, 1), given_up]
    known = archive.can_be_known(pa.table({"message_id": ids}))
    assert known["message_id"].to_pylist() == [5, 9, second + 12, given_up]


def test_without_a_broker_nothing_is_judged() -> None:
    assert judged_positions([0], [], []) == {0: 0}


async def test_objects_are_named_by_outboxes_and_by_refused_pushes_whatever_is_in_them(
    tmp_path: Path,
) -> None:
    root = open_root(tmp_path.as_uri(), sync=False)
    blobs = Blobs(root)
    uris = [await blobs.put(b"large") for _ in range(3)]
    rows = [encode_outbox(LARGE_PUSH._replace(payload=PayloadUri(uri))) for uri in uris]
    damaged = RefusedPushRecord(1, "big", b"\xff" + rows[2][1:-1] + rows[2][-1:])
    name = await snapshot(
        root,
        "broker/0",
        [
            (outbox_key(0, 7), rows[0]),
            (outbox_key(3, 1), encode_outbox(PUSH)),
            (refused_push_key(0, 1), encode_refused_push(RefusedPushRecord(1, "big", rows[1]))),
            (refused_push_key(9, 9), encode_refused_push(damaged)),
        ],
    )
    batch = pa.RecordBatch.from_pydict(
        {"database": [name.database], "snapshot_id": [name.snapshot_id]}
    )

    found = await asyncio.to_thread(lambda: list(_PushUris(root.url)(iter([batch]))))

    assert sorted(uri for one in found for uri in one["uri"].to_pylist()) == sorted(uris)


async def test_payloads_are_read_in_order_wherever_they_are(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri(), sync=False)
    blobs = Blobs(root)
    there, gone, rotten = [await blobs.put(one) for one in (b"large", b"gone", b"rotten")]
    await blobs.delete(gone)
    (tmp_path / rotten).write_bytes(b"Rotten")
    name = await snapshot(
        root,
        "ingest/0",
        [
            (payload_key(1), encode_inline(b"one")),
            (payload_key(2), encode_uri(there)),
            (payload_key(3), encode_uri(gone)),
            (payload_key(5), encode_uri(rotten)),
        ],
    )

    def read() -> tuple[list[bytes | Unreadable | None], list[str]]:
        with owners_of(root.url) as owners:
            contents = Contents(owners, [name])
            sizes = [(4, 0), (2, 20 << 20), (3, 20 << 20), (1, 3), (5, 6), (1 << 48, 0)]
            found = [payload for some in contents.payloads(sizes) for payload in some]
            uris = contents.uris([1, 2, 3, 4])
            contents.close()
            return found, uris

    payloads, uris = await asyncio.to_thread(read)
    assert payloads[:2] + payloads[3:4] + payloads[5:] == [None, b"large", b"one", None]
    # Of an object that cannot be read the reason comes instead.
    assert isinstance(payloads[2], ObjectNotFound)
    assert isinstance(payloads[4], DamagedObject)
    assert uris == [there, gone]


async def test_a_payload_of_which_nothing_comes_is_that_of_a_store_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = open_root(tmp_path.as_uri(), sync=False)
    uri = await Blobs(root).put(b"large")
    name = await snapshot(root, "ingest/0", [(payload_key(1), encode_uri(uri))])

    def read() -> None:
        with owners_of(root.url) as owners:
            contents = Contents(owners, [name])
            try:
                list(contents.payloads([(1, 5)]))
            finally:
                contents.close()

    monkeypatch.setattr(contents_module, "SILENCE_S", 0.0)
    with pytest.raises(StoreUnavailable, match=f"reading {uri}: nothing came for 0 s"):
        await asyncio.to_thread(read)


async def test_a_database_without_an_owner_in_the_topology_ends_the_job(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri(), sync=False)
    rows = [(payload_key(1), encode_inline(b""))]
    known = ["ingest/0", "broker/0"]
    for name in known:
        await snapshot(root, name, rows)
    await refuse_unknown_shards(root.objects, known)
    await snapshot(root, "broker/7", rows)

    with pytest.raises(Unavailable, match="broker/7 has a database but is not in the topology"):
        await refuse_unknown_shards(root.objects, known)


async def test_the_store_is_asked_what_time_it_is_and_nothing_is_left_there(
    tmp_path: Path,
) -> None:
    objects = open_root(tmp_path.as_uri(), sync=False).objects
    await objects.put("mark", b"")
    for left, age_s in (("old", 4000), ("young", 10)):  # by janitors that were killed
        await objects.put(f"janitor/probe/{left}", b"")
        os.utime(tmp_path / "janitor/probe" / left, (time.time() - age_s,) * 2)

    now_ms = await store_time_ms(objects)

    assert abs(now_ms - await objects.modified_ms("mark")) < 60_000
    assert await objects.list("janitor") == ["janitor/probe/young"]


DAY_S = 24 * 3600
WAITING, FAILED = WaitingTask(1, has_failed=False), FailedTaskRecord(1, 1, "no room")
APPLIED, RETRIED = AppliedTask(1, 1, 1, 1), AppliedTask(1, 1, 1, 1, has_failed=True)


@pytest.mark.parametrize(
    ("record", "age_s", "is_unneeded"),
    [
        (WAITING, 30 * DAY_S, False),
        (FAILED, 30 * DAY_S, False),
        (APPLIED, 2 * DAY_S, True),
        (RETRIED, 2 * DAY_S, True),
        (APPLIED, DAY_S / 2, False),
        (None, 8 * DAY_S, True),
        (None, 6 * DAY_S, False),
    ],
)
async def test_bodies_of_tasks_are_unneeded_once_applied_or_after_a_week_without_an_answer(
    tmp_path: Path, record: TaskRecord | None, age_s: float, is_unneeded: bool
) -> None:
    # Given a body in the folder of any backend, and its record beside that of another task
    root = open_root(tmp_path.as_uri())
    ids = TaskIds(0)
    other, task_id = ids.make(1_771_761_600_000), ids.make(1_771_761_600_000)
    records = {other: APPLIED} | ({task_id: record} if record else {})
    name = await snapshot(
        root,
        "ingest/0",
        [(task_key(parse_task_id(one).ulid), encode_task_record(r)) for one, r in records.items()],
    )
    body, strange = (
        f"tasks/ingest-0/redis-1/{name}" for name in (body_name(task_id, b"body"), "strange")
    )
    of_other = body_name(TaskIds(1).make(1_771_761_600_000), b"body")
    elsewhere = f"tasks/ingest-1/redis-1/{of_other}"
    for path in (body, strange, elsewhere):
        await root.objects.put(path, b"body")
        os.utime(tmp_path / path, (time.time() - age_s,) * 2)

    # When the janitor looks at the bodies of that shard, then it takes what no task needs
    found = await unneeded_bodies(root, [name], await store_time_ms(root.objects))
    assert [one.path for one in found] == ([body] if is_unneeded else [])
    await root.objects.delete_all([body.path for body in found])
    left = {strange, elsewhere} | (set() if is_unneeded else {body})
    assert set(await root.objects.list("tasks")) == left


async def test_bodies_of_an_ingest_that_was_given_up_go_after_a_week(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    await RemovedShards(root.objects).add("ingest/3", 1, is_given_up=True)
    task_ids = TaskIds(3)
    old, young = (f"{task_ids.make(1_771_761_600_000 + n)}" for n in range(2))
    paths = [f"tasks/ingest-3/redis-1/{body_name(one, b'body')}" for one in (old, young)]
    paths += ["tasks/ingest-3/redis-1/strange", f"tasks/ingest-4/redis-1/{body_name(old, b'body')}"]
    for path, age_days in zip(paths, (8, 6, 8, 8), strict=True):
        await root.objects.put(path, b"body")
        os.utime(tmp_path / path, (time.time() - age_days * DAY_S,) * 2)

    found = await unneeded_bodies(root, [], await store_time_ms(root.objects))

    assert [one.path for one in found] == paths[:1]


def test_neighbours_with_equal_keys_go_together_and_no_more_than_fit() -> None:
    keys = ["a"] * 3 + ["b"] * 5 + ["a"]
    table = pa.table({"key": keys, "n": range(9)})

    for batch_rows in (1, 2, 4, 9):
        batches = iter(table.to_batches(max_chunksize=batch_rows))
        found = [
            (some["key"][0].as_py(), some["n"].to_pylist()) for some in grouped(batches, ["key"], 3)
        ]
        assert found == [("a", [0, 1, 2]), ("b", [3, 4, 5]), ("b", [6, 7]), ("a", [8])]
