"""What principals leave unread of a real broker's answers, with large messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest

from libs.serving.requests import budget as budgets
from libs.serving.requests.budget import AnswerBudget
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.v1 import consumer_pb2, entry_pb2, queue_pb2
from tests.integration.broker.entries.delayed_rows import delay
from tests.integration.broker.rig import Ingest
from tests.integration.broker.rpc.test_principal_limits import TOKENS, Limited, limited, refused
from tests.integration.waiting import eventually

pytestmark = pytest.mark.usefixtures("cheap_hashes")

UNREAD: Final = (
    # A connection of its own, since what is not read fills the window of its connection; and a
    # small window, as gRPC would take megabytes that no one reads.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_535),
)
SIZE: Final = 1 << 20
BUDGET: Final = 16 << 20
HELD_MAX: Final = BUDGET // 2 + SIZE + 1000
"""Half, and one message with its headers: it goes out while there is anything left of the half."""

SHARES: Final = 3
"""Fetches at once that half of the budget is enough for: of 4, 3 and 1 MiB."""

CALLS: Final = 32
"""With a message each, they hold twice the budget."""


class Unread:
    """A principal that reads no large answer."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        self._channel = channel
        self._proof = (("authorization", f"Bearer {TOKENS(name).token}"),)

    def claim(self, wait_ms: int = 0, claim_id: str = "") -> Any:
        request = consumer_pb2.ClaimRequest(
            queue_id="q", max_messages=8, wait_ms=wait_ms, claim_id=claim_id
        )
        return self._call("ConsumerService/Claim", request.SerializeToString())

    def page(self) -> Any:
        request = entry_pb2.ListEntriesRequest(
            queue_id="other",
            state=queue_pb2.ENTRY_STATE_AVAILABLE,
            view=entry_pb2.ENTRY_VIEW_FULL,
            page_size=8,
        )
        return self._call("EntryService/ListEntries", request.SerializeToString())

    def watch(self) -> Any:
        request = entry_pb2.WatchDelayedRequest(queue_id="q", view=entry_pb2.ENTRY_VIEW_FULL)
        return self._call("DelayedService/WatchDelayed", request.SerializeToString())

    async def consume(self) -> Any:
        """A stream that is open and has credit."""
        made: Any = self._channel.stream_stream("/slatemq.v1.ConsumerService/Consume")
        call = made(metadata=self._proof)
        start = consumer_pb2.ConsumeStart(queue_id="q")
        start.credit.messages_count = 8
        await call.write(consumer_pb2.ConsumeRequest(start=start).SerializeToString())
        assert await call.read() is not grpc.aio.EOF
        return call

    def _call(self, method: str, request: bytes) -> Any:
        # As a stream, of which gRPC reads what is asked for alone.
        call: Any = self._channel.unary_stream(f"/slatemq.v1.{method}")
        return call(request, metadata=self._proof)


@asynccontextmanager
async def unread(made: Limited, name: str) -> AsyncIterator[Unread]:
    address = made.rig.running.address
    async with grpc.aio.insecure_channel(address, options=UNREAD) as channel:
        yield Unread(channel, name)


class Shared:
    """A broker with little memory for answers, and one who reads none."""

    def __init__(self, made: Limited, reader: Unread) -> None:
        self.made = made
        self.reader = reader
        self.budget: AnswerBudget = made.rig.delivery._budget
        self.held: list[int] = []
        """What the one held after each answer to it."""
        self._watch()

    def _watch(self) -> None:
        take_for = self.budget.take_for

        def noted(principal: str, size_bytes: int) -> None:
            take_for(principal, size_bytes)
            if principal == "shop":
                self.held.append(self.budget.used_by(principal))

        self.budget.take_for = noted  # type: ignore[method-assign]

    async def lined_up(self, count: int) -> None:
        """This many stand in line: the next that comes is behind them."""
        lines = self.made.rig.delivery._waiter_lines
        await eventually(lambda: sum(len(one.line) for one in lines.values()) == count)

    async def until_refused(self, ask: Callable[[], Any]) -> list[Any]:
        """Calls whose answers are left unread, one after the other, until one is refused."""
        calls: list[Any] = []
        reason = ""
        while reason != "UNREAD_ANSWERS":
            calls.append(ask())
            reason = await self._refusal_or_use(calls[-1])
        return calls

    async def _refusal_or_use(self, call: Any) -> str:
        """Why a call is refused; empty once its answer waits to be read."""
        before = len(self.held)
        await eventually(lambda: call.done() or len(self.held) > before)
        return await reason_of(call) if call.done() else ""


async def reason_of(call: Any) -> str:
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return ""


@asynccontextmanager
async def shared(folder: Path) -> AsyncIterator[Shared]:
    settings = {"delivery_bytes_max": BUDGET, "payload_cache_bytes": 0}
    async with (
        limited(folder, ingest=Ingest(), settings=settings) as made,
        unread(made, "shop") as reader,
    ):
        for queue_id in ("q", "other"):
            await made.ops.create(queue_id)
        yield Shared(made, reader)


async def assign_large(made: Limited, ids: Iterable[int], queue_id: str = "q") -> None:
    """Messages of a mebibyte."""
    made.rig.ingest.sizes.update(dict.fromkeys(ids, SIZE))
    await made.rig.assign(list(ids), queue_id)


async def test_a_claim_takes_its_place_until_its_answer_is_read(tmp_path: Path) -> None:
    async with limited(tmp_path, waiting_claims=1) as made, unread(made, "shop") as reader:
        await made.ops.create("q")
        await assign_large(made, range(1, 9))
        claim = reader.claim()
        await eventually(lambda: made.rig.delivery.in_flight.messages_count > 0)
        await eventually(lambda: made.rig.delivery.places.count == 0)

        await refused(made.shop.claim(wait_ms=0), "waiting_claims", waits=True)

        claim.cancel()
        await eventually(lambda: made.is_open())


async def test_what_one_leaves_unread_leaves_half_of_the_memory_to_others(tmp_path: Path) -> None:
    async with shared(tmp_path) as one:
        made, budget = one.made, one.budget
        for queue_id, first in (("q", 1), ("other", 1001)):
            await assign_large(made, range(first, first + 100), queue_id)

        # Given claims of one, and pages, of which none is read, until both are refused
        calls: list[Any] = []
        for ask in (one.reader.claim, one.reader.page):
            calls += await one.until_refused(ask)
        assert BUDGET // 2 < max(one.held) <= HELD_MAX

        # Then large messages of others come
        assert len((await made.ops.claim("other")).runs) == 1
        for call in calls:
            call.cancel()
        await eventually(lambda: not budget.used_bytes)
        assert not budget._halves
        # and those of the one, too, once it has given up what it has
        assert len((await made.shop.claim("other")).runs) == 1


async def test_pages_that_one_asks_for_at_once_leave_half_of_the_memory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "WAIT_S", 0)  # Those beyond the half are refused at once.
    async with shared(tmp_path) as one:
        ingest = one.made.rig.ingest
        await assign_large(one.made, range(1, 101), "other")
        ingest.read_gate.clear()
        calls = [one.reader.page() for _ in range(CALLS)]

        def done_count() -> int:
            return sum(call.done() for call in calls)

        # More have begun than half has shares for, before the first has an answer
        await eventually(lambda: len(ingest.reads) + done_count() > SHARES)
        ingest.read_gate.set()
        await eventually(lambda: len(one.held) + done_count() >= CALLS)

        assert 0 < max(one.held) <= HELD_MAX
        assert {await reason_of(call) for call in calls if call.done()} == {"UNREAD_ANSWERS"}


async def test_watches_that_one_does_not_read_leave_half_of_the_memory_to_others(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as one:
        ids = range(1, 101)
        one.made.rig.ingest.sizes.update(dict.fromkeys(ids, SIZE))
        await delay(one.made.rig, ids)

        calls = await one.until_refused(one.reader.watch)

        assert 0 < max(one.held) <= HELD_MAX
        for call in calls:
            call.cancel()
        await eventually(lambda: not one.budget.used_bytes)


async def test_claims_that_wait_leave_half_of_the_memory_to_those_behind_them(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as one:
        made = one.made
        calls: list[Any] = []
        for number in range(CALLS):
            calls.append(one.reader.claim(60_000, f"claim {number}"))
            await one.lined_up(number + 1)
        await assign_large(made, range(1, 101))

        # The other's claim is behind those in line, which have had their turns when it is answered
        assert len((await made.ops.claim()).runs) == 1
        assert BUDGET // 2 < max(one.held) <= HELD_MAX

        # A claim that is held up says so at its end
        stopped = CALLS - 1
        request = consumer_pb2.StopClaimRequest(queue_id="q", claim_id=f"claim {stopped}")
        await made.shop._consumers.StopClaim(request, metadata=made.shop._proof)
        assert await reason_of(calls[stopped]) == "UNREAD_ANSWERS"
        # and the others get theirs when there is room
        count = len(one.held)
        for call in calls[:count]:
            call.cancel()
        await eventually(lambda: len(one.held) > count)
        assert max(one.held) <= HELD_MAX


async def test_streams_that_one_does_not_read_leave_half_of_the_memory_to_those_behind_them(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as one:
        streams: list[Any] = []
        for number in range(CALLS):
            streams.append(await one.reader.consume())
            await one.lined_up(number + 1)
        await assign_large(one.made, range(1, 101))

        assert len((await one.made.ops.claim()).runs) == 1
        assert BUDGET // 2 < max(one.held) <= HELD_MAX

        # No stream ends of it: those that are held up go on when there is room
        assert not any(stream.done() for stream in streams)
        count = len(one.held)
        for stream in streams[:count]:
            stream.cancel()
        await eventually(lambda: len(one.held) > count)
        assert max(one.held) <= HELD_MAX
