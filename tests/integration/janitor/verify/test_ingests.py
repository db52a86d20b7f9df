"""Verification of an ingest's database that was made row by row, with one thing wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from libs.storage.database.roots import Root, open_root
from libs.storage.layout.ids import SeqBlock, encode_seq_block, message_id
from libs.storage.layout.keys import log_key, payload_key
from libs.storage.layout.own_keys import (
    CLOCK_KEY,
    ID_BLOCK_KEY,
    LOG_BOUNDS_KEY,
    dedupe_ends_key,
    dedupe_key,
    outbox_counter_key,
    outbox_progress_key,
    request_ids_key,
    task_key,
    task_request_key,
)
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.task_folders import body_name, task_folder
from libs.storage.records.dedupe_records import DedupeRecord, encode_dedupe, encode_dedupe_ends
from libs.storage.records.execution_records import OutboxCounter, encode_outbox_counter
from libs.storage.records.log_bounds import LogBoundsRecord, encode_log_bounds
from libs.storage.records.metadata import MessageMetadata, encode_log_entry
from libs.storage.records.payloads import encode_inline, encode_uri
from libs.storage.records.states import (
    RequestIdRecord,
    encode_clock,
    encode_outbox_progress,
    encode_request_ids,
)
from libs.storage.records.task_records import (
    AppliedTask,
    TaskRequestRecord,
    WaitingTask,
    encode_task_record,
    encode_task_request,
)
from services.ingest.write.request_ids import NAMES_FROM
from services.janitor.verify import dedupe_pairs, ingests
from services.janitor.verify.findings import Finding, Findings, Kind
from services.janitor.verify.verification import StoppedDatabases, Verification
from slatemq._admin.task_ids import TaskIds, parse_task_id
from tests.integration.janitor.verify.stored_rows import Row, write

Wrong = tuple[Kind, str, str]

PAYLOAD = b"payload"
GONE = f"blobs/00/{'0' * 62}"
LAST = message_id(0, 3)
TASK = TaskIds(0).make(1)
TASK_KEY = task_key(parse_task_id(TASK).ulid)


def message_of(number: int, payload_bytes: int = len(PAYLOAD)) -> list[Row]:
    """A message in a log entry of its own."""
    one = message_id(0, number)
    metadata = MessageMetadata(one, 1, 1, 0, 0, {}, payload_bytes=payload_bytes)
    return [
        (log_key(one), encode_log_entry([metadata])),
        (payload_key(one), encode_inline(PAYLOAD)),
    ]


@pytest.fixture
async def root(tmp_path: Path) -> Root:
    """An instance of three messages that no queue has, whose log has lost others to a purge."""
    root = open_root(tmp_path.as_uri(), sync=False)
    bounds = LogBoundsRecord(message_id(0, 1), LAST, LAST)
    rows = [row for number in (1, 2, 3) for row in message_of(number)]
    rows.append((LOG_BOUNDS_KEY, encode_log_bounds(bounds)))
    rows.append((ID_BLOCK_KEY, encode_seq_block(SeqBlock(1, 100))))
    await write(root, "ingest/0", *rows)
    await write(root, "broker/0")
    assert await wrong_with(root) == []
    return root


async def verified(
    root: Root, databases: StoppedDatabases | None = None, *, sizes_only: bool = False
) -> Findings:
    databases = databases or await StoppedDatabases.find(root)
    return await Verification(root, databases, 1 << 60, sizes_only=sizes_only).run()


async def wrong_with(
    root: Root, databases: StoppedDatabases | None = None, *, sizes_only: bool = False
) -> list[Wrong]:
    """The faults of the databases: this root has nothing beside them."""
    findings = await verified(root, databases, sizes_only=sizes_only)
    assert findings.leftovers == []
    return [(one.kind, one.shard, one.record) for one in findings.all() if one.shard != "instance"]


async def test_a_log_entry_that_is_lost_after_a_purge_is_a_fault_though_no_queue_needs_it(
    root: Root,
) -> None:
    await write(root, "ingest/0", (log_key(message_id(0, 2)), None))
    assert await wrong_with(root) == [(Kind.MESSAGE, "ingest/0", "payload")]
    await write(root, "ingest/0", (log_key(LAST), None))

    lost = [one for one in (await verified(root)).all() if one.kind is Kind.MESSAGE]
    assert [one.message_ids for one in lost] == [(message_id(0, 2),), (LAST,)]
    assert all("no queue gets it" in one.what_to_do for one in lost)


async def test_an_object_of_a_message_whose_log_entry_is_lost_is_not_left_over(
    root: Root,
) -> None:
    path = f"blobs/00/{'0' * 62}"
    await root.objects.put(path, PAYLOAD)
    row = (payload_key(LAST), encode_uri(path))
    await write(root, "ingest/0", row, (log_key(LAST), None))
    assert await wrong_with(root) == [(Kind.MESSAGE, "ingest/0", "payload")]


async def test_a_task_that_is_to_be_applied_has_its_body(root: Root) -> None:
    waiting = encode_task_record(WaitingTask(1, has_failed=False))
    await write(root, "ingest/0", (TASK_KEY, waiting))
    path = f"{task_folder(0)}/redis-1/{body_name(TASK, b'a publish')}"
    await root.objects.put(path, b"a publish")
    assert await wrong_with(root) == []

    async def fault() -> Finding:
        (found,) = [one for one in (await verified(root)).all() if one.record == "task"]
        assert (found.kind, found.shard, found.key) == (Kind.OBJECT, "ingest/0", TASK)
        return found

    await root.objects.put(path, b"b publish")
    assert f"its body, {path}, is damaged" in (await fault()).wrong

    await root.objects.delete(path)
    assert "its body is gone" in (await fault()).wrong


async def test_where_a_row_cannot_be_read_no_task_is_said_to_lack_its_body(root: Root) -> None:
    waiting = encode_task_record(WaitingTask(1, has_failed=False))
    await write(root, "ingest/0", (TASK_KEY, waiting))
    assert (Kind.OBJECT, "ingest/0", "task") in await wrong_with(root)

    await write(root, "ingest/0", (LOG_BOUNDS_KEY, b"damaged"))

    assert {kind for kind, _, _ in await wrong_with(root)} == {Kind.ROW}


async def test_a_request_names_a_task_that_was_applied_for_it(root: Root) -> None:
    digest, fingerprint = bytes(range(16)), bytes(16)
    applied = AppliedTask(1, LAST, 1, 1, request=digest)
    request = encode_task_request(TaskRequestRecord(parse_task_id(TASK).ulid, fingerprint))
    await write(
        root,
        "ingest/0",
        (TASK_KEY, encode_task_record(applied)),
        (task_request_key(digest), request),
    )
    assert await wrong_with(root) == []

    wrong = [(Kind.REFERENCE, "ingest/0", "task request")]
    await write(root, "ingest/0", (task_request_key(bytes(16)), request))
    assert await wrong_with(root) == wrong
    await write(root, "ingest/0", (task_request_key(bytes(16)), None), (TASK_KEY, None))
    assert await wrong_with(root) == wrong


async def test_a_request_may_name_the_later_of_two_tasks_when_the_first_one_is_forgotten(
    root: Root,
) -> None:
    digest, later = bytes(range(16)), parse_task_id(TaskIds(0).make(1 << 41)).ulid
    applied = encode_task_record(AppliedTask(1, LAST, 1, 1, request=digest))
    request = encode_task_request(TaskRequestRecord(later, bytes(16)))
    rows = [(TASK_KEY, applied), (task_key(later), applied), (task_request_key(digest), request)]
    await write(root, "ingest/0", *rows)
    assert await wrong_with(root) == []
    await write(root, "ingest/0", (TASK_KEY, None))
    assert await wrong_with(root) == []


async def test_of_very_many_requests_a_sample_is_compared(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingests, "REQUESTS_MAX", 10)
    # Given more requests than are compared, one of which names a task that was not applied
    rows: list[Row] = []
    for number in range(40):
        digest = bytes([number * 6]) + bytes(15)
        ulid = number.to_bytes(16, "big")
        applied = AppliedTask(1, LAST, 1, 1, request=digest)
        request = encode_task_request(TaskRequestRecord(ulid, bytes(16)))
        rows += [(task_key(ulid), encode_task_record(applied)), (task_request_key(digest), request)]
    await write(root, "ingest/0", *rows)
    assert await wrong_with(root) == []

    # Then it is found where it is among those with low digests, and no right one is reported
    wrong = encode_task_request(TaskRequestRecord(bytes(16), bytes(16)))
    await write(root, "ingest/0", (task_request_key(bytes([6]) + bytes(15)), wrong))
    assert await wrong_with(root) == [(Kind.REFERENCE, "ingest/0", "task request")]
    right = encode_task_request(TaskRequestRecord((1).to_bytes(16, "big"), bytes(16)))
    await write(root, "ingest/0", (task_request_key(bytes([6]) + bytes(15)), right))
    await write(root, "ingest/0", (task_request_key(bytes([234]) + bytes(15)), wrong))
    assert await wrong_with(root) == []


class Applies(StoppedDatabases):
    """An instance in which the task is applied after its ingest was read."""

    @asynccontextmanager
    async def later(self, services: Sequence[str]) -> AsyncIterator[StoppedDatabases]:
        applied = encode_task_record(AppliedTask(1, message_id(0, 1), 1, 1))
        await write(self.root, "ingest/0", (TASK_KEY, applied))
        yield StoppedDatabases(self.root, ["ingest/0"])


async def test_a_body_that_went_since_its_task_was_applied_is_not_missing(root: Root) -> None:
    waiting = encode_task_record(WaitingTask(1, has_failed=False))
    await write(root, "ingest/0", (TASK_KEY, waiting))
    assert await wrong_with(root, Applies(root, ["ingest/0", "broker/0"])) == []


class GoesOn(StoppedDatabases):
    """An instance in which a payload's record changes after its ingest was read."""

    record: bytes | None = None

    @asynccontextmanager
    async def later(self, services: Sequence[str]) -> AsyncIterator[StoppedDatabases]:
        await write(self.root, "ingest/0", (payload_key(LAST), self.record))
        yield StoppedDatabases(self.root, ["ingest/0"])


@pytest.mark.parametrize("sizes_only", [False, True])
@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (None, []),
        (encode_uri(f"blobs/11/{'1' * 62}"), []),
        (encode_inline(PAYLOAD), []),
        (encode_uri(GONE), [(Kind.OBJECT, "ingest/0", "payload")]),
    ],
    ids=["purged", "edited", "edited, and small", "as it was"],
)
async def test_an_object_that_went_since_with_its_message_is_not_missing(
    root: Root, later: bytes | None, expected: list[Wrong], sizes_only: bool
) -> None:
    await write(root, "ingest/0", (payload_key(LAST), encode_uri(GONE)))
    databases = GoesOn(root, ["ingest/0", "broker/0"])
    databases.record = later
    assert await wrong_with(root, databases, sizes_only=sizes_only) == expected


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("dedupe key", dedupe_key("k"), lambda one: encode_dedupe(DedupeRecord(one, 0))),
        ("task", TASK_KEY, lambda one: encode_task_record(AppliedTask(1, one, 1, 1))),
        (
            "task",
            TASK_KEY,
            lambda one: encode_task_record(AppliedTask(1, 0, 1, 0, ((0, one),))),
        ),
    ],
    ids=["dedupe key", "applied task", "task with a duplicate"],  # not of the random key
)
async def test_what_names_a_message_names_none_behind_the_end_of_the_log(
    root: Root, name: str, key: bytes, value: object
) -> None:
    assert callable(value)
    await write(root, "ingest/0", (key, value(LAST)))
    assert await wrong_with(root) == []
    await write(root, "ingest/0", (key, value(LAST + 1)))
    assert await wrong_with(root) == [(Kind.REFERENCE, "ingest/0", name)]
    await write(root, "ingest/0", (key, value(message_id(1, 1))))
    assert await wrong_with(root) == [(Kind.REFERENCE, "ingest/0", name)]


def request_ids(*first_ids: int) -> bytes:
    return encode_request_ids(
        [RequestIdRecord(f"request-{one}", one, 1, bytes(16)) for one in first_ids]
    )


@pytest.mark.parametrize(
    ("first_sequence", "value", "is_right"),
    [
        (message_id(0, 1), request_ids(message_id(0, 1), message_id(0, 2)), True),
        (message_id(0, 1), request_ids(message_id(0, 2)), False),
        (NAMES_FROM, request_ids(0, message_id(0, 2)), True),
        (NAMES_FROM + 7, request_ids(message_id(0, 2)), False),
        (message_id(0, 1), request_ids(0), False),
    ],
)
async def test_a_row_of_request_ids_begins_with_the_message_in_its_key(
    root: Root, first_sequence: int, value: bytes, is_right: bool
) -> None:
    await write(root, "ingest/0", (request_ids_key(9, first_sequence), value))
    expected = [] if is_right else [(Kind.REFERENCE, "ingest/0", "request IDs")]
    assert await wrong_with(root) == expected


MINUTE = 7
END_MS = MINUTE * 60_000 + 1


def key_row(name: str, end_ms: int = END_MS) -> Row:
    return dedupe_key(name), encode_dedupe(DedupeRecord(LAST, end_ms))


def ends_row(*names: str, minute: int = MINUTE) -> Row:
    return dedupe_ends_key(minute, LAST), encode_dedupe_ends(names)


@pytest.mark.parametrize(
    ("rows", "record"),
    [
        ([key_row("a"), key_row("b"), ends_row("a", "b")], None),
        ([ends_row("a", "b"), key_row("a")], "dedupe ends"),
        ([key_row("a"), key_row("b"), ends_row("b")], "dedupe key"),
        ([key_row("a"), ends_row("a", minute=MINUTE + 1)], "dedupe key"),
        # Taken again since: the row of its first end is not removed yet
        ([key_row("a", END_MS + 60_000), ends_row("a"), ends_row("a", minute=MINUTE + 1)], None),
        # What has ended is ignored
        ([key_row("a", 0)], None),
        ([ends_row("a"), (CLOCK_KEY, encode_clock(END_MS + 60_000))], None),
    ],
)
async def test_a_dedupe_key_and_the_row_of_its_end_name_one_another(
    root: Root, rows: list[Row], record: str | None
) -> None:
    await write(root, "ingest/0", *rows)
    expected = [] if record is None else [(Kind.REFERENCE, "ingest/0", record)]
    assert await wrong_with(root) == expected


async def test_of_very_many_dedupe_keys_a_sample_is_compared(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedupe_pairs, "KEYS_MAX", 10)
    names = [f"key-{number}" for number in range(400)]
    await write(root, "ingest/0", *map(key_row, names), ends_row(*names))
    assert await wrong_with(root) == []

    await write(root, "ingest/0", *((dedupe_key(name), None) for name in names))
    found = await wrong_with(root)
    assert 0 < len(found) <= 10
    assert {*found} == {(Kind.REFERENCE, "ingest/0", "dedupe ends")}


async def test_pushes_that_an_ingest_has_stored_were_sent_by_a_broker_that_counts_them(
    root: Root,
) -> None:
    await write(root, "ingest/0", (outbox_progress_key(0), encode_outbox_progress(5)))
    assert await wrong_with(root) == [(Kind.REFERENCE, "ingest/0", "outbox progress")]
    counter = encode_outbox_counter(OutboxCounter(5, 6, 0))
    await write(root, "broker/0", (outbox_counter_key(0), counter))
    assert await wrong_with(root) == []

    await write(root, "ingest/0", (outbox_progress_key(7), encode_outbox_progress(1)))
    assert await wrong_with(root) == [(Kind.REFERENCE, "ingest/0", "outbox progress")]
    # Unless that one was removed, with nothing left
    await RemovedShards(root.objects).add("broker/7", now_ms=0)
    assert await wrong_with(root) == []
