"""Purges and deletions of queues with very many leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from services.broker.core.commands import Finish, Purge
from services.broker.core.leases import Lease
from tests.unit.broker.core.shards import Rig

COUNT = 100_000

CLAIM = 10_000

STEP_MS = 200
"""Processor time of the step at most: it takes some 40 ms, and took 400 to 4,000 lease by lease."""


async def full(*, restarted: bool) -> tuple[Rig, list[int]]:
    """A queue with all that it may have in flight, and some of the lease tokens."""
    rig = Rig()
    rig.create()
    some: list[Lease] = []
    for first in range(1, COUNT, CLAIM):
        await rig.route([*range(first, first + CLAIM)])
        while len(leases := await rig.claim(CLAIM)):
            some += leases[-1:]
        rig.commit()
    if restarted:
        await rig.restart()
    assert rig.shard.leases.in_flight_count == COUNT
    return rig, [lease.token for lease in some]


def worked_ms(step: Callable[[], object]) -> float:
    """The processor time that a step takes of this thread."""
    began_ns = time.thread_time_ns()
    step()
    return (time.thread_time_ns() - began_ns) / 1e6


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_purge_of_all_that_is_in_flight_is_one_short_step(restarted: bool) -> None:
    for _ in range(3):  # Beside other work a step takes longer now and then.
        rig, tokens = await full(restarted=restarted)
        took_ms = worked_ms(partial(rig.shard.purge, rig.queue(), [Purge.IN_FLIGHT]))
        if took_ms < STEP_MS:
            break

    assert took_ms < STEP_MS
    assert rig.shard.leases.in_flight_count == rig.queue().leases.count == 0
    assert rig.shard.leases.ack(tokens, rig.now_ms) == [Finish.ENDED] * len(tokens)
    # And it stays so, also across a restart
    rig.commit()
    await rig.restart()
    assert rig.shard.leases.in_flight_count == 0


@pytest.mark.parametrize("restarted", [False, True])
async def test_the_deletion_of_a_queue_ends_all_that_is_in_flight_and_touches_no_other(
    restarted: bool,
) -> None:
    rig, tokens = await full(restarted=restarted)
    rig.create("other")
    await rig.route([COUNT + 1], queue_id="other")
    (other,) = await rig.claim(1, queue_id="other")

    rig.shard.delete_queue(rig.queue())

    assert rig.shard.leases.in_flight_count == 1
    results = rig.shard.leases.ack([*tokens, other.token], rig.now_ms)
    assert results == [Finish.UNKNOWN] * len(tokens) + [Finish.OK]
