"""An ingest that is late to answer holds up its own messages alone; they come once it does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextvars import Context

import grpc.aio
import pytest

from libs.serving.requests import budget as budgets
from libs.storage.layout.ids import message_id, shard_of
from libs.storage.records.queues import AvailableMessage
from services.broker.core.waiting import lane
from services.broker.core.waiting.scan import Choice, NeedsBeyond, StoredBucket
from services.broker.delivery import dispatcher, ingest_health, late_fetches
from services.broker.delivery.message_cache import IngestMessages
from services.broker.delivery.selection import ClaimSelector
from services.broker.delivery.waiters import TURN, WaiterLine
from services.broker.shard import loading
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import Unavailable
from slatemq.v1 import assignment_pb2
from tests.claimed_runs import ClaimedMessage
from tests.integration.broker.rig import Ingest, Rig, running
from tests.integration.waiting import eventually
from tests.parts_beyond import parts_beyond
from tests.turns import Turns

LATE = [message_id(0, number) for number in (1, 2, 3)]
IN_TIME = [message_id(1, number) for number in (1, 2, 3)]

NO_CACHE = {"payload_cache_bytes": 0}


@pytest.fixture(autouse=True)
def soon_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_fetches, "LATE_S", 0.05)


def frozen() -> tuple[Ingest, asyncio.Event]:
    """Ingests of which number 0 answers nothing but introductions before the event."""
    ingest, thaw = Ingest(), asyncio.Event()
    ingest.frozen[0] = thaw
    return ingest, thaw


def ids_of(claimed: Sequence[ClaimedMessage]) -> list[int]:
    return [one.message.message_id for one in claimed]


async def assign(
    rig: Rig, ids: Sequence[int], queue_id: str = "q", priorities: Sequence[int] = ()
) -> None:
    """Assigns messages of one log, each after those before."""
    state = await rig.assignments.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
    log = shard_of(ids[0])
    piece = assignment_pb2.LogRange(
        ingest_shard=log,
        previous_sequence=next((c.sequence for c in state.cursors if c.ingest_shard == log), 0),
        last_sequence=ids[-1],
        config_revision=state.config_revision,
    )
    piece.assignments.add(queue_id=queue_id, message_ids=ids, priorities=priorities)
    answer = await rig.assignments.Assign(assignment_pb2.AssignRequest(ranges=[piece]))
    assert answer.results[0].applied


async def rest_of(rig: Rig, count: int, queue_id: str = "q") -> list[ClaimedMessage]:
    claimed: list[ClaimedMessage] = []
    while len(claimed) < count:
        claimed += await rig.claim(queue_id, max_messages=10, wait_ms=20_000)
    return claimed


async def test_a_frozen_ingest_holds_up_only_its_own_messages_and_costs_them_no_attempt() -> None:
    ingest, thaw = frozen()
    async with running(ingest=ingest, settings=NO_CACHE) as rig:
        # Given messages of an ingest that answers nothing, before those of another one
        await rig.create()
        await assign(rig, LATE)
        await assign(rig, IN_TIME)

        # When they are claimed, then the others come
        async with asyncio.timeout(60):
            claimed = await rig.claim(max_messages=10, wait_ms=60_000)
        assert ids_of(claimed) == IN_TIME

        # And so does what is assigned later, by the same fetch or a new one
        async with asyncio.timeout(60):
            waiting = asyncio.create_task(rig.claim(max_messages=10, wait_ms=60_000))
            await assign(rig, [message_id(1, 4)])
            assert ids_of(await waiting) == [message_id(1, 4)]

        # Once it answers, its own come for the first time
        thaw.set()
        claimed = await rest_of(rig, len(LATE))
        assert sorted(ids_of(claimed)) == LATE
        assert {one.attempts_count for one in claimed} == {1}
        await eventually(lambda: not rig.delivery._budget.used_bytes)


async def test_a_late_answer_is_what_is_delivered_even_if_the_cache_has_no_room_for_it() -> None:
    ingest, thaw = frozen()
    ingest.is_up = True
    async with running(ingest=ingest, settings=NO_CACHE) as rig:
        await rig.create()
        await assign(rig, LATE)
        waiting = asyncio.create_task(rig.claim(max_messages=10, wait_ms=60_000))
        (line,) = await lines(rig)
        await eventually(lambda: line.late)

        thaw.set()

        assert ids_of(await waiting) == LATE
        assert ingest.reads == [LATE]


async def test_a_claim_that_does_not_wait_gets_what_an_ingest_brings_that_is_up() -> None:
    ingest, thaw = frozen()
    ingest.is_up = True
    async with running(ingest=ingest, settings=NO_CACHE) as rig:
        await rig.create()
        await assign(rig, LATE)
        claim = asyncio.create_task(rig.claim(max_messages=10))
        (line,) = await lines(rig)
        await eventually(lambda: line.late)
        thaw.set()
        assert ids_of(await claim) == LATE


async def test_a_claim_that_does_not_wait_is_refused_while_the_ingest_is_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingest_health, "SILENT_S", 0.05)
    ingest, thaw = frozen()
    async with running(ingest=ingest, settings=NO_CACHE) as rig:
        await rig.create()
        await assign(rig, LATE)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async with asyncio.timeout(60):
                    await rig.claim(max_messages=10)
            assert from_rpc_error(refused.value).reason == "INGEST_DOWN"

        # What the first of them has asked for is kept for the next
        thaw.set()
        assert ids_of(await rest_of(rig, len(LATE))) == LATE
        assert ingest.reads == [LATE]


async def test_ingests_that_answer_in_time_are_delivered_by_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_fetches, "LATE_S", 600.0)
    ingest, thaw = frozen()
    async with running(ingest=ingest, settings=NO_CACHE) as rig:
        await rig.create()
        await assign(rig, IN_TIME, priorities=[9, 9, 9])
        await assign(rig, LATE, priorities=[1, 1, 1])
        claim = asyncio.create_task(rig.claim(max_messages=10))
        await eventually(lambda: IN_TIME in ingest.reads)
        thaw.set()
        assert ids_of(await claim) == [*LATE, *IN_TIME]


async def test_what_was_edited_since_is_not_delivered_from_a_late_answer() -> None:
    ingest, thaw = frozen()
    ingest.is_up = True
    async with running(ingest=ingest, settings=NO_CACHE) as rig:
        await rig.create()
        await assign(rig, LATE)
        waiting = asyncio.create_task(rig.claim(max_messages=10, wait_ms=60_000))
        (line,) = await lines(rig)
        await eventually(lambda: line.late)

        rig.delivery._payloads.forget(LATE[0])
        thaw.set()

        claimed = await waiting
        claimed += await rest_of(rig, len(LATE) - len(claimed))
        assert sorted(ids_of(claimed)) == LATE
        assert LATE[0] in ingest.reads[-1]


async def test_a_frozen_ingest_holds_up_no_other_messages_while_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "WAIT_S", 0.05)
    ingest, thaw = frozen()
    async with running(ingest=ingest, settings={"delivery_bytes_max": 1 << 20}) as rig:
        # Given a queue whose messages are all cached, as claims have read them once
        await rig.create("cached")
        await assign(rig, IN_TIME, "cached")
        claimed = await rig.claim("cached", max_messages=10)
        await rig.nack(*[one.lease_token for one in claimed])

        # and answers that are not read, and claims of ten queues for what a frozen ingest has
        rig.delivery._budget.take(1 << 20)
        stuck = []
        for number in range(10):
            await rig.create(f"stuck{number}")
            await assign(rig, [message_id(0, 10 + number)], f"stuck{number}")
            claim = rig.claim(f"stuck{number}", wait_ms=60_000)
            stuck.append(asyncio.create_task(claim))
        await eventually(lambda: ingest.reads[-1] == [message_id(0, 10)])

        # Then others come, cached and not, and no other queue has asked the frozen one
        async with asyncio.timeout(60):
            assert ids_of(await rig.claim("cached", max_messages=10)) == IN_TIME
            await rig.create()
            await assign(rig, [message_id(1, 9)])
            assert ids_of(await rig.claim()) == [message_id(1, 9)]
        assert len([ids for ids in ingest.reads if ids[0] < IN_TIME[0]]) == 1

        # And what is stuck comes in the end
        thaw.set()
        assert sorted(map(ids_of, await asyncio.gather(*stuck))) == [
            [message_id(0, 10 + number)] for number in range(10)
        ]
        await eventually(lambda: rig.delivery._budget.used_bytes == 1 << 20)


async def lines(rig: Rig) -> list[WaiterLine]:
    await eventually(lambda: rig.delivery._waiter_lines)
    return list(rig.delivery._waiter_lines.values())


class Busy(Ingest):
    """Ingests whose number 0 holds its first fetch back, and its first check: it is up, and late.

    What else it is asked for it answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fetch_gate, self.check_gate = asyncio.Event(), asyncio.Event()
        self.is_checked = False

    async def check(self, shard: int) -> None:
        self.is_checked = True
        await self.check_gate.wait()
        await super().check(shard)

    async def fetch(self, shard: int, ids: Sequence[int], max_bytes: int) -> IngestMessages:
        if ids == [LATE[0]]:
            self.reads.append(list(ids))
            await self.fetch_gate.wait()
        return await super().fetch(shard, ids, max_bytes)


@pytest.mark.parametrize("is_cached", [True, False])
async def test_a_claim_of_another_queue_gets_what_an_ingest_has_that_is_late_and_up(
    is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_health, "SILENT_S", 600.0)
    ingest = Busy()
    async with running(ingest=ingest) as rig:
        await rig.create("a")
        await rig.create("b")
        # Given an ingest that is late for one queue, and has a message of another
        await assign(rig, LATE[:1], "a")
        await assign(rig, LATE[1:2], "b")
        if is_cached:
            (claimed,) = await rig.claim("b")
            await rig.nack(claimed.lease_token)
        waiting = asyncio.create_task(rig.claim("a", wait_ms=60_000))
        await eventually(lambda: ingest.is_checked)

        # When a claim would not wait for it, then it waits for the ingest to show that it is up
        claim = asyncio.create_task(rig.claim("b"))
        await eventually(lambda: any(line.passed for line in _of(rig, "b")))
        assert not claim.done()
        ingest.check_gate.set()
        assert ids_of(await claim) == LATE[1:2]
        assert not waiting.done()

        ingest.fetch_gate.set()
        assert ids_of(await waiting) == LATE[:1]


async def test_a_claim_of_another_queue_is_refused_once_the_late_ingest_is_known_to_be_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingest_health, "SILENT_S", 600.0)
    ingest = Busy()
    async with running(ingest=ingest, settings=NO_CACHE) as rig:
        await rig.create("a")
        await rig.create("b")
        await assign(rig, LATE[:1], "a")
        await assign(rig, LATE[1:2], "b")
        waiting = asyncio.create_task(rig.claim("a", wait_ms=60_000))
        await eventually(lambda: ingest.is_checked)
        claim = asyncio.create_task(rig.claim("b"))
        await eventually(lambda: any(line.passed for line in _of(rig, "b")))

        # When it shows that it is not up, after all
        ingest.down = True
        ingest.check_gate.set()

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await claim
        assert from_rpc_error(refused.value).reason == "INGEST_DOWN"
        ingest.down = False
        ingest.fetch_gate.set()
        assert ids_of(await waiting) == LATE[:1]


async def test_a_late_answer_has_only_lines_looked_at_that_passed_its_ingest_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ingest, idle_count = Busy(), 30
    async with running(ingest=ingest) as rig:
        # Given many claims that wait on empty queues, and one for what an ingest has that is late
        for number in range(idle_count):
            await rig.create(f"idle{number}")
        await rig.create()
        idle = [
            asyncio.create_task(rig.claim(f"idle{number}", wait_ms=60_000))
            for number in range(idle_count)
        ]
        await eventually(lambda: len(rig.delivery._waiter_lines) == idle_count)
        await assign(rig, LATE[:1])
        claim = asyncio.create_task(rig.claim(wait_ms=60_000))
        await eventually(lambda: ingest.is_checked)
        stepped: list[WaiterLine] = []
        step = rig.delivery._step

        async def counted(line: WaiterLine, context: Context) -> bool:
            stepped.append(line)
            return await step(line, context)

        monkeypatch.setattr(rig.delivery, "_step", counted)

        # When it shows that it is up, and answers
        ingest.check_gate.set()
        await eventually(lambda: rig.delivery._ingests.can_serve_all)
        ingest.fetch_gate.set()
        assert ids_of(await claim) == LATE[:1]

        # Then only that one line was looked at again
        assert {line.queue.queue_id for line in stepped} == {"q"}
        for each in idle:
            each.cancel()


class _OneDown(Ingest):
    """Ingests of which number 0 is down."""

    async def check(self, shard: int) -> None:
        if not shard:
            raise Unavailable("ingest is down")

    async def fetch(self, shard: int, ids: Sequence[int], max_bytes: int) -> IngestMessages:
        await self.check(shard)
        return await super().fetch(shard, ids, max_bytes)


async def test_claims_that_pass_over_many_messages_of_an_ingest_do_so_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims_count, down_count = 20, TURN
    async with running(ingest=_OneDown()) as rig:
        # Given many claims that wait for many messages of an ingest that is down
        await rig.create()
        await assign(rig, [message_id(0, number) for number in range(1, down_count + 1)])
        claims = [asyncio.create_task(rig.claim(wait_ms=60_000)) for _ in range(claims_count)]
        (line,) = await lines(rig)
        await eventually(lambda: len(line.line) == claims_count and not line.task)
        turns, looks = Turns(), Counter[int]()
        choose = ClaimSelector.choose

        def counted(selector: ClaimSelector, item: AvailableMessage) -> Choice:
            looks[turns.count] += 1
            return choose(selector, item)

        monkeypatch.setattr(ClaimSelector, "choose", counted)

        # When messages of another ingest come, one for each
        in_time = [message_id(1, number) for number in range(1, claims_count + 1)]
        with turns:
            await assign(rig, in_time)
            async with asyncio.timeout(60):
                claimed = await asyncio.gather(*claims)

        # Then they get them, and others had turns between the claims that looked at all the others
        assert sorted(one for each in claimed for one in ids_of(each)) == in_time
        assert sum(looks.values()) > claims_count * down_count
        assert max(looks.values()) < 2 * (down_count + claims_count)


async def test_messages_behind_more_of_an_ingest_that_is_down_than_memory_holds_are_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "CACHED_MAX", 40)
    monkeypatch.setattr(dispatcher, "READ_ON_S", 60)
    ingest = _OneDown()
    async with running(ingest=ingest) as rig:
        await rig.create()
        down = [message_id(0, number) for number in range(1, 201)]
        for at in range(0, 200, 10):
            await assign(rig, down[at : at + 10])
        urgent, others = ([message_id(1, n) for n in range(f, f + 5)] for f in (1, 6))
        await assign(rig, urgent)
        await assign(rig, others, priorities=[200] * 5)
        ingest.gone = {urgent[2]}

        first = await rig.claim(max_messages=100)  # by which the ingest is found to be down
        second = await rig.claim(max_messages=100)

        assert ids_of(first) == [one for one in urgent if one != urgent[2]]
        assert ids_of(second) == others
        assert (await rig.counts())["failed"] == 1
        with pytest.raises(grpc.aio.AioRpcError, match="ingest 0 is down"):
            await rig.claim()
        await assign(rig, [message_id(1, 20)])
        assert ids_of(await rig.claim(wait_ms=20_000)) == [message_id(1, 20)]
        monkeypatch.setattr(_OneDown, "check", Ingest.check)
        assert sorted(ids_of(await rest_of(rig, 200))) == down


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first order of each part read behind what is passed over; parts and memory are small."""
    monkeypatch.setattr(lane, "CACHED_MAX", 40)
    monkeypatch.setattr(loading, "LOAD_MESSAGES", 20)
    return parts_beyond(monkeypatch)


async def _assign_behind(rig: Rig, down_count: int) -> list[int]:
    """Assigns many messages of the ingest that is down, then some of another: these."""
    await rig.create()
    for first in range(1, down_count + 1, 10):
        await assign(rig, [message_id(0, number) for number in range(first, first + 10)])
    behind = [message_id(1, number) for number in range(1, 6)]
    await assign(rig, behind)
    return behind


async def test_other_messages_that_are_back_have_nothing_read_again(
    parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(ingest=_OneDown()) as rig:
        behind = await _assign_behind(rig, 300)
        offer = NeedsBeyond.offer

        def disturbed(need: NeedsBeyond, rows: Sequence[StoredBucket], through: int) -> None:
            offer(need, rows, through)
            rig.delivery._ingest_back(1)  # a message of this ingest that was slow
            for line in _of(rig, "q"):
                rig.delivery._fetch_changed(line)

        monkeypatch.setattr(NeedsBeyond, "offer", disturbed)

        async with asyncio.timeout(60):
            claimed = await rig.claim(max_messages=100, wait_ms=60_000)

        assert ids_of(claimed) == behind
        assert len(parts) > 5
        assert len(set(parts)) == len(parts)


async def test_a_claim_that_waits_no_more_ends_while_others_are_passed_over(
    parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "READ_ON_S", 0)
    async with running(ingest=_OneDown()) as rig:
        behind = await _assign_behind(rig, 300)

        # Each claim reads some more, and the last gets what lies behind
        refused: list[str] = []
        claimed: list[ClaimedMessage] = []
        while not claimed and len(refused) < 50:
            count = len(parts)
            try:
                claimed = await rig.claim(max_messages=100)
            except grpc.aio.AioRpcError as error:
                refused.append(from_rpc_error(error).reason)
            assert len(parts) <= count + 1

        assert ids_of(claimed) == behind
        assert set(refused) == {"INGEST_DOWN"}
        assert len(refused) > 5
        assert len(set(parts)) == len(parts)


def _of(rig: Rig, queue_id: str) -> list[WaiterLine]:
    return [
        line for queue, line in rig.delivery._waiter_lines.items() if queue.queue_id == queue_id
    ]
