"""One principal's share of the messages in flight: half, whatever the lines it stands in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest

from libs.access import quotas
from services.broker.delivery.waiters import Waiter, WaiterLine
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import ResourceExhausted
from slatemq.v1 import consumer_pb2
from tests.claimed_runs import ClaimedMessage, messages_of
from tests.forms import seeds
from tests.integration.broker.rpc.test_principal_limits import (
    Caller,
    Limited,
    limited,
    refused,
)
from tests.integration.waiting import eventually

pytestmark = pytest.mark.usefixtures("cheap_hashes")

HELD_UP: Final = (
    "claims on 1 queue wait for acks of their own principals, which have as many messages in "
    "flight as one may"
)


REFUSED: Final = ("TOO_MANY_IN_FLIGHT", "PRINCIPAL_LIMIT")


async def fill(made: Limited, queues: Sequence[str], count: int = 20, **settings: int) -> None:
    for place, queue_id in enumerate(queues):
        await made.ops.create(queue_id, **settings)
        first = 1 + place * count
        await made.rig.assign(range(first, first + count), queue_id)


async def claimed(call: Any) -> list[str]:
    """The tokens of a claim's messages."""
    return [one.lease_token for one in messages_of(await call)]


async def refusal(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.retry_after_ms) == ("TOO_MANY_IN_FLIGHT", 1_000)
    return error.message


def held(made: Limited, principal: str) -> int:
    return made.rig.owner.shard.leases.held_by(principal)


async def lined_up(made: Limited, count: int) -> None:
    lines = made.rig.delivery._waiter_lines
    await eventually(lambda: sum(len(one.line) for one in lines.values()) == count)


async def held_up(made: Limited, count: int) -> None:
    await eventually(lambda: made.rig.delivery.in_flight.held_up_count == count)


async def read(stream: Any) -> list[ClaimedMessage]:
    answer = await stream.read()
    assert isinstance(answer, consumer_pb2.ConsumeResponse)
    return messages_of(answer)


async def test_one_that_acks_nothing_leaves_half_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with limited(tmp_path, settings={"in_flight_max": 9}) as made:
        await fill(made, ["q", "other"])
        in_flight = made.rig.delivery.in_flight

        # Given one that holds what it may
        tokens = await claimed(made.shop.claim(count=20))
        assert len(tokens) == 5
        said = await refusal(made.shop.claim("other", wait_ms=0))
        assert said == (
            "'shop' has 5 messages in flight, as many as one principal may of the broker's "
            "in_flight_max (9): ack some; retry in 1 s"
        )
        # and waits for more, in the line where another one comes behind it
        waiting = made.shop.claim(count=20)
        await held_up(made, 1)
        assert in_flight.note == HELD_UP
        logged = [one.message for one in caplog.records if one.name.endswith("in_flight_limit")]
        assert logged == [said.replace("ack some; retry in 1 s", "it has to ack some")]
        # which no timer has it look for: an ack does
        assert [one.timer for one in made.rig.delivery._waiter_lines.values()] == [None]

        # Then the other one has the rest
        assert len(await claimed(made.ops.claim(count=20))) == 4
        assert not waiting.done()
        # and the one as many as it acks
        await made.rig.ack(*tokens[:2])
        assert len(await claimed(waiting)) == 2
        assert (held(made, "shop"), held(made, "ops"), in_flight.note) == (5, 4, "")


async def test_messages_have_no_line_looked_at_that_may_take_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with limited(tmp_path, settings={"in_flight_max": 4}) as made:
        await fill(made, ["q", "other"])
        tokens = await claimed(made.shop.claim(count=20))
        waiting = [made.shop.claim("other") for _ in range(20)]
        await lined_up(made, 20)
        await held_up(made, 1)
        (line,) = made.rig.delivery._waiter_lines.values()
        await eventually(lambda: line.task is None)  # the last of them was looked at, too
        looks = list[Waiter]()
        is_held_up = made.rig.delivery._is_held_up

        def noted(waiter_line: WaiterLine, waiter: Waiter) -> bool:
            looks.append(waiter)
            return is_held_up(waiter_line, waiter)

        monkeypatch.setattr(made.rig.delivery, "_is_held_up", noted)
        for number in range(5):
            await made.rig.assign([100 + number], "other")
        assert not looks

        # But others in this line, and acks, have it looked at
        assert len(await claimed(made.ops.claim("other"))) == 1
        assert len(looks) >= 20
        await made.rig.ack(*tokens)
        await eventually(lambda: sum(call.done() for call in waiting) == 2)
        for call in waiting:
            call.cancel()


async def test_a_limit_of_the_policy_is_less_than_half(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with limited(tmp_path, settings={"in_flight_max": 9}, in_flight=2) as made:
        await fill(made, ["q", "other", "third"])
        tokens = await claimed(made.shop.claim(count=20))
        assert len(tokens) == 2
        await refused(made.shop.claim("other", wait_ms=0), "in_flight", waits=True)
        assert made.callers.usage.refused == {("in_flight", "shop"): 1}
        waiting = [made.shop.claim(name) for name in ("q", "other")]
        await held_up(made, 2)
        assert made.rig.delivery.in_flight.note == HELD_UP.replace("1 queue", "2 queues")
        assert len(await claimed(made.ops.claim(count=20))) == 5

        # A higher one holds from the next call on, also for those that wait
        made.change(in_flight=4)
        last = made.shop.claim("third")
        for call in waiting:
            assert len(await claimed(call)) == 1
        assert held(made, "shop") == 4
        await held_up(made, 1)
        last.cancel()

        # and a lower one ends no lease
        made.change(in_flight=1)
        await refused(made.shop.claim("other", wait_ms=0), "in_flight", waits=True)
        assert held(made, "shop") == 4
        assert not [one for one in caplog.records if one.name.endswith("in_flight_limit")]


async def test_a_limit_beyond_half_is_half(tmp_path: Path) -> None:
    async with limited(tmp_path, settings={"in_flight_max": 4}, in_flight=4) as made:
        await fill(made, ["q"])
        assert len(await claimed(made.shop.claim(count=20))) == 2
        await refusal(made.shop.claim(wait_ms=0))


@pytest.mark.parametrize("how", ["nack", "purge", "delete", "cancel"])
async def test_what_ends_leases_gives_the_share_back(tmp_path: Path, how: str) -> None:
    async with limited(tmp_path, settings={"in_flight_max": 4}) as made:
        await fill(made, ["q", "other"])
        tokens = await claimed(made.shop.claim(count=20))
        waiting = made.shop.claim("other")
        await held_up(made, 1)

        match how:
            case "nack":
                await made.rig.nack(*tokens)
            case "purge":
                leases, queue = made.rig.owner.shard.leases, made.rig.owner.shard.queues["q"]
                await made.rig.owner.run(lambda _: leases.purge(queue))
            case "delete":
                await made.ops.delete("q")
            case "cancel":
                waiting.cancel()
                await lined_up(made, 0)
                await made.rig.ack(tokens[0])
                waiting = made.shop.claim("other")

        assert len(await claimed(waiting)) == 1
        assert made.rig.delivery.in_flight._shares == {}


async def test_a_stream_with_credit_holds_up_no_other_behind_it(tmp_path: Path) -> None:
    async with limited(tmp_path, settings={"in_flight_max": 8}) as made:
        await made.ops.create("q")
        one = await made.shop.open(credit=100)
        await lined_up(made, 1)
        other = await made.ops.open(credit=100)
        await lined_up(made, 2)

        await made.rig.assign(range(1, 4))
        await made.rig.assign(range(4, 21))
        mine, others = list[ClaimedMessage](), list[ClaimedMessage]()
        while len(mine) < 4:
            mine += await read(one)
        while len(others) < 4:
            others += await read(other)
        assert (held(made, "shop"), held(made, "ops")) == (4, 4)

        await made.rig.ack(*(message.lease_token for message in mine))
        again = list[ClaimedMessage]()
        while len(again) < 4:
            again += await read(one)
        assert (held(made, "shop"), held(made, "ops")) == (4, 4)
        for stream in (one, other):
            stream.cancel()


async def test_queues_of_one_principal_have_turns(tmp_path: Path) -> None:
    async with limited(tmp_path, settings={"in_flight_max": 4}) as made:
        await fill(made, ["q", "other"])
        tokens = await claimed(made.shop.claim(count=2))
        other = made.shop.claim("other")
        await held_up(made, 1)

        again = made.shop.claim(count=2)
        await held_up(made, 2)
        await made.rig.ack(*tokens)

        assert len(await claimed(other)) == 1
        assert len(await claimed(again)) == 1


async def test_leases_from_before_a_restart_are_of_no_principal_and_half_of_the_rest_may_be_had(
    tmp_path: Path,
) -> None:
    data, settings = tmp_path / "data", {"in_flight_max": 8}
    async with limited(tmp_path, data, settings) as made:
        await fill(made, ["q"])
        before = await claimed(made.shop.claim(count=20))
        assert len(before) == 4

    async with limited(tmp_path, data, settings) as made:
        assert len(await claimed(made.shop.claim(count=20))) == 2
        await refusal(made.shop.claim(wait_ms=0))
        assert len(await claimed(made.ops.claim(count=20))) == 2

        # What was from before is for both
        await made.rig.ack(*before)
        assert len(await claimed(made.shop.claim(count=20))) == 2
        assert len(await claimed(made.ops.claim(count=20))) == 2


async def test_without_a_policy_there_are_no_shares(tmp_path: Path) -> None:
    async with limited(tmp_path, settings={"in_flight_max": 8}) as made:
        await fill(made, ["q"])

        # As peers claim, who have no principal either
        assert len(await made.rig.claim(max_messages=20)) == 8


@pytest.mark.parametrize("seed", seeds(2))
async def test_shares_hold_under_the_worst_mix_and_all_messages_come_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Claims and streams of two principals on all queues, of which some come back."""
    monkeypatch.setattr(quotas, "PROMPT_REFUSALS_PER_S", 10_000)
    chance, queues, messages, most = random.Random(seed), 6, 30, 7
    ids = [f"q{number}" for number in range(queues)]
    async with limited(tmp_path, settings={"in_flight_max": most}, in_flight=3) as made:
        await fill(made, ids, messages, max_attempts=1_000)
        peaks = {"shop": 0, "ops": 0}
        finished = asyncio.Event()

        async def watch() -> None:
            while not finished.is_set():
                for name, peak in peaks.items():
                    peaks[name] = max(peak, held(made, name))
                await asyncio.sleep(0)

        async def is_done(queue_id: str) -> bool:
            return (await made.rig.counts(queue_id)).get("done", 0) == messages

        async def claims(caller: Caller, queue_id: str) -> None:
            while not await is_done(queue_id):
                wait_ms, count = chance.choice([0, 5, 50]), chance.randint(1, 5)
                try:
                    tokens = await claimed(caller.claim(queue_id, wait_ms, count=count))
                except grpc.aio.AioRpcError as error:
                    if from_rpc_error(error).reason not in REFUSED:
                        raise
                    continue
                if tokens and chance.randrange(5) == 0:
                    await made.rig.nack(*tokens, delay_ms=0)
                elif tokens:
                    await made.rig.ack(*tokens)

        async def streams(caller: Caller, queue_id: str) -> None:
            stream = await caller.open(queue_id, credit=1_000)
            while True:
                await made.rig.ack(*(one.lease_token for one in await read(stream)))

        callers = made.shop, made.ops
        beside = [asyncio.create_task(streams(one, ids[0])) for one in callers]
        beside.append(asyncio.create_task(watch()))
        async with asyncio.timeout(120):
            await asyncio.gather(*(claims(one, queue_id) for queue_id in ids for one in callers))
        finished.set()
        assert not any(task.done() for task in beside[:-1])
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)

        assert 0 < peaks["shop"] <= 3
        assert 0 < peaks["ops"] <= 4
        assert made.rig.delivery.in_flight._shares == {}
