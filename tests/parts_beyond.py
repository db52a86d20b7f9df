"""What is read behind the messages in memory, noted as it comes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.broker.core.waiting.scan import NeedsBeyond, StoredBucket


def parts_beyond(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first order of each part that is read behind what is passed over, from now on."""
    orders: list[int] = []
    offer = NeedsBeyond.offer

    def noted(need: NeedsBeyond, rows: Sequence[StoredBucket], through: int) -> None:
        orders.append(need.first_order)
        offer(need, rows, through)

    monkeypatch.setattr(NeedsBeyond, "offer", noted)
    return orders
