"""Limits of principals, by a clock of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libs.access.policy import Limits, Policy
from libs.access.principals import Principal
from libs.access.quotas import (
    HELD_MAX,
    PROMPT_REFUSALS_PER_S,
    RETRY_MS_MAX,
    CallSlot,
    PrincipalQuota,
    Quantity,
    RateQuota,
    Usage,
)
from libs.documents import Document
from slatemq.errors import InvalidArgument, ResourceExhausted
from tests.manual_clock import ManualSeconds


@given(
    per_s=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 3)), min_size=1, max_size=60),
)
def test_over_any_time_no_more_passes_than_the_rate_and_one_batch(
    per_s: int, steps: list[tuple[int, float]]
) -> None:
    clock = ManualSeconds(100.0)
    quota = RateQuota(per_s, clock)
    passed = largest = 0

    for count, pause_s in steps:
        if not quota.wait_ms():
            quota.take(count)
            passed += count
            largest = max(largest, count)
        clock.now_s += pause_s

    seconds = clock.now_s - 100.0
    assert passed <= per_s * (1 + seconds) + largest + 1e-6


@given(per_s=st.integers(1, 1000), count=st.integers(1, 100_000))
@example(per_s=50, count=452)
def test_after_the_named_time_it_passes_again(per_s: int, count: int) -> None:
    clock = ManualSeconds(100.0)
    quota = RateQuota(per_s, clock)
    quota.take(count)
    wait_ms = quota.wait_ms()

    clock.now_s += wait_ms / 1000

    assert quota.wait_ms() == 0
    assert wait_ms <= max(0, count - per_s) / per_s * 1000 + 2


@given(per_s=st.integers(1, 1000), size=st.integers(1, 3000), callers=st.integers(2, 50))
def test_those_who_wait_as_they_are_asked_to_have_room_one_after_the_other(
    per_s: int, size: int, callers: int
) -> None:
    clock = ManualSeconds(100.0)
    quota = RateQuota(per_s, clock)
    while not quota.wait_ms():
        quota.take(size)

    waits_ms = [quota.promise_ms() for _ in range(callers)]

    begun_s = clock.now_s
    for wait_ms in waits_ms:
        if wait_ms == RETRY_MS_MAX:
            break  # None is asked to wait for longer.
        clock.now_s = begun_s + wait_ms / 1000 + 1e-6
        assert quota.wait_ms() == 0
        quota.take(size)
    assert waits_ms == sorted(waits_ms)


def test_turns_that_were_not_taken_are_over() -> None:
    clock = ManualSeconds(100.0)
    quota = RateQuota(10, clock)
    quota.take(20)
    assert [quota.promise_ms() for _ in range(3)] == [1001, 3001, 5001]

    clock.now_s += 60
    assert quota.wait_ms() == 0
    quota.take(20)

    assert quota.promise_ms() == 1001


def test_a_publish_beyond_the_limit_is_refused_with_the_time_to_wait() -> None:
    clock = ManualSeconds(100.0)
    quota = PrincipalQuota("shop", Limits(publish_messages_per_s=10), clock)
    quota.publish(25, 0)

    with pytest.raises(ResourceExhausted) as caught:
        quota.publish(1, 0)

    error = caught.value
    assert (error.reason, error.retry_after_ms) == ("PRINCIPAL_LIMIT", 1501)
    assert (
        error.message == "'shop' has reached its limit publish_messages_per_s = 10; retry in 1.5 s"
    )
    clock.now_s += 1.501
    quota.publish(1, 0)


async def test_calls_have_their_turns_one_after_the_other_and_few_wait() -> None:
    clock = ManualSeconds(100.0)
    quota = PrincipalQuota("shop", Limits(calls_per_s=20), clock)
    turns: list[int] = []

    async def call(number: int) -> None:
        await quota.pace(None)
        turns.append(number)

    # One second's at once
    for number in range(20):
        await call(number)
    assert not quota.is_idle

    # Then each in its turn; one that is cancelled has had its own
    waiting = [asyncio.create_task(call(number)) for number in range(20, 40)]
    await asyncio.sleep(0)
    for task in waiting[3:]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert turns == list(range(23))

    # Refused is who would wait for too long, or for longer than is left to it
    for most_s in (None, 60.0):
        with pytest.raises(ResourceExhausted, match="calls_per_s = 20") as caught:
            await quota.pace(most_s)
    assert caught.value.retry_after_ms is not None
    clock.now_s += 0.95
    with pytest.raises(ResourceExhausted, match="calls_per_s = 20"):
        await quota.pace(0.04)
    await quota.pace(60.0)


def test_one_rate_that_is_used_up_does_not_use_up_the_other() -> None:
    clock, usage = ManualSeconds(100.0), Usage()
    limits = Limits(principals=("s*",), publish_messages_per_s=10, publish_bytes_per_s=1000)
    quota = PrincipalQuota("shop", limits, clock, usage)
    quota.publish(1, 5000)

    for _ in range(20):
        with pytest.raises(ResourceExhausted, match="publish_bytes_per_s"):
            quota.publish(9, 1)

    clock.now_s += 5
    quota.publish(9, 1)
    assert usage.refused == {("publish_bytes_per_s", "s*"): 20}


def test_other_limits_hold_at_once_and_equal_ones_change_nothing() -> None:
    clock = ManualSeconds(100.0)
    quota = PrincipalQuota("shop", Limits(publish_messages_per_s=10), clock)
    quota.publish(25, 0)
    idle = [quota.is_idle]

    quota.set_limits(Limits(publish_messages_per_s=10))
    with pytest.raises(ResourceExhausted):
        quota.publish(1, 0)
    quota.set_limits(Limits())
    quota.publish(1_000_000, 0)

    idle.append(quota.is_idle)
    assert idle == [False, True]


def test_the_first_entry_with_the_name_has_the_limits() -> None:
    policy = Policy(
        Document(
            "policy.yaml",
            "limits:\n"
            "  - {principals: [shop-a], publish_messages_per_s: 7}\n"
            "  - {principals: ['shop-*'], publish_bytes_per_s: 3}\n",
        )
    )

    assert policy.limits(Principal("shop-a", "token")).publish_messages_per_s == 7
    assert policy.limits(Principal("shop-a", "token")).publish_bytes_per_s is None
    assert policy.limits(Principal("shop-b", "token")).publish_bytes_per_s == 3
    assert policy.limits(Principal("other", "token")).publish_bytes_per_s is None


PLACES: Final[tuple[CallSlot, ...]] = get_args(CallSlot)


@given(
    most=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(PLACES), st.integers(-1, 5)), max_size=60),
)
def test_no_more_places_are_taken_than_there_are_and_all_are_given_back(
    most: int, steps: list[tuple[CallSlot, int]]
) -> None:
    usage = Usage()
    limits = Limits(principals=("shop",), open_streams=most, waiting_claims=most)
    quota = PrincipalQuota("shop", limits, ManualSeconds(100.0), usage)
    taken: list[tuple[CallSlot, AbstractContextManager[None]]] = []

    for kind, left in steps:  # -1 takes a place; others give one back, in any order
        if left < 0:
            place: AbstractContextManager[None] = quota.place(kind)
            if sum(one == kind for one, _ in taken) < most:
                place.__enter__()
                taken.append((kind, place))
                continue
            with pytest.raises(ResourceExhausted) as caught:
                place.__enter__()
            assert caught.value.reason == "PRINCIPAL_LIMIT"
            assert caught.value.metadata == {"limit": kind}
            assert caught.value.retry_after_ms
        elif taken:
            taken.pop(left % len(taken))[1].__exit__(None, None, None)
        for one in PLACES:
            assert usage.open[one, "shop"] == sum(kind == one for kind, _ in taken)
    for _, one_left in taken:
        # Where a call fails, too.
        with suppress(ZeroDivisionError), place_of(one_left):
            raise ZeroDivisionError
    assert not usage.open.total()
    assert quota.is_idle


def limits_of(values: Mapping[str, Any]) -> Limits:
    return Limits(**values)


class place_of:  # noqa: N801 - it stands for a context manager that was entered before
    def __init__(self, place: AbstractContextManager[None]) -> None:
        self._place = place

    def __enter__(self) -> None:
        """It was entered."""

    def __exit__(self, *error: object) -> None:
        self._place.__exit__(*error)  # type: ignore[arg-type]


def test_places_taken_before_a_lower_limit_stay_and_count() -> None:
    usage = Usage()
    quota = PrincipalQuota("shop", Limits(), ManualSeconds(100.0), usage)
    with quota.place("open_streams"), quota.place("open_streams"):
        quota.set_limits(Limits(principals=("shop",), open_streams=2))
        with (
            pytest.raises(ResourceExhausted, match="open_streams = 2"),
            quota.place("open_streams"),
        ):
            pytest.fail("there is no room")
        assert usage.open == {("open_streams", ""): 2}
    with quota.place("open_streams"):
        assert usage.open == {("open_streams", ""): 0, ("open_streams", "shop"): 1}


@pytest.mark.parametrize("kind", get_args(Quantity))
def test_what_stays_may_shrink_beyond_its_limit_but_not_grow(kind: Quantity) -> None:
    quota = PrincipalQuota("shop", limits_of({kind: 10}), ManualSeconds(100.0))

    quota.hold(kind, 10)
    quota.hold(kind, 15, 15)
    quota.hold(kind, 14, 15)
    for before in (0, 10, 15):
        with pytest.raises(ResourceExhausted, match=f"{kind} = 10: 16 are wanted; ") as caught:
            quota.hold(kind, 16, before)
        assert caught.value.retry_after_ms is None


async def test_answers_to_one_that_is_refused_too_often_are_held_back_and_not_too_many() -> None:
    clock = ManualSeconds(100.0)
    quota = PrincipalQuota("shop", Limits(), clock)

    # Those of a second at once
    async def refused(limit: str = "open_streams") -> None:
        await quota.hold_back(limit, 3600)

    for _ in range(PROMPT_REFUSALS_PER_S):
        await refused()

    # More are held, up to a number
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(refused()) for _ in range(HELD_MAX)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in held)
        await refused()
        # So are those by another limit
        await refused("waiting_claims")
        # Those who do not wait for their answer leave room
        held[0].cancel()
        await asyncio.wait([held[0]])
        held.append(group.create_task(refused()))
        await asyncio.sleep(0)
        assert not held[-1].done()
        for task in held:
            task.cancel()

    # What is over is forgotten
    clock.now_s += 10
    await refused()


@pytest.mark.parametrize(
    "entry",
    [
        "{principals: [a], publish_messages_per_s: 0}",
        "{principals: [a], claims: 1}",
        "{}",
        "{principals: [a], queues: -1}",
        "{principals: [a], filter_cost: 1.5}",
    ],
)
def test_a_bad_limit_is_refused(entry: str) -> None:
    with pytest.raises(InvalidArgument, match=r"line 2 of policy\.yaml"):
        Policy(Document("policy.yaml", f"limits:\n  - {entry}\n"))
