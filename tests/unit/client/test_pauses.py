"""How long a client waits before it calls again."""

from __future__ import annotations

import pytest

from slatemq._rpc.peers import CONNECT_S, connect_s, pause_s
from slatemq.errors import ResourceExhausted, SlateMQError, Unavailable


@pytest.mark.parametrize(
    ("error", "least_s", "most_s"),
    [
        (ResourceExhausted("", retry_after_ms=60_000), 60, 72),
        (Unavailable("", retry_after_ms=2_000), 2, 2.4),
        (ResourceExhausted("", retry_after_ms=1), 0.05, 0.11),
        (None, 0.05, 0.11),
    ],
)
def test_a_client_comes_back_no_sooner_than_it_was_asked_to(
    error: SlateMQError | None, least_s: float, most_s: float
) -> None:
    for _ in range(100):
        assert least_s <= pause_s(error, 0.1) <= most_s


def test_a_call_waits_for_a_connection_for_a_third_of_its_time_at_most() -> None:
    assert connect_s(1.5) == pytest.approx(0.5)
    assert connect_s(600) == CONNECT_S
