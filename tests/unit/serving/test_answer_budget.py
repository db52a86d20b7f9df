"""Shares of the delivery budget: none is so large that the others get nothing."""

from __future__ import annotations

import asyncio

import pytest

from libs.serving.requests import budget as budgets
from libs.serving.requests.budget import SMALL_BYTES, AnswerBudget
from slatemq.errors import ResourceExhausted

BYTES_MAX = 128 << 20


async def test_what_many_hold_without_end_leaves_most_of_the_rest_to_the_next() -> None:
    budget = AnswerBudget(BYTES_MAX, "answers_bytes_max")
    for _ in range(10):
        async with budget.fetching(BYTES_MAX) as size_bytes:
            budget.take(size_bytes)
        assert size_bytes <= (BYTES_MAX - budget.used_bytes + size_bytes) // 4

    assert BYTES_MAX - budget.used_bytes > 7 << 20


async def test_a_full_budget_lets_one_small_fetch_at_a_time_go_beyond_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "WAIT_S", 0)
    budget = AnswerBudget(BYTES_MAX, "answers_bytes_max")
    budget.take(BYTES_MAX)
    most = 0

    async def fetch() -> int:
        nonlocal most
        async with budget.fetching(BYTES_MAX) as size_bytes:
            most = max(most, budget.used_bytes)
            await asyncio.sleep(0)
            return size_bytes

    sizes = await asyncio.gather(*(fetch() for _ in range(10)))

    assert sizes == [SMALL_BYTES] * 10
    assert (most, budget.used_bytes) == (BYTES_MAX + SMALL_BYTES, BYTES_MAX)


async def test_a_fetch_that_waits_gets_its_share_when_another_ends() -> None:
    budget = AnswerBudget(BYTES_MAX, "answers_bytes_max")
    budget.take(BYTES_MAX)
    entered = asyncio.Event()

    async def fetch() -> int:
        async with budget.fetching(1 << 20) as size_bytes:
            entered.set()
            return size_bytes

    waiting = asyncio.create_task(fetch())
    await asyncio.sleep(0)
    assert not entered.is_set()
    budget.release(BYTES_MAX)

    assert await waiting == SMALL_BYTES
    assert budget.used_bytes == 0


async def test_beyond_a_full_budget_fetches_wait_for_none_of_another_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "WAIT_S", 0)
    budget = AnswerBudget(BYTES_MAX, "answers_bytes_max")
    budget.take(BYTES_MAX)

    pages, claims = budget.fetching(BYTES_MAX, "entries"), budget.fetching(BYTES_MAX)
    async with asyncio.timeout(60), pages, claims as size_bytes:
        assert size_bytes == SMALL_BYTES


async def test_fetches_of_one_principal_at_once_take_half_and_wait_for_more() -> None:
    budget = AnswerBudget(BYTES_MAX, "answers_bytes_max")
    go_on = asyncio.Event()
    sizes: list[int] = []

    async def fetch() -> None:
        async with budget.fetching(BYTES_MAX, principal="shop") as size_bytes:
            sizes.append(size_bytes)
            await go_on.wait()

    fetches = [asyncio.create_task(fetch()) for _ in range(24)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert sum(sizes) == budget.used_by("shop") == budget.used_bytes == BYTES_MAX // 2
    assert budget.share_of("other") == budget.share_bytes == BYTES_MAX // 8

    # Not the principal's: what it has not read is not beyond its half
    budget.admit("shop")
    go_on.set()
    await asyncio.gather(*fetches)
    assert len(sizes) == 24
    assert (budget.used_bytes, budget._halves) == (0, {})


async def test_fetches_of_a_principal_that_reads_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "WAIT_S", 0)
    budget = AnswerBudget(BYTES_MAX, "answers_bytes_max")

    async def fetch(principal: str) -> None:
        async with budget.fetching(BYTES_MAX, principal=principal) as size_bytes:
            await asyncio.sleep(0)
        budget.hold(size_bytes, principal)

    outcomes = await asyncio.gather(*(fetch("shop") for _ in range(24)), return_exceptions=True)

    refused = [one for one in outcomes if isinstance(one, ResourceExhausted)]
    assert {one.reason for one in refused} == {"UNREAD_ANSWERS"}
    assert len(refused) == sum(one is not None for one in outcomes)
    assert budget.used_by("shop") == BYTES_MAX // 2

    # Others have the rest, and where there is no policy, all
    await asyncio.gather(*(fetch("") for _ in range(24)))
    assert budget.used_bytes > BYTES_MAX * 9 // 10


async def test_messages_larger_than_what_was_reserved_are_refused_beyond_the_half() -> None:
    budget = AnswerBudget(BYTES_MAX, "answers_bytes_max")
    refused_count = 0

    async def fetch_large() -> None:
        nonlocal refused_count
        async with budget.fetching(1, principal="shop"):
            await asyncio.sleep(0)
        try:
            budget.hold(1 << 20, "shop")
        except ResourceExhausted:
            refused_count += 1

    await asyncio.gather(*(fetch_large() for _ in range(100)))

    held_bytes = budget.used_by("shop")
    assert BYTES_MAX // 2 < held_bytes <= (BYTES_MAX // 2) + (1 << 20) + 100
    assert refused_count == 100 - (held_bytes >> 20)


async def test_a_fetch_that_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    budget = AnswerBudget(BYTES_MAX, "answers_bytes_max")
    budget.take_for("shop", BYTES_MAX // 2)

    async def fetch() -> None:
        async with budget.fetching(BYTES_MAX, principal="shop"):
            pass

    fetching = asyncio.create_task(fetch())
    await asyncio.sleep(0)
    budget.release_for("shop", BYTES_MAX // 2)
    fetching.cancel()  # just when it was granted
    with pytest.raises(asyncio.CancelledError):
        await fetching

    assert (budget.used_bytes, budget._halves) == (0, {})
