"""Where the orders of buckets come from."""

from __future__ import annotations

import pytest

from libs.storage.layout.buckets import MAX_EPOCH
from services.broker.core.waiting.orders import free_epoch


@pytest.mark.parametrize("last", [0, 5, MAX_EPOCH])
def test_any_epoch_but_the_last_is_found_where_it_alone_is_free(last: int) -> None:
    epochs = set(range(MAX_EPOCH + 1))

    for free in epochs - {last}:
        assert free_epoch(last, epochs - {free}) == free
    assert free_epoch(last, epochs - {last}) is None
