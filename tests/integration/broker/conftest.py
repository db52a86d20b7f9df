"""No broker takes a busy machine for a standstill, unless a test is about one."""

from __future__ import annotations

import math

import pytest

from libs.serving.process import ownership
from services.broker.shard import owner


@pytest.fixture(autouse=True)
def no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is held, no answer would come; and where a clock is, leases would go on."""
    monkeypatch.setattr(owner, "STANDSTILL_S", math.inf)
    monkeypatch.setattr(ownership, "STANDSTILL_S", math.inf)
