"""How many changes of queues a broker lets through."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.broker.shard.change_pace import ChangePace
from slatemq.errors import ResourceExhausted


async def test_a_few_changes_come_at_once_and_the_others_in_the_order_of_their_calls() -> None:
    pace, turns = ChangePace(per_s=200), list[int]()
    began_s = asyncio.get_running_loop().time()

    async def change(number: int) -> None:
        await pace.turn()
        turns.append(number)

    await asyncio.gather(*(change(number) for number in range(20)))
    at_once = list(turns)
    await asyncio.gather(*(change(number) for number in range(20, 32)))

    assert at_once == list(range(20))
    assert turns == list(range(32))
    # The bound below does not depend on the machine: the limit is what makes it last.
    assert asyncio.get_running_loop().time() - began_s > 11 / 200


async def test_a_late_caller_does_not_pass_those_who_wait() -> None:
    # Given callers that wait, and a loop that then stands still for several turns
    pace, turns = ChangePace(per_s=20), list[int]()

    async def change(number: int) -> None:
        await pace.turn()
        turns.append(number)

    waiting = [asyncio.create_task(change(number)) for number in range(4)]
    while len(turns) < 2:
        await asyncio.sleep(0)
    time.sleep(0.15)  # noqa: ASYNC251 - the event loop itself must stand still

    # When another one comes
    await change(4)
    await asyncio.gather(*waiting)

    # Then it has its turn behind the others
    assert turns == [0, 1, 2, 3, 4]


async def test_a_caller_who_would_wait_too_long_is_refused_and_takes_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a clock that stands still
    now_s = [asyncio.get_running_loop().time()]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])
    pace = ChangePace(per_s=2, wait_s=0)
    await pace.turn()

    with pytest.raises(ResourceExhausted) as refusal:
        await pace.turn()
    assert refusal.value.reason == "QUEUE_CHANGES"
    assert refusal.value.retry_after_ms

    now_s[0] += 0.5
    await pace.turn()
