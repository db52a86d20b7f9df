"""Messages as bytes: the same as protobuf's own objects make of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq.errors import InvalidArgument
from slatemq.models import OutgoingMessage
from slatemq.publish_wire import Encoder, add
from slatemq.v1 import ingest_pb2

FEW = st.sampled_from(
    [{}, {"queue": "orders"}, {"queue": "orders", "region": "eu"}, {"": ""}, {"ä": "ö" * 100}]
)
MESSAGES = st.builds(
    OutgoingMessage,
    payload=st.binary(max_size=40) | st.integers(0, 40_000).map(bytes),
    headers=FEW,
    created_at_ms=st.none() | st.integers(0, 1 << 41),
    delay_ms=st.none() | st.integers(0, 1 << 31),
    retention_s=st.none() | st.integers(0, 1 << 31),
    visible_at_ms=st.none() | st.integers(0, 1 << 41),
    dedupe_key=st.none() | st.text(min_size=1, max_size=5),
)


@given(st.lists(MESSAGES, max_size=8))
def test_messages_encoded_one_by_one_are_those_of_one_request(
    messages: list[OutgoingMessage],
) -> None:
    encoder = Encoder()
    joined = b"".join(encoder.encode(message, "") for message in messages)
    request = ingest_pb2.PublishRequest()
    for message in messages:
        add(request, message)
    assert ingest_pb2.PublishRequest.FromString(joined) == request


def test_a_mapping_that_is_used_for_all_messages_is_read_each_time() -> None:
    encoder = Encoder()
    headers = {"n": "0"}
    joined = b""
    for number in range(3):
        headers["n"] = str(number)
        joined += encoder.encode(OutgoingMessage(b"x", headers), "")
    request = ingest_pb2.PublishRequest.FromString(joined)
    assert [message.headers["n"] for message in request.messages] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (OutgoingMessage("text", {}), "payload"),  # type: ignore[arg-type]
        (OutgoingMessage(b"", {"a": 1}), "headers"),  # type: ignore[dict-item]
        (OutgoingMessage(b"", {"a": "\ud800"}), ""),
        (OutgoingMessage(b"", {}, retention_s=1 << 70), "retention_s"),
        (OutgoingMessage(b"", {}, dedupe_key=""), "dedupe_key"),
    ],
)
def test_what_has_no_wire_form_is_refused_by_name(message: OutgoingMessage, field: str) -> None:
    encoder = Encoder()
    encoder.encode(OutgoingMessage(b"good", {}), "messages[0].")
    with pytest.raises(InvalidArgument) as refused:
        encoder.encode(message, "messages[1].")
    assert field in refused.value.field
