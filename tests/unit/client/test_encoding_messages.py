"""Messages as bytes: the same as protobuf's own objects make of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq._publish.wire import Runs, add
from slatemq.errors import InvalidArgument
from slatemq.models import OutgoingMessage
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


@st.composite
def in_runs(draw: st.DrawFn) -> list[OutgoingMessage]:
    """Messages of which neighbours are often alike but for their payloads."""
    runs = draw(st.lists(st.tuples(MESSAGES, st.lists(st.binary(max_size=300), max_size=5))))
    return [
        message._replace(payload=payload)
        for message, payloads in runs
        for payload in (message.payload, *payloads)
    ]


def requested(messages: list[OutgoingMessage]) -> ingest_pb2.PublishRequest:
    request = ingest_pb2.PublishRequest()
    for message in messages:
        add(request, message)
    return request


def gathered(messages: list[OutgoingMessage]) -> Runs:
    runs = Runs()
    for message in messages:
        runs.add(message, "")
    return runs


def flat(request: ingest_pb2.PublishRequest) -> ingest_pb2.PublishRequest:
    """What is in runs as messages, by protobuf's own means."""
    told = ingest_pb2.PublishRequest()
    for run in request.runs:
        for payload in run.payloads:
            told.messages.add().CopyFrom(run.common)
            told.messages[-1].payload = payload
    return told


@given(in_runs())
def test_either_form_has_the_messages_that_were_added(messages: list[OutgoingMessage]) -> None:
    runs = gathered(messages)
    assert len(runs) == len(messages)
    assert runs.request() == requested(messages)
    told = ingest_pb2.PublishRequest.FromString(runs.encoded("r-ä"))
    assert told.request_id == "r-ä"
    assert not (told.messages and told.runs)
    assert (flat(told) if told.runs else told).messages == requested(messages).messages


@given(in_runs())
def test_neighbours_that_are_alike_are_one_run(messages: list[OutgoingMessage]) -> None:
    told = ingest_pb2.PublishRequest.FromString(gathered(messages).encoded())
    runs_count = sum(one[1:] != other[1:] for one, other in pairwise(messages)) + bool(messages)
    if 2 * runs_count > len(messages):
        assert len(told.messages) == len(messages)
    else:
        assert len(told.runs) == runs_count


@given(in_runs(), st.data())
def test_some_of_the_messages_are_those_that_were_chosen(
    messages: list[OutgoingMessage], data: st.DataObject
) -> None:
    places = data.draw(st.permutations(range(len(messages))))[: len(messages) // 2]
    chosen = gathered(messages).only(places)
    assert chosen.request() == requested([messages[place] for place in places])


def test_an_error_about_a_run_is_one_about_a_message() -> None:
    alike = [OutgoingMessage(b"", {"n": "1"})] * 3
    runs = gathered([*alike, OutgoingMessage(b"", {"n": "2"}), *alike])
    assert runs.place_of("runs[0].payloads[2]") == (2, "payload")
    assert runs.place_of('runs[2].common.headers["n"]') == (4, 'headers["n"]')
    assert runs.place_of("runs[1].common.retention_s") == (3, "retention_s")
    assert runs.place_of("runs[3].common.retention_s") is None
    assert runs.place_of("runs") is None
    assert runs.place_of("request_id") is None


def test_a_mapping_that_is_used_for_all_messages_is_read_each_time() -> None:
    runs = Runs()
    headers = {"n": "0"}
    for number in range(3):
        headers["n"] = str(number)
        runs.add(OutgoingMessage(b"x", headers), "")
    assert [message.headers["n"] for message in runs.request().messages] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (OutgoingMessage("text", {}), "payload"),  # type: ignore[arg-type]
        (OutgoingMessage(b"", {"a": 1}), "headers"),  # type: ignore[dict-item]
        (OutgoingMessage(b"", {"a": "\ud800"}), ""),
        (OutgoingMessage(b"", {}, retention_s=1 << 70), "retention_s"),
        (OutgoingMessage(b"", {}, dedupe_key=""), "dedupe_key"),
        (5, "messages[1]"),
        (None, "messages[1]"),
        (b"text", "messages[1]"),
    ],
)
def test_what_has_no_wire_form_is_refused_by_name(message: OutgoingMessage, field: str) -> None:
    runs = gathered([OutgoingMessage(b"good", {})])
    with pytest.raises(InvalidArgument) as refused:
        runs.add(message, "messages[1].")
    assert field in refused.value.field
    assert runs.request() == requested([OutgoingMessage(b"good", {})])


def test_many_headers_go_as_messages() -> None:
    headers = {"h": "v" * 1000}
    few, many = (gathered([OutgoingMessage(b"x", headers)] * count) for count in (1000, 3000))
    assert few.are_runs
    assert not many.are_runs
    assert ingest_pb2.PublishRequest.FromString(many.encoded()) == many.request()
