"""Archived dead letters: listed, counted, brought back once, purged and deleted."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.database.slate import Database
from libs.storage.layout.keys import KEY_VERSION, RecordType
from services.broker.outbox import pusher
from slatemq.v1 import archived_pb2, entry_pb2, queue_pb2, removal_pb2
from tests.forms import shortly
from tests.integration.broker.dead_letters.removal_calls import (
    ARCHIVED,
    archive,
    archived_dead_letters,
    archived_rows,
    come_back,
    failed_rows,
    make_anew,
    revision,
)
from tests.integration.broker.entry_calls import FAILED, entries, fail, get, ids, listed
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.outbox.test_outbox import UNANSWERED, Fault
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running
from tests.integration.waiting import WAIT_SECONDS, eventually
from tests.manual_clock import ManualClock

ROW = archived_pb2.ArchivedRow


async def archive_all(rig: Rig, numbers: range, run: str = "run") -> None:
    """Archives these messages, which fail first."""
    await fail(rig, numbers, "broken")
    await archive(rig, failed_rows(await listed(rig, FAILED)), run)


async def test_archived_dead_letters_are_listed_with_the_run_that_has_their_content() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        failed_ms = rig.clock.now_ms()
        await fail(rig, [1, 2, 3, 4])
        dead_letters = await listed(rig, FAILED)
        rig.clock.advance(1000)
        assert await archive(rig, failed_rows(dead_letters[1:3]), "first") == (2, 0)
        rig.clock.advance(1000)
        assert await archive(rig, failed_rows(dead_letters[3:]), "second") == (1, 0)

        found = await listed(rig, ARCHIVED, page_size=2)

        assert [(one.message_id, one.archived.run) for one in found] == [
            (2, "first"),
            (3, "first"),
            (4, "second"),
        ]
        assert {(one.finished_at_ms, one.attempts_count, one.priority) for one in found} == {
            (failed_ms, 1, 128)
        }
        assert [one.archived.archived_at_ms - failed_ms for one in found] == [1000, 1000, 2000]
        since = await listed(rig, ARCHIVED, finished_from_ms=failed_ms + 1500)
        assert [one.message_id for one in since] == [4]
        last = await listed(rig, ARCHIVED, newest_first=True, view=4)
        assert [one.message_id for one in last] == [4, 3, 2]
        assert await rig.counts() == {"failed": 1, "archived": 3}
        assert await get(rig, found[0].handle) == found[0]
        moved = await get(rig, dead_letters[1].handle)
        assert (moved.state, moved.handle) == (ARCHIVED, found[0].handle)
        code, reason, _ = await refusal(
            entries(rig).CancelEntry(entry_pb2.CancelEntryRequest(handle=found[0].handle))
        )
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")


async def test_they_come_back_as_new_messages_once_however_often_it_is_asked() -> None:
    pushes = Pushes()
    async with running(pushes=pushes) as rig:
        await rig.create(max_attempts=1)
        await rig.create("other")
        await archive_all(rig, range(1, 11))
        rows = await archived_rows(rig)
        rows[1].run = "another"

        answer = await come_back(rig, rows[:4])
        assert (answer.redriven_count, answer.gone_count) == (3, 1)
        assert list(answer.gone_rows) == [1]
        answer = await come_back(rig, rows[:4])
        assert (answer.redriven_count, answer.gone_count) == (0, 4)
        answer = await come_back(rig, [rows[5], rows[5]], target_queue_id="other")
        assert (answer.redriven_count, answer.gone_count) == (1, 1)

        await eventually(lambda: rig.owner.shard.outbox.waiting_count(0) == 0)
        came = pushes.stored[0]
        assert [one.payload for one in came] == [b"content %d" % n for n in (1, 3, 4, 6)]
        assert [dict(one.headers) for one in came][:2] == [{"number": "1"}, {"number": "3"}]
        assert [one.queue_id for one in came] == ["q", "q", "q", "other"]
        # What is new in its queue has the default delay
        assert [one.HasField("delay_ms") for one in came] == [True, True, True, False]
        assert {one.delay_ms for one in came} == {0}
        assert await ids(rig, ARCHIVED) == [2, 5, 7, 8, 9, 10]
        assert await rig.counts() == {"archived": 6}


async def test_rows_that_are_gone_are_named_whichever_others_are_asked_for() -> None:
    pushes = Pushes()
    async with running(pushes=pushes) as rig:
        # Given archived dead letters in three rows of the list
        await rig.create(max_attempts=1)
        for numbers in (range(1, 3), range(3, 5), range(5, 7)):
            await archive_all(rig, numbers)
        rows = await archived_rows(rig)
        assert len({one.bucket_order for one in rows}) == 3

        # When the first row has come back, and is asked for again before another one
        assert (await come_back(rig, rows[:2])).redriven_count == 2
        answer = await come_back(rig, rows[:4])
        assert (answer.redriven_count, list(answer.gone_rows)) == (2, [0, 1])

        # Then all come back once, and are gone, each of them
        answer = await come_back(rig, rows)
        assert (answer.redriven_count, list(answer.gone_rows)) == (2, [0, 1, 2, 3])
        answer = await come_back(rig, rows)
        assert (answer.redriven_count, list(answer.gone_rows)) == (0, list(range(6)))
        await eventually(lambda: rig.owner.shard.outbox.waiting_count(0) == 0)
        assert pushes.payloads() == [b"content %d" % number for number in range(1, 7)]
        assert await rig.counts() == {}


async def test_what_is_not_wanted_back_is_dropped_and_stays_away() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await archive_all(rig, range(1, 11))
        rows = [
            removal_pb2.FailedRow(
                message_id=one.message_id,
                failed_at_ms=one.failed_at_ms,
                bucket_order=one.bucket_order,
            )
            for one in await archived_rows(rig)
        ]
        other = removal_pb2.FailedRow()
        other.CopyFrom(rows[4])
        other.failed_at_ms += 1

        async def drop(*some: removal_pb2.FailedRow) -> tuple[int, list[int]]:
            request = archived_pb2.DropArchivedRequest(queue_id="q", rows=some)
            answer = await archived_dead_letters(rig).DropArchived(request)
            assert answer.gone_count == len(answer.gone_rows)
            return answer.dropped_count, list(answer.gone_rows)

        assert await drop(rows[0], other, rows[2], rows[2]) == (2, [1, 3])
        assert await drop(rows[2], rows[3]) == (1, [0])
        assert await ids(rig, ARCHIVED) == [2, 5, 6, 7, 8, 9, 10]
        assert await rig.counts() == {"archived": 7}
        answer = await come_back(rig, await archived_rows(rig))
        assert (answer.redriven_count, list(answer.gone_rows)) == (7, [])
        assert await drop(*rows) == (0, list(range(10)))
        assert await rig.counts() == {}


async def test_into_a_queue_of_another_shard_and_one_too_large_for_a_row() -> None:
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    async with running(root, disk=disk, shard=1) as other:
        await other.create("far")
        async with running(root, disk=disk, pushes=pushes) as rig:
            await rig.create(max_attempts=1)
            await archive_all(rig, range(1, 3))
            rows = await archived_rows(rig, payload=b"x" * 70_000)
            answer = await come_back(rig, rows, target_queue_id="far")
            assert answer.redriven_count == 2
            await eventually(lambda: len(pushes.stored.get(0, ())) == 2)
            assert {one.queue_id for one in pushes.stored[0]} == {"far"}
            assert all(one.payload_uri for one in pushes.stored[0])
            code, reason, _ = await refusal(come_back(rig, rows, target_queue_id="nowhere"))
            assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "QUEUE_NOT_FOUND")


async def test_the_largest_payload_comes_back_alone_and_no_others_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given that a call has as many bytes as the largest payload
    size = 200_000
    monkeypatch.setattr(pusher, "PUSHES_BYTES_MAX", size)
    pushes = Pushes()
    async with running(pushes=pushes, settings={"payload_bytes_max": size}) as rig:
        await rig.create(max_attempts=1)
        await archive_all(rig, range(1, 3))
        small, large = await archived_rows(rig)
        large.payload = bytes(size)

        refused = await refusal(come_back(rig, [small, large]))
        assert (refused[0], refused[2]) == (grpc.StatusCode.INVALID_ARGUMENT, "rows[1]")

        assert (await come_back(rig, [large])).redriven_count == 1
        await eventually(lambda: len(pushes.stored.get(0, ())) == 1)
        assert await Blobs(rig.root).get(pushes.stored[0][0].payload_uri) == bytes(size)


async def test_nothing_is_uploaded_for_an_outbox_that_has_no_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushes, uploads = Pushes(), list[bytes]()
    pushes.down = True
    put = Blobs.put

    async def counted(blobs: Blobs, payload: bytes) -> str:
        uploads.append(payload)
        return await put(blobs, payload)

    monkeypatch.setattr(Blobs, "put", counted)
    async with running(pushes=pushes, settings={"outbox_rows_max": 5}) as rig:
        # Given room for two pushes
        await rig.create(max_attempts=1)
        await archive_all(rig, range(1, 4))
        assert (await come_back(rig, await archived_rows(rig))).redriven_count == 3
        await archive_all(rig, range(4, 8))
        rows = await archived_rows(rig, payload=bytes(70_000))

        # When four come back
        code, reason, _ = await refusal(come_back(rig, rows))

        # Then they stay, until there is room
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OUTBOX_FULL")
        assert (uploads, await ids(rig, ARCHIVED)) == ([], [4, 5, 6, 7])
        pushes.down = False
        await eventually(lambda: rig.owner.shard.outbox.waiting_count(0) == 0)
        assert (await come_back(rig, rows)).redriven_count == 4
        assert len(uploads) == 4


async def test_what_comes_back_together_is_uploaded_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a store whose uploads end once as many have begun as may run together
    together = asyncio.Barrier(pusher.UPLOADS_AT_ONCE)
    put = Blobs.put

    async def waits(blobs: Blobs, payload: bytes) -> str:
        await together.wait()
        return await put(blobs, payload)

    monkeypatch.setattr(Blobs, "put", waits)
    async with running(pushes=Pushes()) as rig:
        await rig.create(max_attempts=1)
        await archive_all(rig, range(1, 2 * pusher.UPLOADS_AT_ONCE + 1))
        rows = await archived_rows(rig, payload=bytes(70_000))

        async with asyncio.timeout(WAIT_SECONDS):
            assert (await come_back(rig, rows)).redriven_count == len(rows)


async def test_one_past_its_retention_stays() -> None:
    pushes = Pushes()
    async with running(pushes=pushes) as rig:
        await rig.create(max_attempts=1)
        deadline_ms = rig.clock.now_ms() + 5000
        await rig.assign([1, 2], retention_deadlines_ms=[deadline_ms, 0])
        claimed = await rig.claim(max_messages=2)
        await rig.nack(*(one.lease_token for one in claimed))
        await archive(rig, failed_rows(await listed(rig, FAILED)))
        rig.clock.advance(5000)

        answer = await come_back(rig, await archived_rows(rig))

        assert answer.redriven_count == 1
        assert list(answer.expired_rows) == [0]
        assert await ids(rig, ARCHIVED) == [1]


GOOD: dict[str, Any] = {"message_id": 1, "failed_at_ms": 1, "bucket_order": 1, "run": "r"}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("queue_id", {"queue_id": "?"}),
    ("created_revision", {"created_revision": -1}),
    ("target_queue_id", {"target_queue_id": "a b"}),
    ("rows", {"rows": []}),
    ("rows", {"rows": [ROW(**GOOD)] * 1001}),
    ("rows[0].message_id", {"rows": [ROW(**GOOD | {"message_id": 0})]}),
    ("rows[1].failed_at_ms", {"rows": [ROW(**GOOD), ROW(**GOOD | {"failed_at_ms": -1})]}),
    ("rows[0].bucket_order", {"rows": [ROW(**GOOD | {"bucket_order": 0})]}),
    ("rows[0].run", {"rows": [ROW(**GOOD | {"run": ""})]}),
    ("rows[0].run", {"rows": [ROW(**GOOD | {"run": "r" * 256})]}),
    ("rows[0].payload", {"rows": [ROW(**GOOD, payload=bytes((1 << 20) + 1))]}),
    ('rows[0].headers[""]', {"rows": [ROW(**GOOD, headers={"": "x"})]}),
]


BAD_DROPS: list[tuple[str, dict[str, Any]]] = [
    ("queue_id", {"rows": [removal_pb2.FailedRow()]}),
    ("rows", {"queue_id": "q"}),
    ("rows", {"queue_id": "q", "rows": [removal_pb2.FailedRow()] * 1001}),
    ("rows[0].message_id", {"queue_id": "q", "rows": [removal_pb2.FailedRow()]}),
]


async def test_each_bad_input_is_refused_by_the_name_of_its_field_and_changes_nothing() -> None:
    async with running(settings={"payload_bytes_max": 1 << 20}) as rig:
        await rig.create(max_attempts=1)
        await archive_all(rig, range(1, 3))
        for field, fields in BAD:
            given: dict[str, Any] = {"queue_id": "q", "rows": [ROW(**GOOD)]} | fields
            request = archived_pb2.RedriveArchivedRequest(**given)
            code, _, result = await refusal(archived_dead_letters(rig).RedriveArchived(request))
            assert (code, result) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        for field, given in BAD_DROPS:
            drop = archived_pb2.DropArchivedRequest(**given)
            code, _, result = await refusal(archived_dead_letters(rig).DropArchived(drop))
            assert (code, result) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        request = archived_pb2.RedriveArchivedRequest(
            queue_id="q", created_revision=revision(rig) + 1, rows=[ROW(**GOOD)]
        )
        code, reason, _ = await refusal(archived_dead_letters(rig).RedriveArchived(request))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "QUEUE_CHANGED")
        assert await rig.counts() == {"archived": 2}


async def rows_left(rig: Rig) -> int:
    """Rows of archived messages in the database."""
    assert rig.service.database is not None
    head = bytes((KEY_VERSION, RecordType.ARCHIVED))
    scan = rig.service.database.scan(head, head + b"\xff")
    return sum([len(rows) async for rows in scan])


async def gone(rig: Rig) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while await rows_left(rig):
            await rig.owner.durable()


async def test_purging_them_leaves_dead_letters_and_deleting_the_queue_takes_all() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await archive_all(rig, range(1, 2501))
        await fail(rig, [3000])
        assert await rows_left(rig) >= 3

        purge = queue_pb2.PurgeQueueRequest(queue_id="q", states=[FAILED])
        assert (await rig.queues.PurgeQueue(purge)).purged_count == 1
        assert await rig.counts() == {"archived": 2500}
        purge = queue_pb2.PurgeQueueRequest(queue_id="q", states=[ARCHIVED])
        rows = await archived_rows(rig)
        assert (await rig.queues.PurgeQueue(purge)).purged_count == 2500
        assert await rig.counts() == {}
        assert await ids(rig, ARCHIVED) == []
        answer = await come_back(rig, rows[:3])
        assert (answer.redriven_count, answer.gone_count) == (0, 3)
        await gone(rig)

        await archive_all(rig, range(4001, 4011))
        await make_anew(rig, max_attempts=1)
        await gone(rig)
        assert await rig.counts() == {}


@pytest.mark.parametrize("kept", [False, True], ids=["lost", "kept"])
@pytest.mark.parametrize("at", shortly(range(1, 5), 2, 3))
async def test_each_dead_letter_is_archived_and_comes_back_once_whichever_commit_fails(
    monkeypatch: pytest.MonkeyPatch, at: int, kept: bool
) -> None:
    # Given dead letters, and a fault that will strike
    disk, clock, pushes = Disk(), ManualClock(), Pushes()
    root = memory_root(disk)
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 21))
        dead_letters = failed_rows(await listed(rig, FAILED))
    fault = Fault(at, kept)

    async def flush(database: Database) -> None:
        await fault.flush(database)

    monkeypatch.setattr(Database, "flush", flush)

    # When what was not answered is asked again, and the broker started again
    rows: list[archived_pb2.ArchivedRow] = []
    done = False
    while not done:
        async with running(root, clock, disk=disk, pushes=pushes) as rig:
            try:
                if not rows:
                    await archive(rig, dead_letters)
                    rows = await archived_rows(rig)
                await come_back(rig, rows[:10])
                answer = await come_back(rig, rows[:10])
                assert (answer.redriven_count, answer.gone_count) == (0, 10)
                await eventually(lambda: len(pushes.payloads()) == 10 or fault.struck)
                done = True
            except grpc.aio.AioRpcError as error:
                if error.code() not in UNANSWERED:
                    raise

    # Then half of them are archived, and the others came once
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await eventually(lambda: rig.owner.shard.outbox.waiting_count(0) == 0)
        assert pushes.payloads() == [b"content %d" % number for number in range(1, 11)]
        assert await ids(rig, ARCHIVED) == list(range(11, 21))
        assert await rig.counts() == {"archived": 10}
