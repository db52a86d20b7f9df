"""A stack that is offered five times what it can take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.overload import run_overload
from tests.forms import proof

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.s3]


@pytest.mark.parametrize(("seconds", "timed"), [(6.0, False), proof(60.0, True)])
def test_an_overloaded_stack_refuses_in_order_and_recovers_by_itself(
    seconds: float, timed: bool, tmp_path: Path
) -> None:
    """The full form also compares how long calls take."""
    assert run_overload(tmp_path, seconds, timed=timed) == []
