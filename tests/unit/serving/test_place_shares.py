"""One principal's share of places: half, whatever ends what holds them."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.access.policy import Limits
from libs.access.quotas import PrincipalQuota, Usage
from libs.serving.requests.gate import Gate
from libs.serving.requests.shares import Shares
from slatemq.errors import ResourceExhausted, Unavailable

NAMES = ("shop", "ops", "anonymous")


@given(
    places_max=st.integers(1, 25),
    steps=st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from([-1, *range(-3, 20)])), max_size=90
    ),
)
def test_one_holds_half_all_leave_a_tenth_and_every_place_is_given_back(
    places_max: int, steps: list[tuple[str, int]]
) -> None:
    usage, half = Usage(), (places_max + 1) // 2
    most = max(1, places_max - (1 if places_max < 20 else 2))
    quotas = {name: PrincipalQuota(name, Limits(), usage=usage) for name in NAMES}
    full = "TOO_MANY_CLAIMS", "too many claims"
    shares = Shares("waiting_claims_max", places_max, "claims open", full, for_services=True)
    taken: list[tuple[str, ExitStack]] = []
    refused: Counter[str] = Counter()

    for name, left in steps:  # Below 0 takes a place; others give one back, in any order
        mine = sum(holder == name for holder, _ in taken)
        if left < 0 and mine < half and len(taken) < most:
            place = ExitStack()
            place.enter_context(shares.place(quotas[name]))
            taken.append((name, place))
        elif left < 0:
            with pytest.raises(ResourceExhausted) as caught, shares.place(quotas[name]):
                pytest.fail("there is no room")
            has_half = mine == half and len(taken) < places_max  # Of one place that is all.
            assert caught.value.reason == ("PRINCIPAL_SHARE" if has_half else "TOO_MANY_CLAIMS")
            refused[caught.value.reason] += 1
        elif taken:
            holder, place = taken.pop(left % len(taken))
            # Whatever its entry of the policy is by now
            quotas[holder].set_limits(Limits(principals=(holder,), open_streams=left + 1))
            if left % 2:
                with pytest.raises(ZeroDivisionError), place:
                    raise ZeroDivisionError
            else:
                place.close()
        assert shares.held == Counter(holder for holder, _ in taken)
    for _, place in taken:
        place.close()

    assert not shares.held
    assert usage.refused.total() == refused["PRINCIPAL_SHARE"]


def test_a_refusal_says_what_is_shared_and_counts_for_the_entry_of_the_policy() -> None:
    usage = Usage()
    quota = PrincipalQuota("shop-1", Limits(principals=("shop-*",)), usage=usage)
    shares = Shares("waiting_claims_max", 3, "claims open", ("TOO_MANY_CLAIMS", ""))

    with (
        shares.place(quota),
        shares.place(quota),
        pytest.raises(ResourceExhausted) as caught,
        shares.place(quota),
    ):
        pytest.fail("there is no room")

    error = caught.value
    assert error.message == (
        "'shop-1' has 2 claims open, its share of waiting_claims_max (3): let some end first; "
        "retry in 1 s"
    )
    assert (error.reason, error.retry_after_ms) == ("PRINCIPAL_SHARE", 1_000)
    assert error.metadata == {"limit": "waiting_claims_max"}
    assert usage.refused == {("waiting_claims_max", "shop-*"): 1}


def test_principals_leave_a_tenth_to_services() -> None:
    shop, ops = PrincipalQuota("shop", Limits()), PrincipalQuota("ops", Limits())
    shares = Gate(10).calls

    with ExitStack() as places:
        for quota in (shop, shop, shop, shop, shop, ops, ops, ops, ops):
            places.enter_context(shares.place(quota))
        with pytest.raises(ResourceExhausted) as caught, shares.place(ops):
            pytest.fail("there is no room")
        with shares.place(None):
            pass

    error = caught.value
    assert error.message == (
        "all principals have 9 calls in flight, their share of concurrent_calls_max (10)"
    )
    assert (error.reason, error.retry_after_ms) == ("TOO_MANY_CALLS", 1_000)


async def test_a_gate_bounds_all_calls_and_those_of_a_principal() -> None:
    gate, quota = Gate(3), PrincipalQuota("shop", Limits())
    gate.open()

    with gate.place(quota), gate.place(quota):
        with pytest.raises(ResourceExhausted) as caught, gate.place(quota):
            pytest.fail("there is no room")
        assert caught.value.reason == "PRINCIPAL_SHARE"
        # What is refused takes no place
        with gate.place(None):
            assert (gate.calls.count, gate.calls.held) == (3, {"shop": 2})
            with pytest.raises(ResourceExhausted) as caught, gate.place(quota):
                pytest.fail("there is no room")
            assert caught.value.reason == "TOO_MANY_CALLS"
        gate.close("NOT_SERVING", "it stops")
        with pytest.raises(Unavailable), gate.place(quota):
            pytest.fail("it is closed")

    await gate.calls.idle()
    assert (gate.calls.count, gate.calls.held) == (0, {})
