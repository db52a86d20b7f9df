"""Which partition of a queue gets a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.storage.layout.ids import message_id
from libs.storage.layout.partitions import Partition, partition_of_value
from tests.partition_rule import partition_of

GOLDEN_VALUES = [
    # value, and its partition of 2, 3, 8 and 1,000
    ("", (1, 2, 7, 889)),
    ("customer-1", (1, 2, 7, 907)),
    ("customer-2", (0, 1, 3, 382)),
    ("Grüße", (1, 2, 7, 969)),
]
GOLDEN_IDS = [
    (1, (1, 1, 4, 618)),
    (2, (0, 0, 1, 236)),
    (message_id(3, 1), (0, 0, 0, 72)),
    (message_id(3, 2), (1, 2, 5, 690)),
]
COUNTS = (2, 3, 8, 1_000)


@pytest.mark.parametrize(("value", "expected"), GOLDEN_VALUES)
def test_a_header_value_stays_in_its_partition(value: str, expected: tuple[int, ...]) -> None:
    assert tuple(partition_of_value(value, count) for count in COUNTS) == expected


@pytest.mark.parametrize(("one", "expected"), GOLDEN_IDS)
def test_an_id_stays_in_its_partition(one: int, expected: tuple[int, ...]) -> None:
    for count, index in zip(COUNTS, expected, strict=True):
        assert Partition(index, count).select([one], {}) == [one]


HEADERS = st.dictionaries(st.sampled_from(["customer", "other"]), st.text(max_size=5))


@given(
    st.integers(1, 50),
    st.integers(1, 2**64 - 200),
    st.integers(1, 50),
    HEADERS,
    st.sampled_from(["", "customer"]),
)
def test_each_message_is_in_exactly_one_partition(
    count: int, first: int, length: int, headers: dict[str, str], ordering_header: str
) -> None:
    ids = range(first, first + length)
    by_partition = [
        Partition(index, count, ordering_header).select(ids, headers) for index in range(count)
    ]

    assert sorted(one for some in by_partition for one in some) == list(ids)
    for index, some in enumerate(by_partition):
        for one in some:
            value = headers.get(ordering_header) if ordering_header else None
            assert partition_of(one, value, count) == index


@pytest.mark.parametrize("count", [2, 3, 7, 8, 64])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 8, 100])
def test_every_nth_message_spreads_evenly(count: int, step: int) -> None:
    ids = range(message_id(5, 10), message_id(5, 10) + 300 * count * step, step)
    sizes = [len(Partition(index, count).select(ids, {})) for index in range(count)]

    assert sum(sizes) == len(ids)
    assert max(sizes) - min(sizes) < 30  # of 300 each


@pytest.mark.parametrize("one", [Partition(0, 1), Partition(7, 8, "a b"), Partition(999, 1_000)])
def test_a_partition_is_read_as_it_was_stored(one: Partition) -> None:
    assert Partition.parse(one.text()) == one


@pytest.mark.parametrize("text", ["", "1", "1 2", "2 2 ", "-1 2 ", "a 2 "])
def test_a_partition_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Partition.parse(text)
