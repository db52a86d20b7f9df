"""How long a call waits for a task."""

from __future__ import annotations

import pytest

from services.ingest.tasks.servicer import seconds_to_wait


class Context:
    """Of a call with this time left; None: it has no deadline."""

    def __init__(self, left_s: float | None) -> None:
        self._left_s = left_s

    def time_remaining(self) -> float | None:
        return self._left_s


@pytest.mark.parametrize(
    ("left_s", "wait_s"), [(60.0, 59.0), (4.0, 3.2), (0.5, 0.4), (-1.0, 0.0), (None, None)]
)
def test_a_call_that_waits_is_answered_before_its_deadline(
    left_s: float | None, wait_s: float | None
) -> None:
    assert seconds_to_wait(Context(left_s)) == pytest.approx(wait_s)
