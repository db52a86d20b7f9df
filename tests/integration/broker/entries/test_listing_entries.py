"""ListEntries of a real broker: pages of every state, bounds of time and size, tokens."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.broker.entries import conversion as entry_conversion
from slatemq.v1 import entry_pb2, queue_pb2
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    DELAYED,
    DONE,
    FAILED,
    IN_FLIGHT,
    MINUTE,
    entries,
    ids,
    listed,
    one_of_each,
    redriven,
)
from tests.integration.broker.queue_calls import update
from tests.integration.broker.rig import Rig, refusal, running
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock

INVALID = grpc.StatusCode.INVALID_ARGUMENT
STATES = {
    "available": AVAILABLE,
    "delayed": DELAYED,
    "in flight": IN_FLIGHT,
    "done": DONE,
    "failed": FAILED,
}
each_state = pytest.mark.parametrize("state", STATES.values(), ids=list(STATES))
HEADERS = entry_pb2.ENTRY_VIEW_HEADERS
FULL = entry_pb2.ENTRY_VIEW_FULL


async def several_of_each(rig: Rig) -> None:
    """Messages 101–107 done, 201–207 failed, 301–307 in flight, 401–407 available, 501–507 later.

    Of each some came together, and some later.
    """
    await rig.create(max_attempts=1)
    for part in (range(1, 5), range(5, 8)):
        now_ms = rig.clock.now_ms()
        await rig.assign([n + hundred for hundred in (100, 200, 300) for n in part])
        tokens = {
            one.message.message_id: one.lease_token
            for one in await rig.claim(max_messages=99, lease_ms=600_000)
        }
        await rig.ack(*(tokens[100 + n] for n in part))
        await rig.nack(*(tokens[200 + n] for n in part), reason="x")
        await rig.assign([500 + n for n in part], visible_at_ms=[now_ms + MINUTE] * len(part))
        rig.clock.advance(1000)
    await rig.assign([401, 402, 403, 404])
    await rig.assign([405, 406, 407])


EXPECTED = {AVAILABLE: 400, DELAYED: 500, IN_FLIGHT: 300, DONE: 100, FAILED: 200}


@pytest.mark.parametrize("page_size", [1, 2, 7, 1000])
async def test_pages_have_every_entry_once_in_order(tmp_path: Path, page_size: int) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await several_of_each(rig)
    async with running(tmp_path, clock) as rig:
        for state, hundred in EXPECTED.items():
            expected = [hundred + n for n in range(1, 8)]
            assert await ids(rig, state, page_size=page_size) == expected
            if state in (DONE, FAILED):
                backwards = await ids(rig, state, page_size=page_size, newest_first=True)
                assert backwards == expected[::-1]
        claimed = await rig.claim(max_messages=2)
        assert [one.message.message_id for one in claimed] == [401, 402], "nothing was consumed"


async def test_a_restart_between_two_pages_changes_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await several_of_each(rig)
    for state, hundred in EXPECTED.items():
        found: list[int] = []
        token = ""
        for _ in range(3):
            async with running(tmp_path, clock) as rig:
                request = entry_pb2.ListEntriesRequest(
                    queue_id="q", state=state, page_size=3, page_token=token
                )
                answer = await entries(rig).ListEntries(request)
                found += [one.message_id for one in answer.entries]
                token = answer.next_page_token
        assert found == [hundred + n for n in range(1, 8)]
        assert token == ""


async def test_what_was_reported_last_may_be_gone_when_the_next_page_is_asked() -> None:
    async with running() as rig:
        await several_of_each(rig)

        async def page(state: Any, token: str) -> tuple[list[int], str]:
            request = entry_pb2.ListEntriesRequest(
                queue_id="q", state=state, page_size=2, page_token=token
            )
            answer = await entries(rig).ListEntries(request)
            return [one.message_id for one in answer.entries], answer.next_page_token

        available, behind_available = await page(AVAILABLE, "")
        in_flight, behind_in_flight = await page(IN_FLIGHT, "")
        failed, behind_failed = await page(FAILED, "")
        assert (available, in_flight, failed) == ([401, 402], [301, 302], [201, 202])
        claimed = await rig.claim(max_messages=3)
        [lease] = rig.owner.shard.queues["q"].leases.of_message(302)
        await rig.ack(f"0-{lease.token:016x}")
        assert len(claimed) == 3
        assert (await page(AVAILABLE, behind_available))[0] == [404, 405]
        # On from the beginning of what was claimed together: twice rather than never.
        assert (await page(IN_FLIGHT, behind_in_flight))[0] == [301, 303]
        await redriven(rig, message_ids=[201, 202, 204])
        found, _ = await page(FAILED, behind_failed)
        assert set(found) <= {203, 205, 206, 207}
        purge = queue_pb2.PurgeQueueRequest(
            queue_id="q", states=[AVAILABLE, DELAYED, IN_FLIGHT, FAILED]
        )
        await rig.queues.PurgeQueue(purge)
        await rig.assign([999])
        assert (await page(AVAILABLE, behind_available))[0] == [999]
        assert (await page(IN_FLIGHT, behind_in_flight)) == ([], "")
        assert (await page(FAILED, behind_failed)) == ([], "")


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("page_size", [1, 1000])
async def test_finished_entries_are_listed_within_times(page_size: int, newest_first: bool) -> None:
    async with running() as rig:
        began_ms = rig.clock.now_ms()
        await several_of_each(rig)
        first, second = [1, 2, 3, 4], [5, 6, 7]
        for state, hundred in ((DONE, 100), (FAILED, 200)):
            for from_ms, until_ms, expected in (
                (0, 0, first + second),
                (began_ms, began_ms + 1001, first + second),
                (began_ms, began_ms + 1000, first),
                (began_ms + 1, 0, second),
                (began_ms + 1000, began_ms + 1001, second),
                (0, began_ms, []),
                (began_ms + 1001, 0, []),
                (began_ms + 1000, began_ms, []),
                (0, 1, []),
                ((1 << 63) - 1, 0, []),
                (0, (1 << 63) - 1, first + second),
            ):
                result = await ids(
                    rig,
                    state,
                    page_size=page_size,
                    newest_first=newest_first,
                    finished_from_ms=from_ms,
                    finished_until_ms=until_ms,
                )
                wanted = [hundred + n for n in expected]
                assert result == (wanted[::-1] if newest_first else wanted)


async def test_what_is_past_the_queues_retention_is_not_listed_any_more() -> None:
    async with running() as rig:
        await several_of_each(rig)

        async def keep(seconds: int) -> None:
            await update(
                rig,
                ["done_retention_s", "failed_retention_s"],
                done_retention_s=seconds,
                failed_retention_s=seconds,
            )

        for state, hundred in ((DONE, 100), (FAILED, 200)):
            await keep(60)
            assert len(await ids(rig, state)) == 7
            await keep(1)
            for backwards in (False, True):
                result = await ids(rig, state, newest_first=backwards, finished_from_ms=1)
                assert sorted(result) == [hundred + n for n in (5, 6, 7)]
        rig.clock.advance(1001)
        assert await ids(rig, DONE) == await ids(rig, FAILED) == []
        await keep(0)  # for ever
        assert len(await ids(rig, DONE)) == len(await ids(rig, FAILED)) == 7


async def test_listings_follow_the_clock_and_hide_what_is_past_its_retention() -> None:
    async with running() as rig:
        await rig.create()
        now_ms = rig.clock.now_ms()
        await rig.assign(
            [1, 2, 3, 4],
            visible_at_ms=[0, now_ms + MINUTE, now_ms + 2 * MINUTE, now_ms + MINUTE],
            retention_deadlines_ms=[now_ms + MINUTE, 0, 0, now_ms + 90_000],
            priorities=[5, 4, 3, 4],
        )
        assert (await ids(rig, AVAILABLE), await ids(rig, DELAYED)) == ([1], [3, 2, 4])
        rig.clock.advance(MINUTE)
        assert (await ids(rig, AVAILABLE), await ids(rig, DELAYED)) == ([2, 4], [3])
        rig.clock.advance(30_000)
        assert (await ids(rig, AVAILABLE), await ids(rig, DELAYED)) == ([2], [3])


# --- Contents ---------------------------------------------------------------------------


@each_state
async def test_every_listing_can_show_the_messages(state: queue_pb2.EntryState.ValueType) -> None:
    async with running() as rig:
        await several_of_each(rig)
        rig.ingest.header_bytes = 2
        hundred = EXPECTED[state]
        rig.ingest.gone = {hundred + 2}
        full = await listed(rig, state, view=FULL, page_size=3)
        assert [one.message_id for one in full] == [hundred + n for n in range(1, 8)]
        for one in full:
            there = one.message_id != hundred + 2
            assert one.HasField("message") == there
            assert one.message.payload == (b"%010d" % one.message_id if there else b"")
            assert one.etag == (f"e{one.message_id}" if there else "")
            assert [attempt.outcome for attempt in one.attempts] == (
                ["nack: x"] if state == FAILED else []
            )
        headers = await listed(rig, state, view=HEADERS)
        for one, other in zip(full, headers, strict=True):
            one.message.payload = b""
            if not other.HasField("message"):
                one.ClearField("message")
            assert one == other
        rig.ingest.down = True
        assert len(await listed(rig, state)) == 7
        assert (await refusal(listed(rig, state, view=FULL)))[0] == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("view", [HEADERS, FULL])
async def test_no_page_is_larger_than_it_may_be(
    monkeypatch: pytest.MonkeyPatch, view: entry_pb2.EntryView.ValueType
) -> None:
    monkeypatch.setattr(entry_conversion, "MESSAGES_BYTES_MAX", 3000)
    async with running() as rig:
        await rig.create()
        await rig.assign(range(1, 21))
        if view == HEADERS:
            rig.ingest.header_bytes = 1000
        else:
            rig.ingest.sizes = dict.fromkeys(range(1, 21), 1000)
        rig.ingest.sizes[7] = 10_000  # more alone than all may have
        found: list[int] = []
        token = ""
        while token or not found:
            request = entry_pb2.ListEntriesRequest(
                queue_id="q", state=AVAILABLE, view=view, page_token=token
            )
            answer = await entries(rig).ListEntries(request)
            items = [one.message_id for one in answer.entries]
            assert sum(one.message.ByteSize() for one in answer.entries) <= 3000 or items == [7]
            found += items
            token = answer.next_page_token
        assert found == [*range(1, 21)]


@pytest.mark.parametrize("view", [entry_pb2.ENTRY_VIEW_ATTEMPTS, HEADERS])
async def test_no_page_has_more_attempts_than_it_may(
    monkeypatch: pytest.MonkeyPatch, view: entry_pb2.EntryView.ValueType
) -> None:
    monkeypatch.setattr(entry_conversion, "ATTEMPTS_BYTES_MAX", 3000)
    monkeypatch.setattr(entry_conversion, "ATTEMPTS_AT_ONCE", 4)
    async with running() as rig:
        await rig.create(max_attempts=3)
        await rig.assign(range(1, 21))
        for _ in range(3):
            claimed = await rig.claim(max_messages=20)
            await rig.nack(*(one.lease_token for one in claimed), reason="x" * 300)
        held = rig.delivery._budget.used_bytes
        found: list[int] = []
        token = ""
        while token or not found:
            request = entry_pb2.ListEntriesRequest(
                queue_id="q", state=FAILED, view=view, page_token=token
            )
            answer = await entries(rig).ListEntries(request)
            assert [len(one.attempts) for one in answer.entries] == [3, 3]
            found += [one.message_id for one in answer.entries]
            token = answer.next_page_token
        assert sorted(found) == [*range(1, 21)]
        await eventually(lambda: rig.delivery._budget.used_bytes == held)


# --- Bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"queue_id": ""}, "INVALID_QUEUE_ID", "queue_id"),
        ({"queue_id": "a/b"}, "INVALID_QUEUE_ID", "queue_id"),
        ({"state": 0}, None, "state"),
        ({"state": 77}, None, "state"),
        ({"page_size": -1}, "OUT_OF_RANGE", "page_size"),
        ({"view": 77}, None, "view"),
        ({"finished_from_ms": 1}, None, "finished_from_ms"),
        ({"finished_until_ms": 1}, None, "finished_until_ms"),
        ({"newest_first": True}, None, "newest_first"),
        ({"state": IN_FLIGHT, "newest_first": True}, None, "newest_first"),
        ({"state": DONE, "finished_from_ms": -1}, "OUT_OF_RANGE", "finished_from_ms"),
        ({"state": FAILED, "finished_until_ms": -1}, "OUT_OF_RANGE", "finished_until_ms"),
    ],
    ids=str,
)
async def test_what_cannot_be_listed_is_refused(
    fields: dict[str, Any], reason: str | None, field: str
) -> None:
    async with running() as rig:
        await one_of_each(rig)
        fields = {"queue_id": "q", "state": AVAILABLE, **fields}
        call = entries(rig).ListEntries(entry_pb2.ListEntriesRequest(**fields))
        code, told_reason, result = await refusal(call)
        assert (code, told_reason, result) == (INVALID, reason or told_reason, field)


async def test_a_queue_that_there_is_not_has_no_listing() -> None:
    async with running() as rig:
        request = entry_pb2.ListEntriesRequest(queue_id="none", state=AVAILABLE)
        refused = await refusal(entries(rig).ListEntries(request))
        assert refused[:2] == (grpc.StatusCode.NOT_FOUND, "QUEUE_NOT_FOUND")


def made_up(*value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@each_state
async def test_a_listing_takes_its_own_tokens_alone(state: queue_pb2.EntryState.ValueType) -> None:
    async with running() as rig:
        await several_of_each(rig)
        tokens = [
            "x",
            "é",
            "A" * 5000,
            base64.urlsafe_b64encode(b"[" * 600).decode(),
            base64.urlsafe_b64encode(b"5").decode(),
            base64.urlsafe_b64encode(b'"abc"').decode(),
            base64.urlsafe_b64encode(b"\xff\xfe").decode(),
        ]
        for other in STATES.values():
            request = entry_pb2.ListEntriesRequest(queue_id="q", state=other, page_size=1)
            answer = await entries(rig).ListEntries(request)
            if other != state:
                tokens.append(answer.next_page_token)
            else:
                good = answer.next_page_token
        count = 4 if state in (AVAILABLE, DELAYED) else 2
        bad: list[Any] = [-1, 1 << 64, float("inf"), float("nan"), None, "x", [], 1.5, "1", True]
        for number in bad:
            for place in range(count):
                numbers: list[Any] = [0] * count
                numbers[place] = number
                tokens.append(made_up("q", state, False, *numbers))
        tokens += [made_up("q", state, False), made_up("q", state, False, *[0] * 5)]
        tokens.append(made_up("p", state, False, *[0] * count))
        if count == 4:
            tokens += [made_up("q", state, False, 256, 0, 0, 1)]
            tokens += [made_up("q", state, False, 0, 0, kind, 1) for kind in (2, 3)]
        else:
            assert good
        if state in (DONE, FAILED):
            tokens.append(made_up("q", state, True, 1, 1))
        for token in tokens:
            assert token
            request = entry_pb2.ListEntriesRequest(queue_id="q", state=state, page_token=token)
            refused = await refusal(entries(rig).ListEntries(request))
            assert refused == (INVALID, "INVALID_PAGE_TOKEN", "page_token"), token
        # What could be one of ours leads nowhere, or to the beginning.
        for number in (0, 1, (1 << 54) - 1, (1 << 64) - 1):
            wanted = (0, number, 0, number) if count == 4 else (number, number)
            for newest_first in (False, True) if state in (DONE, FAILED) else (False,):
                request = entry_pb2.ListEntriesRequest(
                    queue_id="q",
                    state=state,
                    page_token=made_up("q", state, newest_first, *wanted),
                    newest_first=newest_first,
                )
                assert len((await entries(rig).ListEntries(request)).entries) in (0, 7)
