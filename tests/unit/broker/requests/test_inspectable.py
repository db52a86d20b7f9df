"""Which queues a listing shows: judged by the caller's rules, a step at a time."""

from __future__ import annotations

from services.broker.requests.limits import JUDGED_QUEUES, inspectable
from tests.turns import Turns


async def test_others_have_turns_while_many_queues_are_judged() -> None:
    names = [f"queue-{number}" for number in range(5 * JUDGED_QUEUES)]
    with Turns() as turns:
        assert await inspectable(names) == names

    assert turns.count >= 4
