"""What is encoded by hand is what protobuf's own library encodes and parses."""

import ast
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from slatemq._rpc.wire_format import (
    framed,
    framed_each,
    number_field,
    packed_varints,
    read_varint,
    tag_of,
    varint,
    varints_of,
)
from slatemq.v1 import consumer_pb2, ingest_pb2
from slatemq.v1.message_pb2 import Message

ROOT = Path(__file__).resolve().parents[3]
HEADERS, ID, PAYLOAD = (tag_of(Message, name) for name in ("headers", "message_id", "payload"))


@given(st.integers(0, (1 << 63) - 1) | st.integers(0, 1 << 15))
def test_a_number_is_encoded_as_protobuf_does(number: int) -> None:
    expected = Message(message_id=number).SerializeToString()

    assert number_field(ID, number) == expected
    assert number == 0 or ID + varint(number) == expected
    encoded = b"xx" + varint(number) + b"yy"
    assert read_varint(encoded, 2, len(encoded)) == (number, len(encoded) - 2)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 11 + b"\x00"])
def test_a_number_without_an_end_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="without an end"):
        read_varint(data, 0, len(data))


NEAR = st.integers(0, (1 << 63) - 1000) | st.integers(0, 1 << 15)


@given(NEAR, st.lists(st.integers(0, 300), min_size=1), st.booleans())
def test_many_numbers_are_encoded_as_each_is(near: int, steps: list[int], in_a_row: bool) -> None:
    numbers = [near + (at if in_a_row else step) for at, step in enumerate(steps)]

    assert varints_of(numbers) == [varint(number) for number in numbers]
    assert packed_varints(numbers) == b"".join(varint(number) for number in numbers)


@given(st.binary(max_size=300))
def test_bytes_are_encoded_as_protobuf_does(content: bytes) -> None:
    assert Message.FromString(framed(PAYLOAD, content)) == Message(payload=content)
    assert not content or framed(PAYLOAD, content) == Message(payload=content).SerializeToString()


@given(st.lists(st.binary(max_size=3) | st.integers(0, 20_000).map(bytes), min_size=1))
def test_a_repeated_field_is_encoded_as_protobuf_does(contents: list[bytes]) -> None:
    encoded = b"".join(framed_each(tag_of(ingest_pb2.StoredRun, "payloads"), contents))

    assert encoded == ingest_pb2.StoredRun(payloads=contents).SerializeToString()


def test_a_map_keeps_a_pair_of_which_nothing_is_left_to_say() -> None:
    assert Message.FromString(framed(HEADERS, b"")).headers == {"": ""}


@pytest.mark.parametrize("size", [127, 128, 16_383, 16_384, 70_000])
def test_a_length_of_any_size_is_one_that_protobuf_parses(size: int) -> None:
    encoded = framed(PAYLOAD, b"x" * size)

    assert Message.FromString(encoded).payload == b"x" * size
    with pytest.raises(DecodeError):
        Message.FromString(encoded[:-1])


SOME: dict[str, Any] = {"int32": 1, "int64": 1, "string": "x", "bytes": b"x"}


@pytest.mark.parametrize(
    "message",
    [
        Message,
        consumer_pb2.ClaimedRun,
        consumer_pb2.ClaimResponse,
        ingest_pb2.BatchGetMessagesResponse,
        ingest_pb2.PublishRequest,
        ingest_pb2.PublishRun,
        ingest_pb2.PublishStreamRequest,
        ingest_pb2.StoredRun,
    ],
)
def test_the_tag_of_each_field_is_what_protobuf_puts_before_it(message: Any) -> None:
    for field in message.DESCRIPTOR.fields:
        made = message()
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(made, field.name)["x"] = "x"
        elif field.message_type is not None:
            getattr(made, field.name).add() if field.is_repeated else getattr(
                made, field.name
            ).SetInParent()
        else:
            kind = {3: "int64", 5: "int32", 9: "string", 12: "bytes"}[field.type]
            some = SOME[kind]
            if field.is_repeated:
                getattr(made, field.name).append(some)
            else:
                setattr(made, field.name, some)
        assert made.SerializeToString().startswith(tag_of(message, field.name)), field.full_name


def test_a_tag_follows_the_number_of_its_field() -> None:
    for number in (1, 15, 16, 2047, 2048):
        file = descriptor_pb2.FileDescriptorProto(name=f"renumbered-{number}.proto")
        described = file.message_type.add(name=f"Renumbered{number}")
        described.field.add(name="content", number=number, type=12, label=1)
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        renumbered = message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"Renumbered{number}")
        )
        assert renumbered(content=b"x").SerializeToString() == framed(
            tag_of(renumbered, "content"), b"x"
        )


def test_no_tag_is_written_as_a_literal() -> None:
    users = [
        path
        for room in ("libs", "services", "slatemq")
        for path in (ROOT / room).rglob("*.py")
        if "from slatemq._rpc.wire_format import" in path.read_text()
    ]
    assert len(users) >= 4
    for path in users:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, bytes):
                assert not node.value, f"{path}:{node.lineno} has the bytes {node.value!r}"
