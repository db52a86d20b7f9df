"""The rows of a queue that move with it, beside those of a queue that was never changed."""

from __future__ import annotations

from pathlib import Path

from tests.integration.broker.entries.test_history_moves import ATTEMPTS, outcomes
from tests.integration.broker.entry_calls import FAILED, fail, listed
from tests.integration.broker.moves.movers import (
    claimed,
    move,
    route,
    two_brokers,
)
from tests.integration.broker.moves.test_beside_moves import purge
from tests.integration.broker.rig import Rig
from tests.integration.waiting import eventually


def has_garbage(rig: Rig) -> bool:
    """Whether rows from before a purge are there, which a move waits for."""
    queue = rig.owner.shard.queues["q"]
    return bool(queue.garbage_epochs or queue.waiting.garbage_epochs)


async def test_what_came_to_a_queue_since_it_was_purged_moves_with_it(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        # Given a queue that was purged, and has messages that came since
        await first.create()
        await route(first, 10, q=[1, 2, 3])
        await purge(first)
        await route(first, 20, q=[11, 12, 13])
        await route(second, 20)

        await eventually(lambda: not has_garbage(first))
        await move(first, second)

        assert (await claimed(second)).keys() == {11, 12, 13}


async def test_the_attempts_of_dead_letters_move_with_them(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await first.create(max_attempts=1)
        await fail(first, [1, 2], "broken")
        await route(second, max(first.owner.shard.cursors.values()))

        await move(first, second)

        entries = await listed(second, FAILED, view=ATTEMPTS)
        assert [outcomes(one) for one in entries] == [[("q", "nack: broken")]] * 2
