"""Which queues a listing shows: judged by the caller's rules, a step at a time."""

from __future__ import annotations

import asyncio

from services.broker.requests.limits import JUDGED_QUEUES, inspectable


async def test_others_have_turns_while_many_queues_are_judged() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    names = [f"queue-{number}" for number in range(5 * JUDGED_QUEUES)]
    assert await inspectable(names) == names
    running.cancel()

    assert turns >= 4
