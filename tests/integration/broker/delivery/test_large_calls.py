"""Calls of ten thousand leases: in steps, between which others have their turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from google.rpc.status_pb2 import Status

from services.broker.core.lease_table import LeaseTable
from services.broker.outbox import executor
from services.broker.outbox import executor as execute_conversion
from services.broker.outbox import sender as outbox_sender
from services.broker.outbox.executor import COMMANDS_MAX
from services.broker.rpc import consumer
from services.broker.rpc.consumer import MESSAGES_MAX, RUN_MAX, STEP_LEASES
from slatemq._rpc.rpc_status import to_status
from slatemq.errors import SlateMQError
from slatemq.v1 import consumer_pb2
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.rig import Rig, running
from tests.integration.waiting import eventually
from tests.turns import Turns

OK = 0
COUNT = MESSAGES_MAX


async def leased(rig: Rig) -> list[str]:
    await rig.create(max_attempts=2)
    await rig.assign(range(1, COUNT + 1))
    tokens: list[str] = []
    while len(tokens) < COUNT:
        tokens += [one.lease_token for one in await rig.claim(max_messages=COUNT - len(tokens))]
    return tokens


class Spy:
    """Sees how many leases each step of a command has, and whether another task has turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.sizes: list[int] = []
        self.seen_turns: list[int] = []
        self._turns = 0
        self._other = asyncio.create_task(self._take_turns())
        command = getattr(LeaseTable, name)

        def step(leases: LeaseTable, items: Sequence[Any], *rest: Any) -> Any:
            done = command(leases, items, *rest)  # or it must read first, and runs again
            self.sizes.append(len(items))
            self.seen_turns.append(self._turns)
            return done

        monkeypatch.setattr(LeaseTable, name, step)

    async def _take_turns(self) -> None:
        while True:
            self._turns += 1
            await asyncio.sleep(0)

    def check(self) -> None:
        self._other.cancel()
        assert max(self.sizes) <= STEP_LEASES
        assert sum(self.sizes) == COUNT
        assert len(set(self.seen_turns)) == len(self.sizes), "another task had a turn after each"


async def test_leases_are_given_back_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as rig:
        tokens = await leased(rig)
        items = [consumer_pb2.NackItem(lease_token=one, reason="no") for one in tokens]
        spy = Spy(monkeypatch, "nack")
        answer = await rig.consumers.Nack(consumer_pb2.NackRequest(items=items))
        spy.check()
        assert [one.code for one in answer.results] == [OK] * COUNT
        assert await rig.counts() == {"available": COUNT}


async def test_leases_are_extended_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as rig:
        tokens = await leased(rig)
        rig.clock.advance(1000)
        spy = Spy(monkeypatch, "extend")
        request = consumer_pb2.ExtendLeaseRequest(lease_tokens=tokens, lease_ms=60_000)
        answer = await rig.consumers.ExtendLease(request)
        spy.check()
        assert {one.status.code for one in answer.results} == {OK}
        assert {one.lease_deadline_ms for one in answer.results} == {rig.clock.now_ms() + 60_000}


async def test_a_nack_with_one_unsound_item_gives_nothing_back() -> None:
    async with running() as rig:
        tokens = await leased(rig)
        items = [consumer_pb2.NackItem(lease_token=one) for one in tokens]
        items[-1].reason = "x" * 1025
        with pytest.raises(Exception, match=rf"items\[{COUNT - 1}\]\.reason"):
            await rig.consumers.Nack(consumer_pb2.NackRequest(items=items))
        assert await rig.counts() == {"in_flight": COUNT}


REFUSED = COUNT - 1
FOREIGN, BAD = "1-{:016x}", "no token {}"


@pytest.mark.parametrize("refused", [FOREIGN, BAD])
@pytest.mark.parametrize("kind", ["ack", "ack of runs", "nack", "extend"])
async def test_tokens_are_refused_in_steps(
    kind: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, looks = Turns(), Counter[int]()

    def counted(error: SlateMQError) -> Status:
        looks[turns.count] += 1
        return to_status(error)

    async with running() as rig:
        # Given one token that is good, behind many that are not
        await rig.create()
        await rig.assign([1])
        (claimed,) = await rig.claim()
        tokens = [*map(refused.format, range(REFUSED)), claimed.lease_token]
        monkeypatch.setattr(consumer, "to_status", counted)

        with turns:
            codes = await answers(rig, kind, tokens)

        # Then each is answered for itself, and another task had a turn after each step
        assert codes.count(OK) == 1
        assert codes[-1] == OK
        assert len(codes) == sum(looks.values()) + 1 == COUNT
        assert max(looks.values()) <= STEP_LEASES


async def answers(rig: Rig, kind: str, tokens: Sequence[str]) -> list[int]:
    """The codes of one call with all of these tokens."""
    match kind:
        case "ack":
            return await rig.ack(*tokens)
        case "nack":
            return await rig.nack(*tokens)
        case "extend":
            extend = consumer_pb2.ExtendLeaseRequest(lease_tokens=tokens)
            extended = await rig.consumers.ExtendLease(extend)
            return [one.status.code for one in extended.results]
    runs = [consumer_pb2.LeaseRun(lease_token=token, count=1) for token in tokens]
    acked = await rig.consumers.Ack(consumer_pb2.AckRequest(runs=runs))
    return [one.code for one in acked.results]


async def test_an_ack_with_one_unsound_run_finishes_nothing() -> None:
    async with running() as rig:
        tokens = (await leased(rig))[: STEP_LEASES + 2]
        runs = [consumer_pb2.LeaseRun(lease_token=one, count=1) for one in tokens]
        runs[-1].count = RUN_MAX  # more than its block has from there on
        with pytest.raises(Exception, match=rf"runs\[{STEP_LEASES + 1}\]\.count"):
            await rig.consumers.Ack(consumer_pb2.AckRequest(runs=runs))
        assert await rig.counts() == {"in_flight": COUNT}


async def test_commands_are_checked_and_encoded_and_their_pushes_sent_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns, checked, encoded, sent = Turns(), Counter[int](), Counter[int](), Counter[int]()
    draft, final, pushed = (
        execute_conversion._draft,
        execute_conversion.final,
        outbox_sender.pushed_message,
    )

    def count_draft(*args: Any) -> Any:
        checked[turns.count] += 1
        return draft(*args)

    def count_final(one: Any) -> Any:
        encoded[turns.count] += 1
        return final(one)

    def count_pushed(row: Any) -> Any:
        sent[turns.count] += 1
        return pushed(row)

    monkeypatch.setattr(execute_conversion, "_draft", count_draft)
    monkeypatch.setattr(executor, "final", count_final)
    monkeypatch.setattr(outbox_sender, "pushed_message", count_pushed)
    push = consumer_pb2.PushCommand(queue_id="q", payload=b"x", headers={"a": "b"})
    commands = [consumer_pb2.Command(push=push)] * COMMANDS_MAX
    pushes = Pushes()
    async with running(pushes=pushes) as rig:
        await rig.create()
        with turns:
            await rig.consumers.Execute(consumer_pb2.ExecuteRequest(commands=commands))
            await eventually(lambda: len(pushes.stored.get(0, ())) == COMMANDS_MAX)
    for seen in (checked, encoded, sent):
        assert sum(seen.values()) == COMMANDS_MAX
        assert max(seen.values()) <= 100
