"""The state that routers begin with, in pages: complete, whatever changes meanwhile."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from services.broker.core import lifecycle as queue_lifecycle
from services.broker.core.config_log import ConfigChange, ConfigLog
from services.broker.core.settings import QueueSettings
from services.broker.requests import queues as queue_conversion
from services.broker.requests.queues import CHANGES_BYTES_MAX, CHANGES_MAX, pages_of
from services.router.wire import read_state
from slatemq.errors import InvalidArgument
from slatemq.v1 import assignment_pb2, queue_pb2, queue_pb2_grpc
from tests.integration.broker.queue_calls import delete, update
from tests.integration.broker.rig import Rig, refusal, running

EXPRESSION = f"1 == 1 // {'x' * 8_000}"
LARGE = QueueSettings(EXPRESSION, priority=EXPRESSION)
MESSAGE_BYTES_MAX = 4 << 20
"""What a gRPC channel takes unless it is set otherwise."""


def final_queues(changes: Any) -> dict[str, queue_pb2.Queue | None]:
    """What each queue is in the end, None: deleted."""
    return {
        change.queue.queue_id or change.deleted_queue_id: change.queue
        if change.HasField("queue")
        else None
        for change in changes
    }


async def page(rig: Rig, token: str = "") -> assignment_pb2.GetRoutingStateResponse:
    request = assignment_pb2.GetRoutingStateRequest(page_token=token)
    return await rig.assignments.GetRoutingState(request)


async def test_configs_that_no_message_has_room_for_are_read_page_by_page() -> None:
    async with running() as rig:
        count = 2 * MESSAGE_BYTES_MAX // (2 * len(EXPRESSION))

        def create(number: int, _: int) -> None:
            rig.owner.shard.create_queue(f"q{number:04}", LARGE)

        for number in range(count):
            await rig.owner.run(partial(create, number))
        await rig.owner.durable()
        await rig.assign([1], "q0000")
        async with grpc.aio.insecure_channel(rig.running.peer_address) as channel:
            state = await read_state(channel, 0, known=0)
            watch = queue_pb2_grpc.QueueServiceStub(channel).WatchQueues(
                queue_pb2.WatchQueuesRequest()
            )
            watched: list[queue_pb2.QueueChange] = []
            async for answer in watch:
                watched += answer.changes
                assert answer.ByteSize() <= CHANGES_BYTES_MAX + 1000
                if not answer.more:
                    break
            watch.cancel()
        assert sum(change.ByteSize() for change in state.changes) > MESSAGE_BYTES_MAX
        assert list(final_queues(state.changes)) == [f"q{number:04}" for number in range(count)]
        assert {queue.filter for queue in final_queues(state.changes).values() if queue} == {
            EXPRESSION
        }
        assert (state.config_revision, state.cursors) == (count, {0: 1})
        assert final_queues(watched) == final_queues(state.changes)
        first = await page(rig)
        assert first.ByteSize() <= CHANGES_BYTES_MAX + 1000
        assert (list(first.cursors), bool(first.next_page_token)) == ([], True)


async def test_what_changes_between_two_pages_is_reported_as_it_is_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_conversion, "CHANGES_MAX", 2)
    async with running() as rig:
        for queue_id in "abcdef":
            await rig.create(queue_id)
        pages = [await page(rig)]
        await update(rig, ["filter"], "a", filter="false")  # told already
        await delete(rig, "d")  # not told yet
        await rig.create("g")
        while pages[-1].next_page_token:
            pages.append(await page(rig, pages[-1].next_page_token))
        assert [len(one.changes) for one in pages] == [2, 2, 2, 2]
        changes = [change for one in pages for change in one.changes]

        monkeypatch.undo()
        whole = await page(rig)
        assert not whole.next_page_token
        assert final_queues(changes) == final_queues(whole.changes)
        assert pages[-1].config_revision == whole.config_revision == 9
        assert pages[0].config_revision == 6


KEPT = 3
"""Deletions that are remembered in these tests."""

FORGOTTEN = grpc.StatusCode.INVALID_ARGUMENT, "REVISION_FORGOTTEN"


async def delete_more_than_are_remembered(rig: Rig) -> None:
    """Deletes `a`, and then so many others that it is forgotten."""
    rig.owner.durable_configs.deleted_kept = KEPT
    await delete(rig, "a")
    for number in range(KEPT):
        await rig.create(f"other{number}")
        await delete(rig, f"other{number}")


async def test_one_who_may_have_missed_deletions_is_refused_and_starts_over() -> None:
    async with running() as rig:
        await rig.create("a")
        await rig.create("b")
        known = rig.owner.durable_revision
        await delete_more_than_are_remembered(rig)
        forgotten = rig.owner.durable_configs.forgotten_revision
        assert forgotten == known + 1

        missed = assignment_pb2.GetRoutingStateRequest(known_revision=known)
        code, reason, field = await refusal(rig.assignments.GetRoutingState(missed))
        assert ((code, reason), field) == (FORGOTTEN, "known_revision")
        missing: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest(after_revision=known))
        assert (await refusal(missing.read()))[:2] == FORGOTTEN

        whole = final_queues((await page(rig)).changes)
        assert "a" not in whole
        assert whole["b"] is not None
        learned = assignment_pb2.GetRoutingStateRequest(known_revision=forgotten)
        changes = (await rig.assignments.GetRoutingState(learned)).changes
        assert [name for name, queue in final_queues(changes).items() if queue is None] == [
            f"other{number}" for number in range(KEPT)
        ]


async def test_what_is_forgotten_stays_so_over_a_restart_whatever_was_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(queue_lifecycle, "DELETED_KEPT", KEPT)
    async with running(tmp_path) as rig:
        await rig.create("a")
        known = rig.owner.durable_revision
        await delete_more_than_are_remembered(rig)
        while any(one.garbage_epochs for one in rig.owner.shard.deleted.values()):  # not swept yet
            await asyncio.sleep(0.01)
        assert "a" not in rig.owner.shard.deleted
        await rig.create("other1")  # fewer are remembered now than could be
        await rig.owner.durable()

    async with running(tmp_path) as rig:
        assert rig.owner.durable_configs.forgotten_revision == known + 1
        missed = assignment_pb2.GetRoutingStateRequest(known_revision=known)
        assert (await refusal(rig.assignments.GetRoutingState(missed)))[:2] == FORGOTTEN
        missing: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest(after_revision=known))
        assert (await refusal(missing.read()))[:2] == FORGOTTEN
        learned = assignment_pb2.GetRoutingStateRequest(known_revision=known + 1)
        changes = final_queues((await rig.assignments.GetRoutingState(learned)).changes)
        assert {name: one is None for name, one in changes.items()} == {
            "other0": True,
            "other1": False,
            "other2": True,
        }


async def test_what_was_deleted_and_forgotten_between_two_pages_is_not_taken_for_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_conversion, "CHANGES_MAX", 2)
    async with running() as rig:
        for queue_id in "abcd":
            await rig.create(queue_id)
        first = await page(rig)
        assert "a" in final_queues(first.changes)
        await delete_more_than_are_remembered(rig)
        assert (await refusal(page(rig, first.next_page_token)))[:2] == FORGOTTEN
        # One who begins now has seen nothing of what is forgotten.
        again = await page(rig)
        assert "a" not in final_queues(again.changes)
        await page(rig, again.next_page_token)


async def test_a_watcher_too_slow_for_deletions_to_be_remembered_is_sent_away() -> None:
    async with running() as rig:
        await rig.create("a")
        watch = rig.broker.queues.WatchQueues(queue_pb2.WatchQueuesRequest(), None)
        assert "a" in final_queues((await anext(watch)).changes)
        await delete_more_than_are_remembered(rig)
        with pytest.raises(InvalidArgument) as caught:
            await anext(watch)
        assert caught.value.reason == "REVISION_FORGOTTEN"


@pytest.mark.parametrize(
    "token", ["x", "//", "1/1", "1/1/", "1/-1/q", "1/1/q q", f"1/{'f' * 16}/q", "1/q"]
)
async def test_a_token_that_no_answer_had_is_refused(token: str) -> None:
    async with running() as rig:
        code, reason, field = await refusal(page(rig, token))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert (reason, field) == ("INVALID_PAGE_TOKEN", "page_token")


def test_queues_that_share_a_revision_are_reported_once_each_wherever_a_page_ends() -> None:
    # As after a start with replays under way
    log = ConfigLog(ConfigChange(name, 7, LARGE, 7) for name in ("b", "a", "a.b", "ab", "Z"))
    log.add([ConfigChange("later", 8, LARGE, 8)])
    order = [change.queue_id for change in log.after(0)]
    assert order == ["Z", "a", "a.b", "ab", "b", "later"]
    for place, queue_id in enumerate(order[:-1]):
        behind = [change.queue_id for change in log.after(7, queue_id)]
        assert behind == order[place + 1 :]
    assert [change.queue_id for change in log.after(7)] == ["later"]


def test_no_page_has_more_queues_than_its_bound() -> None:
    small = QueueSettings("true")
    changes = [ConfigChange(f"q{n}", n, small, n) for n in range(2 * CHANGES_MAX + 1)]
    pages = list(pages_of(changes, {}, 0))
    assert [len(one) for one in pages] == [CHANGES_MAX, CHANGES_MAX, 1]
    assert list(pages_of([], {}, 0)) == [[]]
