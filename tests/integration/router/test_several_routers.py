"""Several routers share the logs, and step in for one another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.serving.peers.topology import Peer
from services.router.reserve import is_first
from tests.integration.router.stack import Stack, peers
from tests.integration.waiting import eventually

ROUTERS = (0, 1)
FIRST, OTHER = sorted(ROUTERS, key=lambda one: not is_first(one, ROUTERS, 0))


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with peers(tmp_path) as running:
        for number in ROUTERS:
            await running.directory.announce(Peer("router", number, f"127.0.0.1:{1 + number}"))
        await running.shard.set_queue("all", "true")
        yield running


async def publish_one(stack: Stack, ids: list[int]) -> None:
    """Publish a message, add its ID, and wait until all of them are assigned."""
    ids += await stack.log.publish([{}])
    await eventually(lambda: stack.got("all") == ids)


async def test_the_first_router_of_a_log_assigns_and_the_other_one_calls_for_nothing(
    stack: Stack,
) -> None:
    async with stack.router(number=OTHER) as other, stack.router(number=FIRST):
        await eventually(lambda: other.is_routing)
        ids: list[int] = []
        for _ in range(20):
            await publish_one(stack, ids)

        # The other one has let go of what was assigned, without a call of its own
        await eventually(lambda: [one.cursor for one in other.progress()] == [ids[-1]])
        assert [one.pending_count for one in other.progress()] == [0]
    assert stack.shard.calls_count == len(ids)
    assert stack.shard.refused_count == 0


async def test_another_router_steps_in_for_one_that_is_gone_and_back_when_it_returns(
    stack: Stack,
) -> None:
    async with stack.router(number=OTHER):
        # Given a first router that is in the topology and does not run
        ids: list[int] = []
        await publish_one(stack, ids)

        # When it runs again, beside the one that has stepped in
        async with stack.router(number=FIRST) as first:
            await eventually(lambda: first.is_routing)
            while not stack.shard.refused_count:
                await publish_one(stack, ids)

        # Then each message came once, and still does when it is gone once more
        await publish_one(stack, ids)


async def test_a_router_learns_that_another_one_has_passed_over_what_is_gone(
    stack: Stack,
) -> None:
    # Given a log of which nothing is left
    ids = await stack.log.publish([{}])
    stack.log.remove(ids[-1])

    # When two routers read it, then both say that the broker is at its end
    async with stack.router(number=OTHER) as other, stack.router(number=FIRST) as first:
        await eventually(lambda: [one.cursor for one in first.progress()] == ids)
        await eventually(lambda: [one.cursor for one in other.progress()] == ids)
    assert stack.got("all") == []
    assert stack.shard.refused_count == 0
