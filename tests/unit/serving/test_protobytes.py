"""What is encoded by hand is what protobuf's own library encodes and parses."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from libs.serving.protobytes import field, number_field, packed_varints, varint, varints_of
from slatemq.v1.message_pb2 import Message


@given(st.integers(0, (1 << 63) - 1) | st.integers(0, 1 << 15))
def test_a_number_is_encoded_as_protobuf_does(number: int) -> None:
    expected = Message(message_id=number).SerializeToString()

    assert number_field(1, number) == expected
    assert number == 0 or b"\x08" + varint(number) == expected


NEAR = st.integers(0, (1 << 63) - 1000) | st.integers(0, 1 << 15)


@given(NEAR, st.lists(st.integers(0, 300), min_size=1), st.booleans())
def test_many_numbers_are_encoded_as_each_is(near: int, steps: list[int], in_a_row: bool) -> None:
    numbers = [near + (at if in_a_row else step) for at, step in enumerate(steps)]

    assert varints_of(numbers) == [varint(number) for number in numbers]
    assert packed_varints(numbers) == b"".join(varint(number) for number in numbers)


@given(st.binary(max_size=300))
def test_bytes_are_encoded_as_protobuf_does(content: bytes) -> None:
    assert Message.FromString(field(2, content)) == Message(payload=content)
    assert not content or field(2, content) == Message(payload=content).SerializeToString()


def test_a_map_keeps_a_pair_of_which_nothing_is_left_to_say() -> None:
    assert Message.FromString(field(3, b"")).headers == {"": ""}


@pytest.mark.parametrize("size", [127, 128, 16_383, 16_384, 70_000])
def test_a_length_of_any_size_is_one_that_protobuf_parses(size: int) -> None:
    encoded = field(2, b"x" * size)

    assert Message.FromString(encoded).payload == b"x" * size
    with pytest.raises(DecodeError):
        Message.FromString(encoded[:-1])
