"""What is refused by its shape on the wire, before anything is parsed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from libs.serving.requests import shape
from libs.serving.requests.shape import (
    ITEMS_MAX,
    MESSAGE_ITEMS,
    NUMBERS_MAX,
    PAIR_ITEMS,
    PAIRS_MAX,
    TEXT_ITEMS,
    ShapeError,
    walk,
)
from services.router.pieces import PieceLimits
from slatemq.v1 import assignment_pb2, consumer_pb2, ingest_pb2


def refusal(kind: type[Message], data: bytes) -> ShapeError | None:
    try:
        descriptor: Any = kind.DESCRIPTOR
        for _ in walk(descriptor, data):
            pass
    except ShapeError as error:
        return error
    return None


def field(number: int, content: bytes) -> bytes:
    """A field of text or a message, under 128 bytes."""
    return bytes((number << 3 | 2, len(content))) + content


PAIR = field(2, field(1, b"k") + field(2, b"v"))

HUGE: list[tuple[type[Message], bytes, str]] = [
    (ingest_pb2.PublishRequest, field(1, b"") * (ITEMS_MAX + 1), "runs"),
    (
        ingest_pb2.PublishRequest,
        ingest_pb2.PublishRequest(
            runs=[ingest_pb2.PublishRun(payloads=[b""] * (ITEMS_MAX + 1))]
        ).SerializeToString(),
        "runs[0].payloads",
    ),
    (consumer_pb2.AckRequest, field(1, b"0-1") * (ITEMS_MAX + 1), "lease_tokens"),
    (
        ingest_pb2.BatchGetMessagesRequest,
        ingest_pb2.BatchGetMessagesRequest(message_ids=[1] * (NUMBERS_MAX + 1)).SerializeToString(),
        "message_ids",
    ),
]


def headers_of(count: int, place: int) -> bytes:
    """A publish of which one message has this many headers, written as a hostile sender would."""
    pairs = PAIR * count
    length = len(pairs)
    encoded = bytearray()
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return b"\x0a\x00" * place + b"\x0a" + bytes(encoded) + pairs


@pytest.mark.parametrize(("kind", "data", "name"), HUGE)
def test_a_list_that_is_too_long_is_named(kind: type[Message], data: bytes, name: str) -> None:
    found = refusal(kind, data)

    assert found is not None
    assert found.field == name
    assert "more than" in found.rule


def test_a_map_of_a_million_is_refused_after_a_thousand() -> None:
    found = refusal(ingest_pb2.PublishRequest, headers_of(1_000_000, 3))

    assert found is not None
    assert (found.field, found.rule) == (
        "runs[3].headers",
        f"has more than {PAIRS_MAX} entries",
    )
    assert refusal(ingest_pb2.PublishRequest, headers_of(PAIRS_MAX, 3)) is None


def test_headers_count_over_all_messages_of_a_request() -> None:
    each = headers_of(255, 0)
    enough = ITEMS_MAX // (PAIR_ITEMS * 255 + MESSAGE_ITEMS)

    assert refusal(ingest_pb2.PublishRequest, each * enough) is None
    assert refusal(ingest_pb2.PublishRequest, each * (enough + 1)) is not None


def test_fields_without_end_are_refused_though_none_is_a_list() -> None:
    found = refusal(ingest_pb2.PublishRequest, b"\x78\x01" * shape.FIELDS_MAX)  # unknown: 15

    assert found is not None
    assert "fields" in found.rule


def test_others_have_their_turn_every_few_thousand_messages_of_a_walk() -> None:
    descriptor: Any = ingest_pb2.PublishRequest.DESCRIPTOR
    longest = b"\x0a\x00" * (ITEMS_MAX // MESSAGE_ITEMS)

    steps = sum(1 for _ in walk(descriptor, longest))

    assert ITEMS_MAX // MESSAGE_ITEMS // (steps + 1) < 10_000


def test_payloads_are_passed_over_whatever_their_size() -> None:
    descriptor: Any = ingest_pb2.PublishRequest.DESCRIPTOR
    message = ingest_pb2.PublishRun(payloads=[b"\x0a\x00" * 5_000_000], headers={"a": "b"})
    steps = list(walk(descriptor, encoded(runs=[message])))

    assert steps == []


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # no length
        b"\x0a\x05ab",  # cut off
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of 11 bytes
        b"\x0b\x0c",  # a group
        b"\x0d\x01",  # half a number
        b"\x80\x80",  # half a key
    ],
)
def test_what_is_malformed_breaks_no_rule_but_is_refused(data: bytes) -> None:
    found = refusal(ingest_pb2.PublishRequest, data)

    assert found is not None
    assert found.rule == ""


def test_a_list_of_payloads_is_refused_wherever_it_is_cut_off_as_protobuf_refuses_it() -> None:
    run = ingest_pb2.PublishRun(payloads=[b"x" * size for size in (0, 1, 127, 128, 300, 16_384)])
    data = run.SerializeToString()

    for end in range(len(data) + 1):
        found = refusal(ingest_pb2.PublishRun, data[:end])
        try:
            ingest_pb2.PublishRun.FromString(data[:end])
        except DecodeError:
            assert found is not None, end
            assert found.rule == "", end
        else:
            assert found is None, end


def test_payloads_of_a_run_are_counted_and_walked_over_in_steps() -> None:
    descriptor: Any = ingest_pb2.PublishRun.DESCRIPTOR
    most = ingest_pb2.PublishRun(
        payloads=[b"x" * 200] * (ITEMS_MAX // TEXT_ITEMS)
    ).SerializeToString()

    steps = sum(1 for _ in walk(descriptor, most))

    assert ITEMS_MAX // TEXT_ITEMS // (steps + 1) < 10_000
    found = refusal(ingest_pb2.PublishRun, most + field(1, b"one more"))
    assert found is not None
    assert found.field == "payloads"


def test_whatever_protobuf_writes_is_walked_to_its_end() -> None:
    chance = random.Random(1)
    for _ in range(200):
        request = ingest_pb2.PublishRequest(
            runs=[
                ingest_pb2.PublishRun(
                    payloads=[chance.randbytes(chance.randrange(300))],
                    headers={
                        str(n): "v" * chance.randrange(200) for n in range(chance.randrange(5))
                    },
                    delay_ms=chance.getrandbits(40),
                )
                for _ in range(chance.randrange(20))
            ],
            request_id="r" * chance.randrange(5),
        )
        assert refusal(ingest_pb2.PublishRequest, request.SerializeToString()) is None
    assignment = assignment_pb2.QueueAssignment(
        queue_id="q", message_ids=range(1 << 40, (1 << 40) + 70_000)
    )
    assign = assignment_pb2.AssignRequest(
        ranges=[assignment_pb2.LogRange(assignments=[assignment] * 20)]
    )
    assert refusal(assignment_pb2.AssignRequest, assign.SerializeToString()) is None


def test_the_largest_call_of_a_router_is_parsed_though_each_match_is_of_another_queue() -> None:
    most = 2 * PieceLimits().matches_max
    assignment = assignment_pb2.QueueAssignment(queue_id="orders-123456", message_ids=[1 << 40])
    ranges = [assignment_pb2.LogRange(assignments=[assignment] * (most // 4)) for _ in range(4)]

    assert (
        refusal(
            assignment_pb2.AssignRequest,
            assignment_pb2.AssignRequest(ranges=ranges).SerializeToString(),
        )
        is None
    )


def encoded(**fields: Any) -> bytes:
    return ingest_pb2.PublishRequest(**fields).SerializeToString()
