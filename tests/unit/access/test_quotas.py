"""Limits of principals, by a clock of the test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.access.policy import Limits, Policy
from libs.access.principals import Principal
from libs.access.quotas import PrincipalQuota, RateQuota
from libs.documents import Document
from slatemq.errors import InvalidArgument, ResourceExhausted


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(
    per_s=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 3)), min_size=1, max_size=60),
)
def test_over_any_time_no_more_passes_than_the_rate_and_one_batch(
    per_s: int, steps: list[tuple[int, float]]
) -> None:
    clock = Clock()
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
def test_after_the_named_time_it_passes_again(per_s: int, count: int) -> None:
    clock = Clock()
    quota = RateQuota(per_s, clock)
    quota.take(count)
    wait_ms = quota.wait_ms()

    clock.now_s += wait_ms / 1000

    assert quota.wait_ms() == 0
    assert wait_ms <= max(0, count - per_s) / per_s * 1000 + 2


def test_a_publish_beyond_the_limit_is_refused_with_the_time_to_wait() -> None:
    clock = Clock()
    quota = PrincipalQuota("shop", Limits(publish_messages_per_s=10), clock)
    quota.publish(25, 0)

    with pytest.raises(ResourceExhausted) as caught:
        quota.publish(1, 0)

    error = caught.value
    assert (error.reason, error.retry_after_ms) == ("PRINCIPAL_LIMIT", 1501)
    assert error.message == "'shop' has reached its limit publish_messages_per_s = 10"
    clock.now_s += 1.501
    quota.publish(1, 0)


def test_one_rate_that_is_used_up_does_not_use_up_the_other() -> None:
    clock = Clock()
    quota = PrincipalQuota(
        "shop", Limits(publish_messages_per_s=10, publish_bytes_per_s=1000), clock
    )
    quota.publish(1, 5000)

    for _ in range(20):
        with pytest.raises(ResourceExhausted, match="publish_bytes_per_s"):
            quota.publish(9, 1)

    clock.now_s += 5
    quota.publish(9, 1)
    assert quota.refused_count == {"publish_bytes_per_s": 20}


def test_other_limits_hold_at_once_and_equal_ones_change_nothing() -> None:
    clock = Clock()
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


@pytest.mark.parametrize(
    "entry", ["{principals: [a], publish_messages_per_s: 0}", "{principals: [a], claims: 1}", "{}"]
)
def test_a_bad_limit_is_refused(entry: str) -> None:
    with pytest.raises(InvalidArgument, match=r"line 2 of policy\.yaml"):
        Policy(Document("policy.yaml", f"limits:\n  - {entry}\n"))
