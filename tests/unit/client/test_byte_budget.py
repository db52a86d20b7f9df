"""A budget of bytes: what fits is reserved at once, the rest waits in line."""

from __future__ import annotations

import asyncio

import pytest

from slatemq._byte_budget import ByteBudget
from slatemq.errors import Unavailable


def test_what_fits_is_reserved_at_once_and_one_that_never_fits_alone() -> None:
    budget = ByteBudget(100)

    assert budget.try_reserve(60)
    assert budget.try_reserve(40)
    assert not budget.try_reserve(1)
    budget.release(100)
    assert budget.try_reserve(1_000)
    assert not budget.try_reserve(1)
    budget.release(1_000)
    assert budget.used_bytes == 0


async def test_those_who_wait_get_theirs_in_the_order_in_which_they_asked() -> None:
    budget = ByteBudget(100)
    assert budget.try_reserve(80)
    order: list[int] = []

    async def ask(size_bytes: int) -> None:
        await budget.reserve(size_bytes)
        order.append(size_bytes)

    waiting = [asyncio.create_task(ask(size_bytes)) for size_bytes in (90, 15, 5)]
    await asyncio.sleep(0)

    # A small one that would fit does not overtake
    assert not budget.try_reserve(5)
    assert order == []

    budget.release(80)
    await asyncio.gather(waiting[0])
    assert order == [90]
    budget.release(90)
    await asyncio.gather(*waiting)
    assert order == [90, 15, 5]
    assert budget.used_bytes == 20


@pytest.mark.parametrize("is_granted", [False, True])
async def test_one_that_gives_up_leaves_nothing_reserved(is_granted: bool) -> None:
    budget = ByteBudget(100)
    assert budget.try_reserve(100)
    first = asyncio.create_task(budget.reserve(50))
    second = asyncio.create_task(budget.reserve(50))
    await asyncio.sleep(0)

    if is_granted:
        budget.release(100)  # The first has its bytes and does not know it yet.
    first.cancel()
    if not is_granted:
        budget.release(100)

    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert budget.used_bytes == 50


async def test_one_that_gives_up_lets_smaller_ones_behind_it_in() -> None:
    budget = ByteBudget(100)
    assert budget.try_reserve(60)
    large = asyncio.create_task(budget.reserve(90))
    small = asyncio.create_task(budget.reserve(10))
    await asyncio.sleep(0)

    large.cancel()

    await small
    assert budget.used_bytes == 70


async def test_all_that_wait_can_be_refused() -> None:
    budget = ByteBudget(10)
    assert budget.try_reserve(10)
    waiting = [asyncio.create_task(budget.reserve(5)) for _ in range(2)]
    await asyncio.sleep(0)

    budget.refuse(Unavailable("closed"))

    for one in waiting:
        with pytest.raises(Unavailable):
            await one
    budget.release(10)
    assert budget.try_reserve(10)
