"""Which field of a request is at fault."""

from __future__ import annotations

import pytest

from libs.serving.requests.shape import field_at_fault, first_list
from slatemq.v1 import consumer_pb2, ingest_pb2, queue_pb2

PUBLISH = ingest_pb2.PublishRequest.DESCRIPTOR


def spoiled(data: bytes, word: str) -> bytes:
    """The same bytes with a text that is no UTF-8 where the word stood."""
    assert data.count(word.encode()) == 1
    return data.replace(word.encode(), b"\xff" * len(word))


def publish_bytes() -> bytes:
    messages = [
        ingest_pb2.PublishRun(payloads=[b"\xff\xfe"], headers={"name": "value"}),
        ingest_pb2.PublishRun(payloads=[b""], headers={"other": "thing"}, created_at_ms=5),
    ]
    return ingest_pb2.PublishRequest(runs=messages, request_id="first").SerializeToString()


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("first", "request_id"),
        ("name", "runs[0].headers"),
        ("value", "runs[0].headers"),
        ("thing", "runs[1].headers"),
    ],
)
def test_a_text_that_is_no_utf8_is_named(word: str, field: str) -> None:
    data = spoiled(publish_bytes(), word)
    with pytest.raises(Exception, match=r".+"):
        ingest_pb2.PublishRequest.FromString(data)
    assert field_at_fault(PUBLISH, data) == field


def test_an_element_of_a_list_of_texts_and_a_nested_field_are_named() -> None:
    acks = consumer_pb2.AckRequest(lease_tokens=["good", "evil"]).SerializeToString()
    assert field_at_fault(consumer_pb2.AckRequest.DESCRIPTOR, spoiled(acks, "evil")) == (
        "lease_tokens[1]"
    )
    create = queue_pb2.CreateQueueRequest(queue=queue_pb2.Queue(queue_id="here"))
    data = spoiled(create.SerializeToString(), "here")
    assert field_at_fault(queue_pb2.CreateQueueRequest.DESCRIPTOR, data) == "queue.queue_id"


def test_nothing_is_named_where_nothing_is_at_fault_and_no_bytes_make_it_fail() -> None:
    whole = publish_bytes()
    assert field_at_fault(PUBLISH, whole) == ""
    for end in range(len(whole)):
        assert isinstance(field_at_fault(PUBLISH, whole[:end]), str)
    for first in range(256):
        assert isinstance(field_at_fault(PUBLISH, bytes([first]) + b"\xff" * 12), str)


def test_what_to_make_shorter_is_the_list_of_a_request() -> None:
    assert first_list(PUBLISH) == "runs"
    assert first_list(consumer_pb2.NackRequest.DESCRIPTOR) == "items"
    assert first_list(queue_pb2.GetQueueRequest.DESCRIPTOR) == ""
