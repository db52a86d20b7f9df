"""The sizes of stacks that benchmarks are given."""

from __future__ import annotations

import pytest

from benchmarks.scale import Size, size_of


def test_a_size_has_at_least_one_of_each_service() -> None:
    assert size_of("8x4x1") == Size(8, 4, 1)
    for text in ("0x1x1", "1x0x1", "1x1x0", "1x-1x1"):
        with pytest.raises(ValueError, match="at least one of each"):
            size_of(text)
