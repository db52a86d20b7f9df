"""What a broker holds of messages for its consumers: bounded over all queues together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc.aio
import pytest

from services.broker.config import BrokerConfig
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.message_cache import FIRST_BYTES
from services.broker.rpc import assignment as assignment_servicer
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import ResourceExhausted
from slatemq.v1 import consumer_pb2, entry_pb2, queue_pb2
from tests.integration.broker.entry_calls import entries
from tests.integration.broker.rig import Ingest, Rig, running
from tests.integration.waiting import eventually

T = TypeVar("T")

QUEUES = [f"q{number}" for number in range(12)]
EACH = 16
SIZE = 1 << 20
BUDGET = 8 << 20


def delivery_of(rig: Rig) -> Dispatcher:
    return rig.delivery


def watch_most(rig: Rig) -> list[int]:
    """The most bytes that the budget had reserved, noted each time that it grows."""
    budget: Any = delivery_of(rig)._budget
    most = [0]

    def noting(name: str) -> None:
        grow = getattr(budget, name)

        def wrapped(size_bytes: int) -> Any:
            result = grow(size_bytes)
            most[0] = max(most[0], budget.used_bytes)
            return result

        setattr(budget, name, wrapped)

    noting("take")
    noting("try_reserve")
    noting("release")
    return most


@asynccontextmanager
async def filled_queues(delay_ms: int = 0) -> AsyncIterator[tuple[Rig, list[int]]]:
    """A budget for eight messages of a mebibyte, and sixteen in each of twelve queues.

    With it comes the most that the budget has reserved.
    """
    ingest = Ingest()
    settings = {"delivery_bytes_max": BUDGET, "payload_cache_bytes": 0}
    async with running(ingest=ingest, settings=settings) as rig:
        visible = [rig.clock.now_ms() + delay_ms] * EACH if delay_ms else []
        for number, queue_id in enumerate(QUEUES):
            await rig.create(queue_id)
            ids = range(1 + number * EACH, 1 + (number + 1) * EACH)
            ingest.sizes.update(dict.fromkeys(ids, SIZE))
            await rig.assign(list(ids), queue_id, visible_at_ms=visible)
        yield rig, watch_most(rig)


async def test_claims_of_many_queues_at_once_hold_no_more_together_than_the_budget() -> None:
    async with filled_queues() as (rig, most):
        # when all of them are claimed at once
        async def claim_all(queue_id: str) -> int:
            count = 0
            while count < EACH:
                error = None
                try:
                    claimed = await rig.claim(queue_id, max_messages=EACH, wait_ms=20_000)
                except grpc.aio.AioRpcError as refusal:
                    error = from_rpc_error(refusal)
                if error is None:
                    count += len(claimed)
                else:  # The others took all of the time, on a busy machine.
                    assert error.reason == "UNREAD_ANSWERS"
            return count

        counts = await asyncio.gather(*map(claim_all, QUEUES))

        # then all are claimed, and never more was held than the budget and what a queue asks for
        assert counts == [EACH] * len(QUEUES)
        assert most[0] <= BUDGET + 2 * FIRST_BYTES
        async with asyncio.timeout(60):
            while delivery_of(rig)._budget.used_bytes:
                await asyncio.sleep(0.01)


async def test_pages_of_entries_hold_no_more_together_than_the_budget() -> None:
    async with filled_queues() as (rig, most):
        # when all of them are listed at once, with payloads
        async def list_all(queue_id: str) -> int:
            request = entry_pb2.ListEntriesRequest(
                queue_id=queue_id,
                state=queue_pb2.ENTRY_STATE_AVAILABLE,
                view=entry_pb2.ENTRY_VIEW_FULL,
            )
            count = 0
            while True:
                error = None
                try:
                    page = await entries(rig).ListEntries(request)
                except grpc.aio.AioRpcError as refusal:
                    error = from_rpc_error(refusal)
                if error is not None:
                    assert error.reason == "UNREAD_ANSWERS"
                    continue
                count += len(page.entries)
                assert all(len(entry.message.payload) == SIZE // 10 * 10 for entry in page.entries)
                request.page_token = page.next_page_token
                if not page.next_page_token:
                    return count

        counts = await asyncio.gather(*map(list_all, QUEUES))

        # then all are reported, and never more was held than the budget and one message
        assert counts == [EACH] * len(QUEUES)
        assert SIZE < most[0] <= BUDGET + 2 * SIZE
        async with asyncio.timeout(60):
            while delivery_of(rig)._budget.used_bytes:
                await asyncio.sleep(0.01)


async def test_watches_of_delayed_messages_hold_no_more_together_than_the_budget() -> None:
    async with filled_queues(delay_ms=60_000) as (rig, most):
        # when all of them are watched at once, with payloads, by some who do not read
        calls = [watch(rig, queue_id) for queue_id in QUEUES]
        budget = delivery_of(rig)._budget
        await eventually(lambda: budget.used_bytes > BUDGET - 2 * SIZE)
        for call in calls:
            call.cancel()

        async def watch_all(queue_id: str) -> int:
            count, position = 0, ""
            while count < EACH:
                call = watch(rig, queue_id, position)
                error = None
                try:
                    while count < EACH:
                        answer = await call.read()
                        count, position = count + len(answer.entries), answer.position
                except grpc.aio.AioRpcError as refusal:
                    error = from_rpc_error(refusal)
                call.cancel()
                assert error is None or error.reason == "UNREAD_ANSWERS"
            return count

        counts = await asyncio.gather(*map(watch_all, QUEUES))

        # then all are reported, and never more was held than the budget and one message
        assert counts == [EACH] * len(QUEUES)
        assert SIZE < most[0] <= BUDGET + 2 * SIZE
        await eventually(lambda: not budget.used_bytes)


def watch(rig: Rig, queue_id: str, position: str = "") -> Any:
    return entries(rig).WatchDelayed(
        entry_pb2.WatchDelayedRequest(
            queue_id=queue_id, position=position, view=entry_pb2.ENTRY_VIEW_FULL
        )
    )


async def test_streams_and_claims_that_end_early_give_back_what_they_held() -> None:
    ingest = Ingest()
    settings = {"delivery_bytes_max": BUDGET, "payload_cache_bytes": 0}
    async with running(ingest=ingest, settings=settings) as rig:
        await rig.create()
        ids = list(range(1, 41))
        ingest.sizes.update(dict.fromkeys(ids, SIZE))
        await rig.assign(ids)

        # Given a stream that is cancelled after its first answer, and a claim that is cancelled
        call: Any = rig.consumers.Consume()
        start = consumer_pb2.ConsumeStart(queue_id="q")
        start.credit.messages_count = 40
        await call.write(consumer_pb2.ConsumeRequest(start=start))
        while not (await call.read()).runs:
            pass
        call.cancel()
        waiting = asyncio.create_task(rig.claim(max_messages=40, wait_ms=20_000))
        await asyncio.sleep(0.05)
        waiting.cancel()

        async with asyncio.timeout(60):
            while delivery_of(rig)._budget.used_bytes:
                await asyncio.sleep(0.01)


async def test_consumers_that_do_not_read_leave_other_queues_their_small_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An assignment that waited for the budget would wait so long
    monkeypatch.setattr(assignment_servicer, "FETCH_S", 1_000)
    ingest = Ingest()
    settings = {"delivery_bytes_max": BUDGET, "payload_cache_bytes": 0}
    async with running(ingest=ingest, settings=settings) as rig:
        await exhaust(rig, ingest)

        # Then small messages of other queues come, with a wait and without
        for queue_id, message_id in (("small", 1000), ("other", 1001)):
            await rig.create(queue_id)
            await rig.assign([message_id], queue_id)
            (claimed,) = await in_time(rig.claim(queue_id))
            assert claimed.message.message_id == message_id
        waiting = asyncio.create_task(rig.claim("small", wait_ms=20_000))
        await in_time(rig.assign([1002], "small"))
        assert [one.message.message_id for one in await in_time(waiting)] == [1002]

        # and a long line of them, though each answer is a small one
        await rig.assign(list(range(2000, 2400)), "small")
        counts = [len(await in_time(rig.claim("small", max_messages=100))) for _ in range(4)]
        assert counts == [100] * 4


async def test_what_is_too_large_for_what_is_free_is_refused_and_counts_no_attempt() -> None:
    ingest = Ingest()
    settings = {"delivery_bytes_max": BUDGET, "payload_cache_bytes": 0}
    async with running(ingest=ingest, settings=settings) as rig:
        calls = await exhaust(rig, ingest)
        await rig.create("large")
        ingest.sizes[1000] = SIZE
        await rig.assign([1000], "large")

        # An empty answer would say that nothing is there
        for wait_ms in (0, 1):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await in_time(rig.claim("large", wait_ms=wait_ms))
            error = from_rpc_error(refused.value)
            assert isinstance(error, ResourceExhausted)
            assert (error.reason, error.retry_after_ms) == ("UNREAD_ANSWERS", 1_000)
        assert await rig.counts("large") == {"available": 1}

        # Once the others are gone it comes, for the first time
        for call in calls:
            call.cancel()
        (claimed,) = await in_time(rig.claim("large", wait_ms=20_000))
        assert claimed.attempts_count == 1


async def test_an_unread_answer_larger_than_the_budget_holds_up_no_small_message() -> None:
    ingest = Ingest()
    async with running(ingest=ingest, settings={"delivery_bytes_max": SIZE}) as rig:
        await rig.create("huge")
        ingest.sizes[1] = 8 * SIZE
        await rig.assign([1], "huge")
        await stalled(rig, "huge")
        await eventually(lambda: delivery_of(rig)._budget.used_bytes > SIZE)

        await rig.create()
        await rig.assign([2])
        assert len(await in_time(rig.claim())) == 1


async def stalled(rig: Rig, queue_id: str) -> Any:
    """A stream with credit whose consumer reads nothing but its ID."""
    call: Any = rig.consumers.Consume()
    start = consumer_pb2.ConsumeStart(queue_id=queue_id)
    start.credit.messages_count = 100
    await call.write(consumer_pb2.ConsumeRequest(start=start))
    await call.read()
    return call


async def exhaust(rig: Rig, ingest: Ingest) -> list[Any]:
    """Has consumers that do not read hold all of the budget."""
    await rig.create("unread")
    ids = list(range(1, 201))
    ingest.sizes.update(dict.fromkeys(ids, SIZE))
    await rig.assign(ids, "unread")
    budget = delivery_of(rig)._budget
    calls: list[Any] = []
    while not await stays(lambda: budget.is_exceeded):
        calls.append(await stalled(rig, "unread"))
        await eventually(lambda: sending(rig) == len(calls))
    return calls


async def stays(condition: Callable[[], bool]) -> bool:
    """Whether it holds for a while: gRPC takes more of an answer until its windows are full."""
    for _ in range(20):
        if not condition():
            return False
        await asyncio.sleep(0.05)
    return True


def sending(rig: Rig) -> int:
    """How many streams have an answer on its way."""
    streams: Any = delivery_of(rig).streams
    return sum(bool(stream._sending) for stream in streams)


async def in_time(answer: Awaitable[T]) -> T:
    """An answer that must not wait for consumers that do not read."""
    async with asyncio.timeout(60):
        return await answer


def test_the_budget_has_room_for_an_answer() -> None:
    config = BrokerConfig(root="memory:///", port=0)
    assert config.delivery_bytes_max >= 64 << 20
