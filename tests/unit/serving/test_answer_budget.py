"""Shares of the delivery budget: none is so large that the others get nothing."""

from __future__ import annotations

import asyncio

import pytest

from libs.serving.requests import budget as budgets
from libs.serving.requests.budget import SMALL_BYTES, AnswerBudget

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
