"""Which attempts at a message count for its event or task."""

from __future__ import annotations

import pytest

from libs.events.slatemq.attempts import count_failures
from slatemq import Attempt

LEASE_ENDED = "lease expired"


@pytest.mark.parametrize(
    ("outcomes", "counted", "failures"),
    [
        ([], 0, 0),
        (["nack: a", LEASE_ENDED, "nack", "fail: b"], 4, 3),
        (["nack: before a redrive", "nack: a"], 1, 1),
        (["nack: a", "note: seen"], 1, 1),
        # Of older attempts nothing is known: they count as failed.
        (["nack: a", LEASE_ENDED], 40, 39),
        ([], 5, 5),
    ],
)
def test_failures_count_also_where_the_history_has_forgotten_them(
    outcomes: list[str], counted: int, failures: int
) -> None:
    history = [Attempt("worker", at, outcome) for at, outcome in enumerate(outcomes)]
    assert count_failures(history, counted) == failures
