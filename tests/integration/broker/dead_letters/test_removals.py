"""Removals over the wire: what is over goes, once, whatever else the queue is doing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.storage.database.roots import open_root
from libs.storage.layout.keys import attempts_key
from services.broker.dead_letters import removals as remover
from slatemq.v1 import removal_pb2
from tests.integration.broker import queue_calls
from tests.integration.broker.dead_letters.removal_calls import (
    ARCHIVED,
    GRACE_MS,
    IN_FLIGHT,
    NOT_EXPIRED,
    archive,
    archived_rows,
    asked,
    come_back,
    drop,
    failed_rows,
    make_anew,
    prune,
    removals,
    remove,
    revision,
    waiting_rows,
)
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    DELAYED,
    DONE,
    FAILED,
    fail,
    fail_again,
    ids,
    listed,
    one_of_each,
)
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.rig import Rig, refusal, running
from tests.manual_clock import ManualClock

WAITING = removal_pb2.WaitingRow
LETTER = removal_pb2.FailedRow
EXPIRED_REMOVAL = removal_pb2.ExpiredRemoval
DAY_MS = 86_400_000
TEN_SECONDS = 10_000


def waiting(**field: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"message_id": 1, "bucket_order": 1} | field
    row = WAITING(**given)
    return {"expired": EXPIRED_REMOVAL(rows=[WAITING(message_id=1, bucket_order=1), row])}


def dead_letter(**field: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"message_id": 1, "failed_at_ms": 1, "bucket_order": 1} | field
    row = LETTER(**given)
    return {"archive": removal_pb2.ArchiveRemoval(rows=[row], run="r")}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("queue_id", waiting() | {"queue_id": ""}),
    ("queue_id", waiting() | {"queue_id": "a/b"}),
    ("created_revision", waiting() | {"created_revision": 0}),
    ("created_revision", waiting() | {"created_revision": -1}),
    ("removal", {}),
    ("expired.rows", {"expired": EXPIRED_REMOVAL()}),
    (
        "expired.rows",
        {"expired": EXPIRED_REMOVAL(rows=[WAITING(message_id=1, bucket_order=1)] * 10_001)},
    ),
    ("expired.rows[1].message_id", waiting(message_id=0)),
    ("expired.rows[1].message_id", waiting(message_id=1 << 62)),
    ("expired.rows[1].priority", waiting(priority=-1)),
    ("expired.rows[1].priority", waiting(priority=256)),
    ("expired.rows[1].bucket_order", waiting(bucket_order=0)),
    ("expired.rows[1].bucket_order", waiting(bucket_order=1 << 54)),
    ("done.done_before_ms", {"done": removal_pb2.DoneRemoval()}),
    ("done.done_before_ms", {"done": removal_pb2.DoneRemoval(done_before_ms=-1)}),
    ("created_revision", {"created_revision": -1, "done": removal_pb2.DoneRemoval()}),
    ("archive.rows", {"archive": removal_pb2.ArchiveRemoval(run="r")}),
    ("archive.rows[0].message_id", dead_letter(message_id=-1)),
    ("archive.rows[0].failed_at_ms", dead_letter(failed_at_ms=0)),
    ("archive.rows[0].failed_at_ms", dead_letter(failed_at_ms=1 << 62)),
    ("archive.rows[0].bucket_order", dead_letter(bucket_order=-7)),
    ("archive.run", {"archive": removal_pb2.ArchiveRemoval(rows=dead_letter()["archive"].rows)}),
    (
        "archive.run",
        {"archive": removal_pb2.ArchiveRemoval(rows=dead_letter()["archive"].rows, run="ü" * 128)},
    ),
    ("failed_expired.rows", {"failed_expired": removal_pb2.FailedExpiredRemoval()}),
    (
        "failed_expired.rows[0].bucket_order",
        {
            "failed_expired": removal_pb2.FailedExpiredRemoval(
                rows=[LETTER(message_id=1, failed_at_ms=1)]
            )
        },
    ),
]


async def test_each_bad_input_is_refused_by_the_name_of_its_field_and_changes_nothing() -> None:
    async with running() as rig:
        await one_of_each(rig)
        before = await rig.counts()
        for field, fields in BAD:
            given: dict[str, Any] = {"queue_id": "q", "created_revision": revision(rig)} | fields
            request = removal_pb2.RemoveEntriesRequest(**given)
            code, _, result = await refusal(removals(rig).RemoveEntries(request))
            assert (code, result) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert await rig.counts() == before


async def test_what_a_queue_of_the_same_name_had_is_not_looked_for_in_the_one_re_created() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, [1])
        rows, former = failed_rows(await listed(rig, FAILED)), revision(rig)
        await make_anew(rig, max_attempts=1)
        await fail(rig, [1])

        wanted = removal_pb2.ArchiveRemoval(rows=rows, run="r")
        request = removal_pb2.RemoveEntriesRequest(
            queue_id="q", created_revision=former, archive=wanted
        )
        code, reason, _ = await refusal(removals(rig).RemoveEntries(request))

        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "QUEUE_CHANGED")
        assert await archive(rig, rows) == (0, 1)  # those of the former queue
        assert await rig.counts() == {"failed": 1}
        request.queue_id = "none"
        code, reason, _ = await refusal(removals(rig).RemoveEntries(request))
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "QUEUE_NOT_FOUND")


# --- Available and in flight ------------------------------------------------


async def test_expired_messages_go_when_the_grace_period_is_over_and_others_stay(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        now_ms = clock.now_ms()
        over = [now_ms + TEN_SECONDS if n % 2 else 0 for n in range(1, 3001)]
        priorities = [n % 3 for n in range(1, 3001)]
        await rig.assign(range(1, 3001), priorities=priorities, retention_deadlines_ms=over)
        later = [now_ms + DAY_MS] * 100
        await rig.assign(range(3001, 3101), visible_at_ms=later, retention_deadlines_ms=later)
        rows = waiting_rows([*await listed(rig, AVAILABLE), *await listed(rig, DELAYED)])
        assert len(rows) == 3100

        clock.advance(TEN_SECONDS + GRACE_MS - 1000)
        answer = await asked(rig, expired=EXPIRED_REMOVAL(rows=rows))
        assert (answer.removed_count, answer.gone_count) == (0, 0)
        assert {one.reason for one in answer.refused} == {NOT_EXPIRED}
        assert [one.row for one in answer.refused] == list(range(3100))

    # When the broker starts again, so that nothing of it is in memory
    clock.advance(1000)
    async with running(tmp_path, clock) as rig:
        answer = await asked(rig, expired=EXPIRED_REMOVAL(rows=rows))
        assert (answer.removed_count, answer.gone_count, len(answer.refused)) == (1500, 0, 1600)
        again = await asked(rig, expired=EXPIRED_REMOVAL(rows=rows))
        assert (again.removed_count, again.gone_count, len(again.refused)) == (0, 1500, 1600)
        assert await rig.counts() == {"available": 1500, "delayed": 100}
    async with running(tmp_path, clock) as rig:
        assert await rig.counts() == {"available": 1500, "delayed": 100}
        left: list[int] = []
        while claimed := await rig.claim(max_messages=2000):
            left += (one.message.message_id for one in claimed)
        assert sorted(left) == list(range(2, 3001, 2))


async def test_one_in_flight_stays_for_its_ack_and_goes_with_its_lease() -> None:
    async with running() as rig:
        await rig.create(lease_ms=600_000)
        deadline_ms = rig.clock.now_ms() + TEN_SECONDS
        await rig.assign([1, 2, 3], retention_deadlines_ms=[deadline_ms] * 3)
        rows = waiting_rows(await listed(rig, AVAILABLE))
        first, second = await rig.claim(max_messages=2)
        rig.clock.advance(TEN_SECONDS + GRACE_MS)

        answer = await asked(rig, expired=EXPIRED_REMOVAL(rows=rows))

        assert (answer.removed_count, answer.gone_count) == (1, 0)
        assert [(one.message_id, one.reason) for one in answer.refused] == [
            (first.message.message_id, IN_FLIGHT),
            (second.message.message_id, IN_FLIGHT),
        ]
        assert await rig.ack(first.lease_token) == [0]
        await rig.pass_time(600_000)
        assert await rig.counts() == {"done": 1}
        assert await drop(rig, rows) == (0, 3)


# --- Done -------------------------------------------------------------------


async def finish(rig: Rig, numbers: range) -> None:
    await rig.assign(numbers)
    claimed = await rig.claim(max_messages=len(numbers))
    await rig.ack(*(one.lease_token for one in claimed))


async def test_the_done_list_loses_its_beginning_as_far_as_the_queue_and_the_caller_say() -> None:
    async with running() as rig:
        await rig.create(done_retention_s=3600)
        await finish(rig, range(1, 11))
        first_ms = rig.clock.now_ms()
        rig.clock.advance(600_000)
        await finish(rig, range(11, 21))
        rig.clock.advance(3_600_000 - 600_000 + GRACE_MS)
        now_ms = rig.clock.now_ms()

        assert await prune(rig, first_ms) == 0  # its own time is not before it
        assert await prune(rig, now_ms) == 0  # not yet: one millisecond is missing
        rig.clock.advance(1)
        assert await prune(rig, now_ms) == 10
        assert await ids(rig, DONE) == list(range(11, 21))
        assert await prune(rig, now_ms) == 0
        await queue_calls.update(rig, ["done_retention_s"], done_retention_s=0)
        rig.clock.advance(DAY_MS)
        assert await prune(rig, rig.clock.now_ms()) == 0  # for ever
        await queue_calls.update(rig, ["done_retention_s"], done_retention_s=1)
        assert await prune(rig, rig.clock.now_ms()) == 10
        assert await rig.counts() == {}
        await finish(rig, range(21, 24))
        assert await rig.counts() == {"done": 3}


@pytest.mark.parametrize(("of", "at_once", "most"), [("ROWS", 5, 20), ("MESSAGES", 15, 60)])
async def test_a_long_done_list_goes_in_several_calls_while_acks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, at_once: int, most: int
) -> None:
    monkeypatch.setattr(remover, f"DONE_{of}_AT_ONCE", at_once)
    monkeypatch.setattr(remover, f"DONE_{of}_MAX", most)
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create(done_retention_s=60)
        for number in range(1, 101):
            await finish(rig, range(3 * number, 3 * number + 3))
        clock.advance(60_000 + GRACE_MS + 1)
        old_ms = clock.now_ms()

        async def others() -> int:
            for number in range(200, 220):
                await finish(rig, range(3 * number, 3 * number + 3))
            return 60

        acks = asyncio.create_task(others())
        answer = await asked(rig, done=removal_pb2.DoneRemoval(done_before_ms=old_ms))
        assert (answer.removed_count, answer.more) == (60, True)
        assert await prune(rig, old_ms) == 240
        count = await acks
        assert await rig.counts() == {"done": count}
    async with running(tmp_path, clock) as rig:
        assert await rig.counts() == {"done": 60}
        assert len(await ids(rig, DONE)) == 60


async def test_with_the_last_entry_of_a_message_goes_what_was_noted_of_its_attempts() -> None:
    async with running() as rig:
        await rig.create(done_retention_s=1, max_attempts=3)
        await rig.assign([1, 2])
        await fail_again(rig, 2)
        claimed = await rig.claim(max_messages=2)
        await rig.ack(*(one.lease_token for one in claimed))
        assert await stored(rig, 1)
        assert await stored(rig, 2)
        rig.clock.advance(1001 + GRACE_MS)

        assert await prune(rig, rig.clock.now_ms()) == 2

        assert not await stored(rig, 1)
        assert not await stored(rig, 2)


async def stored(rig: Rig, message_id: int) -> bytes | None:
    await rig.owner.durable()
    assert rig.service.database is not None
    return await rig.service.database.get(attempts_key("q", message_id))


# --- Failed -----------------------------------------------------------------


async def test_dead_letters_go_when_the_queue_keeps_them_no_longer() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 1501))
        rig.clock.advance(1000)
        await fail(rig, [2001, 2002])
        rows = failed_rows(await listed(rig, FAILED))
        wanted = removal_pb2.FailedExpiredRemoval(rows=rows)

        rig.clock.advance(10 * DAY_MS)
        answer = await asked(rig, failed_expired=wanted)
        assert {one.reason for one in answer.refused} == {NOT_EXPIRED}
        assert len(answer.refused) == 1502
        await queue_calls.update(rig, ["failed_retention_s"], failed_retention_s=10 * 86_400)
        rig.clock.advance(GRACE_MS - 1000)
        answer = await asked(rig, failed_expired=wanted)
        assert (answer.removed_count, len(answer.refused)) == (1500, 2)
        rig.clock.advance(1000)
        assert await remove(rig, failed_expired=wanted) == (2, 1500)
        assert await remove(rig, failed_expired=wanted) == (0, 1502)
        assert await rig.counts() == {}
        assert not await stored(rig, 7)


async def test_what_is_removed_stays_so_and_counts_are_exact_after_a_restart(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    root, pushes = open_root(tmp_path.as_uri()), Pushes()
    async with running(root, clock, pushes=pushes) as rig:
        await rig.create(max_attempts=1, done_retention_s=1)
        await fail(rig, range(1, 31))
        await finish(rig, range(31, 61))
        dead_letters = failed_rows(await listed(rig, FAILED))
        clock.advance(1001 + GRACE_MS)
        assert await archive(rig, dead_letters[:10]) == (10, 0)
        assert await prune(rig, clock.now_ms()) == 30
    async with running(root, clock, pushes=pushes) as rig:
        assert await rig.counts() == {"failed": 20, "archived": 10}
        assert await archive(rig, dead_letters[:20]) == (10, 10)
        answer = await come_back(rig, (await archived_rows(rig))[:5])
        assert answer.redriven_count == 5
    async with running(root, clock, pushes=pushes) as rig:
        assert await rig.counts() == {"failed": 10, "archived": 15}
        assert await ids(rig, ARCHIVED) == [one.message_id for one in dead_letters[5:20]]
