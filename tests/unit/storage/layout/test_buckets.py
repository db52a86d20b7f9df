from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.storage.layout import buckets
from libs.storage.layout.buckets import BucketKind

orders = st.tuples(
    st.integers(0, buckets.MAX_EPOCH),
    st.integers(0, buckets.MAX_ORDER_MS),
    st.integers(0, buckets.MAX_ORDER_N),
)
numbers = st.tuples(
    st.integers(0, buckets.MAX_PRIORITY),
    st.sampled_from(BucketKind),
    st.integers(0, buckets.MAX_ORDER),
)


@given(orders)
def test_an_order_comes_apart_as_it_was_made(parts: tuple[int, int, int]) -> None:
    assert buckets.split_order(buckets.order_of(*parts)) == parts


@given(orders, orders)
def test_orders_compare_by_epoch_then_time_then_counter(
    one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    assert (buckets.order_of(*one) < buckets.order_of(*other)) == (one < other)


@given(numbers)
def test_a_bucket_number_comes_apart_as_it_was_made(parts: tuple[int, BucketKind, int]) -> None:
    bucket = buckets.split_bucket(buckets.bucket_number(*parts))
    assert bucket == parts
    assert isinstance(bucket.kind, BucketKind)


@given(numbers, numbers)
def test_bucket_numbers_compare_by_priority_then_kind_then_order(
    one: tuple[int, BucketKind, int], other: tuple[int, BucketKind, int]
) -> None:
    assert (buckets.bucket_number(*one) < buckets.bucket_number(*other)) == (one < other)


def test_the_parts_stand_at_the_bits_that_the_layout_names() -> None:
    assert buckets.order_of(1, 0, 0) == 1 << 49
    assert buckets.order_of(0, 1, 0) == 1 << 6
    assert buckets.order_of(0, 0, 1) == 1
    assert buckets.bucket_number(1, BucketKind.READY, 0) == 1 << 56
    assert buckets.bucket_number(0, BucketKind.TIMED, 0) == 1 << 54
    assert buckets.bucket_number(0, BucketKind.IN_FLIGHT, 1) == 2 << 54 | 1
    assert buckets.last_order(buckets.MAX_EPOCH) == buckets.MAX_ORDER


@given(orders)
def test_the_last_order_of_an_epoch_ends_it(parts: tuple[int, int, int]) -> None:
    order = buckets.order_of(*parts)
    assert order <= buckets.last_order(parts[0])
    assert parts[0] == 0 or order > buckets.last_order(parts[0] - 1)


@pytest.mark.parametrize(
    ("make", "field_name"),
    [
        (lambda: buckets.order_of(32, 0, 0), "epoch"),
        (lambda: buckets.order_of(0, 1 << 43, 0), "ms"),
        (lambda: buckets.order_of(0, -1, 0), "ms"),
        (lambda: buckets.order_of(0, 0, 64), "n"),
        (lambda: buckets.bucket_number(256, BucketKind.READY, 0), "priority"),
        (lambda: buckets.bucket_number(0, BucketKind.READY, 1 << 54), "order"),
        (lambda: buckets.split_order(1 << 54), "order"),
        (lambda: buckets.split_bucket(1 << 64), "bucket"),
    ],
)
def test_a_part_out_of_bounds_is_refused_by_name(
    make: Callable[[], object], field_name: str
) -> None:
    with pytest.raises(ValueError, match=f"{field_name} = "):
        make()


def test_a_bucket_of_the_unused_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="3 is not a valid BucketKind"):
        buckets.split_bucket(3 << 54)
