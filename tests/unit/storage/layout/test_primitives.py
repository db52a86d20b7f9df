import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libs.storage.errors import CorruptRecord, StorageError
from libs.storage.layout import primitives
from libs.storage.layout.primitives import Fixed, Reader, terminated, utf8

AWKWARD = b"\x00\x01\x02\x03\xfe\xffa"
awkward_bytes = st.lists(st.sampled_from(AWKWARD), max_size=8).map(bytes) | st.binary(max_size=20)
# Order is promised for keys without FF; FF itself sorts before 02.
without_ff = awkward_bytes.map(lambda raw: raw.replace(b"\xff", b"\xfe"))


@given(awkward_bytes, st.binary(max_size=4))
@example(AWKWARD, b"")
def test_terminated_bytes_read_back_and_leave_what_follows(raw: bytes, rest: bytes) -> None:
    reader = Reader("key", terminated(raw) + rest)
    assert reader.terminated("queue") == raw
    assert reader.left == len(rest)


@given(without_ff, without_ff)
@example(b"a", b"a\x00")
@example(b"a\x00", b"a\x01")
@example(b"", b"\x00")
def test_terminated_bytes_sort_like_the_raw_bytes(one: bytes, other: bytes) -> None:
    assert (terminated(one) < terminated(other)) == (one < other)


@given(st.text(max_size=10), st.text(max_size=10))
def test_terminated_utf8_sorts_like_the_text(one: str, other: str) -> None:
    assert (terminated(one.encode()) < terminated(other.encode())) == (one < other)


def test_ff_sorts_before_02_as_the_design_admits() -> None:
    assert terminated(b"\x01") < terminated(b"\xff") < terminated(b"\x02")


@given(awkward_bytes, awkward_bytes)
def test_no_terminated_bytes_are_a_prefix_of_others(one: bytes, other: bytes) -> None:
    if one != other:
        assert not terminated(other).startswith(terminated(one))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no terminator"),
        (b"orders", "no terminator"),
        (b"a\x01\x00", "unknown escape"),
        (b"a\x01\x04\x00", "unknown escape"),
        (b"a\x01a\x00", "unknown escape"),
        (b"a\xff\x00", "unescaped FF"),
    ],
)
def test_bytes_that_are_no_terminated_bytes_raise(data: bytes, why: str) -> None:
    with pytest.raises(CorruptRecord, match=why) as caught:
        Reader("some key", data).terminated("queue")
    assert caught.value.record == "some key"


def test_a_corrupt_record_is_a_storage_error_with_its_parts() -> None:
    error = CorruptRecord("active value", "ends early")
    assert isinstance(error, StorageError)
    assert (error.record, error.detail) == ("active value", "ends early")
    assert str(error) == "corrupt active value: ends early"


@given(st.text(max_size=30))
@example("")
@example("\U0001f600\x00é")
def test_utf8_reads_back(text: str) -> None:
    reader = Reader("value", utf8("filter", text))
    assert reader.utf8("filter") == text
    assert reader.at_end


def test_utf8_holds_65535_bytes_and_refuses_one_more_naming_the_field() -> None:
    longest = "é" * 32_767 + "a"
    assert Reader("value", utf8("filter", longest)).utf8("filter") == longest
    with pytest.raises(ValueError, match="filter has 65536 bytes"):
        utf8("filter", "é" * 32_768)


def test_a_lone_surrogate_is_refused_naming_the_field() -> None:
    with pytest.raises(ValueError, match="consumer is not valid Unicode"):
        utf8("consumer", "worker-\udc80")


PAIR = Fixed(message_id="Q", attempts="H")
pairs = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**16 - 1))


@given(st.lists(pairs, max_size=20))
def test_an_array_of_fixed_rows_is_a_count_and_the_rows_without_padding(
    rows: list[tuple[int, int]],
) -> None:
    data = PAIR.pack_array("messages", rows)
    assert data[:2] == struct.pack("<H", len(rows))
    assert data[2:] == b"".join(struct.pack("<QH", *row) for row in rows)
    assert list(Reader("value", data).array("messages", PAIR)) == rows


def test_arrays_hold_65535_elements_and_refuse_one_more_naming_the_field() -> None:
    rows = [(7, 8)] * 65_535
    assert list(Reader("value", PAIR.pack_array("messages", rows)).array("messages", PAIR)) == rows
    texts = [""] * 65_535
    text_reader = Reader("value", primitives.utf8_array("consumer", texts))
    assert text_reader.utf8_array("consumer") == texts
    numbers = range(65_535)
    number_reader = Reader("value", primitives.number_array("lease", "Q", numbers))
    assert number_reader.number_array("lease", "Q") == tuple(numbers)
    with pytest.raises(ValueError, match="messages has 65536 elements"):
        PAIR.pack_array("messages", [*rows, (7, 8)])
    with pytest.raises(ValueError, match="consumer has 65536 elements"):
        primitives.utf8_array("consumer", [*texts, ""])
    with pytest.raises(ValueError, match="lease has 65536 elements"):
        primitives.number_array("lease", "Q", range(65_536))


@pytest.mark.parametrize(
    ("row", "field"),
    [((-1, 0), "message_id"), ((2**64, 0), "message_id"), ((0, 65536), "attempts")],
)
def test_a_number_that_does_not_fit_is_refused_naming_its_field(
    row: tuple[int, int], field: str
) -> None:
    with pytest.raises(ValueError, match=f"{field} = "):
        PAIR.pack(*row)
    with pytest.raises(ValueError, match=f"{field} = "):
        PAIR.pack_array("messages", [(0, 0), row])


def test_a_number_array_refuses_what_does_not_fit_naming_the_field() -> None:
    with pytest.raises(ValueError, match="priority holds a number that does not fit"):
        primitives.number_array("priority", "B", [0, 256])


def test_a_parallel_array_of_another_length_raises() -> None:
    data = primitives.number_array("lease", "Q", [1, 2])
    with pytest.raises(CorruptRecord, match="lease has 2 elements beside 3"):
        Reader("active value", data).parallel_numbers("lease", "Q", 3)
    texts = primitives.utf8_array("consumer", ["a"])
    with pytest.raises(CorruptRecord, match="consumer has 1 elements beside 0"):
        Reader("active value", texts).parallel_texts("consumer", 0)


def test_a_missing_or_empty_parallel_array_reads_as_defaults() -> None:
    for data in (b"", b"\x00\x00"):
        assert tuple(Reader("value", data).parallel_numbers("delay", "q", 2, -1)) == (-1, -1)
        assert tuple(Reader("value", data).parallel_texts("reason", 2)) == ("", "")
