"""A stack that is offered five times what it can take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.overload import run_overload
from tests.forms import proof

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.s3]


@pytest.mark.parametrize("seconds", [6.0, proof(60.0)])
def test_an_overloaded_stack_refuses_in_order_and_recovers_by_itself(
    seconds: float, tmp_path: Path
) -> None:
    assert run_overload(tmp_path, seconds) == []
