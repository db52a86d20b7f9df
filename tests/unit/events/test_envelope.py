"""The envelope and its encodings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq.errors import InvalidArgument, NotFound
from slatemq.events import CLOUD_EVENT_CONTENT_TYPE, decode_cloud_event, encode_cloud_event
from slatemq.events.catalogue import CATALOGUE, data_of, make_event
from slatemq.events.envelope import (
    Event,
    decode_event,
    derive_event_id,
    encode_event,
    format_timestamp,
    make_event_id,
    parse_timestamp,
)
from tests.event_catalogue import EXAMPLE, PAGE, render

GOLDEN = (
    b'{"id":"evt_01KJ2KH1G0J9FEYRWH6ATYF8WE","type":"object.created",'
    b'"timestamp":"2026-02-22T12:00:00.000Z","source":"ingest-0",'
    b'"request_id":"4442587FB7D0A2F9","data":{"bucket":"my-bucket","key":"photos/cat.jpg",'
    b'"size":1048576,"etag":"\\"d41d8cd98f00b204e9800998ecf8427e\\"",'
    b'"content_type":"image/jpeg"}}'
)

MILLISECONDS = st.integers(0, 253_402_300_799_999)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(GOLDEN), **changes}).encode()


def test_the_example_has_these_bytes() -> None:
    assert encode_event(EXAMPLE) == GOLDEN
    assert decode_event(GOLDEN) == EXAMPLE


def test_the_page_shows_the_catalogue_as_it_is() -> None:
    assert PAGE.read_text() == render(), "run: python -m tests.event_catalogue"


def test_the_program_on_the_page_makes_a_cloud_event_and_reads_it() -> None:
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    program: dict[str, Any] = {}
    exec(compile(blocks["python"], str(PAGE), "exec"), program)

    encoded = program["to_cloud_event"](GOLDEN)

    assert json.loads(encoded) == json.loads(blocks["json"])  # the last of the page
    assert program["from_cloud_event"](encoded) == GOLDEN
    assert f"`{CLOUD_EVENT_CONTENT_TYPE}`" in PAGE.read_text()


def test_events_need_the_sdk_of_cloud_events_for_these_alone() -> None:
    program = "import sys; sys.modules['cloudevents'] = None; import slatemq.events"

    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_page_on_write_through_lists_all_that_slatemq_publishes_itself() -> None:
    page = PAGE.parents[1] / "how-to/write-through.md"
    _, _, rest = page.read_text().partition("## What is published\n")
    listed = re.findall(r"`([a-z_.]+)`", "".join(re.findall(r"^\|([^|]*)\|", rest, re.MULTILINE)))
    of_stores = ("bucket.", "object.", "objects.", "multipart.", "part.")
    assert {kind for kind in CATALOGUE if not kind.startswith(of_stores)} <= set(listed)


@pytest.mark.parametrize(
    ("encoded", "field"),
    [
        (b"{}", "event"),
        (b"[1]", "event"),
        (b"\xff", "event"),
        (GOLDEN[:-1], "event"),
        (changed(id=""), "id"),
        (changed(id="e" * 129), "id"),
        (changed(id="an event"), "id"),
        (changed(id="évt_1"), "id"),
        (changed(id=5), "event.id"),
        (changed(type="object..created"), "type"),
        (changed(type=""), "type"),
        (changed(type="a b"), "type"),
        (changed(type="object.*"), "type"),
        (changed(type="x" * 101), "type"),
        (changed(timestamp="2026-02-22T12:00:00.000"), "timestamp"),
        (changed(timestamp="yesterday"), "timestamp"),
        (changed(source=5), "event.source"),
        (changed(data=[]), "event.data"),
    ],
)
def test_what_is_not_an_event_is_refused_by_field(encoded: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode_event(encoded)
    assert refused.value.field == field


@pytest.mark.parametrize("kind", CATALOGUE.values(), ids=CATALOGUE)
def test_each_type_comes_back_from_both_encodings(kind: Any) -> None:
    values: dict[str, Any] = {"int": 7, "bool": True, "list[str]": ["a", "ü"]}
    fields = {
        name: values.get(str(hint), {"h": "v"} if "dict" in str(hint) else "text")
        for name, hint in kind.__annotations__.items()
        if "ClassVar" not in str(hint)
    }
    event = make_event(kind(**fields), source="node-1", request_id="R", at_ms=1_771_761_600_123)
    assert data_of(decode_event(encode_event(event))) == kind(**fields)
    assert decode_cloud_event(encode_cloud_event(event)) == event


def test_data_of_another_type_is_refused_by_field() -> None:
    event = decode_event(changed(data={"bucket": "b", "key": "k", "size": "big", "etag": "e"}))
    with pytest.raises(InvalidArgument) as refused:
        data_of(event)
    assert refused.value.field == "event.data.size"
    with pytest.raises(NotFound):
        data_of(decode_event(changed(type="object.polished")))


def test_members_that_a_later_version_adds_are_passed_over() -> None:
    data = {**json.loads(GOLDEN)["data"], "storage_class": "GLACIER"}
    assert data_of(decode_event(changed(data=data, region="eu"))) == data_of(EXAMPLE)


@pytest.mark.parametrize(
    "event_id",
    ["6f1c2d3e-4f50-4a61-9b72-8c93a0b1c2d3", "01KJ2KH1G0J9FEYRWH6ATYF8WE", "e" * 128],
)
def test_other_programs_choose_the_ids_of_their_events(event_id: str) -> None:
    event = decode_event(changed(id=event_id))
    assert event.id == event_id
    assert decode_event(encode_event(event)) == event
    assert decode_cloud_event(encode_cloud_event(event)) == event


def test_a_version_is_a_member_of_the_events_that_have_one_alone() -> None:
    assert "version_id" not in json.loads(GOLDEN)["data"]
    data = {**json.loads(GOLDEN)["data"], "version_id": "v7"}
    assert data_of(decode_event(changed(data=data))) == msgspec.structs.replace(
        data_of(EXAMPLE), version_id="v7"
    )


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"null",
        b"{}",
        b'{"specversion":"1.0","id":"1","source":"/x","type":"other"}',
        encode_cloud_event(EXAMPLE).replace(b"io.slatemq.", b"com.example."),
    ],
)
def test_a_foreign_cloud_event_is_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidArgument):
        decode_cloud_event(encoded)


def cloud_event(changes: dict[str, Any], without: str = "") -> bytes:
    members = {**json.loads(encode_cloud_event(EXAMPLE)), **changes}
    members.pop(without, None)
    return json.dumps(members).encode()


@pytest.mark.parametrize("member", ["specversion", "id", "source", "type", "time", "data"])
def test_a_cloud_event_without_a_member_is_refused_by_that_member(member: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode_cloud_event(cloud_event({}, without=member))
    assert refused.value.field == "event"
    assert refused.value.description == f"Object missing required field `{member}`"


@pytest.mark.parametrize("wrong", [5, {"a": 1}, ["a"], True])
@pytest.mark.parametrize("member", ["specversion", "id", "source", "type", "time", "requestid"])
def test_a_member_of_a_cloud_event_that_is_no_text_is_refused(member: str, wrong: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode_cloud_event(cloud_event({member: wrong}))
    assert refused.value.field == f"event.{member}"


@pytest.mark.parametrize(
    ("member", "wrong", "field"),
    [
        ("specversion", "0.3", "event.specversion"),
        ("id", "an event", "id"),
        ("time", "soon", "event.time"),
        ("time", "2026-02-22T12:00:00", "event.time"),
        ("time", None, "event.time"),
        ("data", None, "event.data"),
        ("data", [], "event.data"),
        ("source", "/slatemq/%ff", "event.source"),
    ],
)
def test_a_wrong_member_of_a_cloud_event_is_named(member: str, wrong: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode_cloud_event(cloud_event({member: wrong}))
    assert refused.value.field == field


def test_a_cloud_event_has_no_request_where_it_says_none() -> None:
    for encoded in (cloud_event({}, without="requestid"), cloud_event({"requestid": None})):
        assert decode_cloud_event(encoded).request_id == ""


URI_REFERENCE = re.compile(r"/slatemq/([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})*")
"""A path of RFC 3986."""


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("aws:s3", "/slatemq/aws:s3"),
        ("my node\n1", "/slatemq/my%20node%0A1"),
        ("50%25?x#y", "/slatemq/50%2525%3Fx%23y"),
        ("grün", "/slatemq/gr%C3%BCn"),
    ],
)
def test_a_source_is_percent_encoded_in_a_cloud_event(source: str, written: str) -> None:
    event = msgspec.structs.replace(EXAMPLE, source=source)
    encoded = encode_cloud_event(event)
    assert json.loads(encoded)["source"] == written
    assert decode_cloud_event(encoded) == event


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a\nb\x00", "a%0Ab%00"),
        ("50%25", "50%2525"),
        ("\x85\ufdd0\U0001ffff", "%C2%85%EF%B7%90%F0%9F%BF%BF"),
        ("ü 😀", "ü 😀"),
    ],
)
def test_an_attribute_of_a_cloud_event_has_only_the_characters_of_one(
    text: str, written: str
) -> None:
    event = msgspec.structs.replace(EXAMPLE, request_id=text, data={"bucket": "b", "key": text})
    encoded = encode_cloud_event(event)
    members = json.loads(encoded)
    assert (members["requestid"], members["subject"]) == (written, f"b/{written}")
    assert members["data"]["key"] == text
    assert decode_cloud_event(encoded) == event


@given(TEXT)
def test_any_source_comes_back_from_a_uri_reference(source: str) -> None:
    event = msgspec.structs.replace(EXAMPLE, source=source)
    encoded = encode_cloud_event(event)
    assert URI_REFERENCE.fullmatch(json.loads(encoded)["source"])
    assert decode_cloud_event(encoded) == event


@given(MILLISECONDS)
def test_a_timestamp_has_milliseconds_and_comes_back(at_ms: int) -> None:
    text = format_timestamp(at_ms)
    assert len(text) == len("2026-02-22T12:00:00.000Z")
    assert parse_timestamp("timestamp", text) == at_ms


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("2026-02-22T14:00:00.000+02:00", "2026-02-22T12:00:00.000Z"),
        ("2026-02-22T12:00:00Z", "2026-02-22T12:00:00.000Z"),
        ("2026-02-22T12:00:00.418613Z", "2026-02-22T12:00:00.419Z"),
        ("2026-02-22 12:00Z", "2026-02-22T12:00:00.000Z"),
        ("20260222T120000Z", "2026-02-22T12:00:00.000Z"),
        ("2026-W08-7T12:00:00Z", "2026-02-22T12:00:00.000Z"),
    ],
)
def test_a_timestamp_of_another_form_becomes_the_one_of_events(text: str, canonical: str) -> None:
    read = decode_event(changed(timestamp=text))
    assert read.timestamp == canonical
    assert json.loads(encode_event(read))["timestamp"] == canonical
    assert decode_cloud_event(encode_cloud_event(read)) == read
    assert msgspec.structs.replace(EXAMPLE, timestamp=text).timestamp == canonical


LATE = [
    "9999-12-31T23:59:59.9996Z",
    "9999-12-31T23:59:59.9999Z",
    "9999-12-31T23:59:59-01:00",
    "9999-12-31T23:00:00-23:59",
]
"""In or behind the last half of a millisecond that a date can have."""


@pytest.mark.parametrize("text", LATE)
def test_a_timestamp_behind_the_year_9999_is_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_timestamp("at", text)
    assert refused.value.field == "at"
    assert text in refused.value.description
    with pytest.raises(InvalidArgument) as refused:
        decode_event(changed(timestamp=text))
    assert refused.value.field == "timestamp"
    with pytest.raises(InvalidArgument) as refused:
        decode_cloud_event(cloud_event({"time": text}))
    assert refused.value.field == "event.time"


@given(st.integers(253_402_300_800_000, (1 << 63) - 1))
def test_a_timestamp_after_the_year_9999_stands_at_its_end(at_ms: int) -> None:
    assert format_timestamp(at_ms) == "9999-12-31T23:59:59.999Z"


@given(MILLISECONDS, st.integers(0), st.integers(0))
def test_the_same_change_has_the_same_id_each_time(at_ms: int, log: int, sequence: int) -> None:
    derived = derive_event_id(at_ms, log, sequence)
    assert derived == derive_event_id(at_ms, log, sequence)
    assert derived != derive_event_id(at_ms, log, sequence + 1)
    assert decode_event(changed(id=derived)).id == derived


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("encode", [encode_event, encode_cloud_event])
def test_numbers_that_json_does_not_have_are_refused(
    encode: Callable[[Event], bytes], number: float
) -> None:
    for value in (number, [1, [number]], {"ratio": {"x": number}}, (None, number)):
        with pytest.raises(InvalidArgument, match="it has no number"):
            encode(msgspec.structs.replace(EXAMPLE, data={"value": value}))
    # Null and texts are no such number.
    encode(msgspec.structs.replace(EXAMPLE, data={"value": None, "text": "null", "ratio": 0.5}))


def test_a_cloud_event_with_a_number_that_json_does_not_have_is_refused() -> None:
    encoded = encode_cloud_event(msgspec.structs.replace(EXAMPLE, data={"value": 271.5}))
    with pytest.raises(InvalidArgument, match="JSON is malformed"):
        decode_cloud_event(encoded.replace(b"271.5", b"NaN"))


def test_ids_made_later_sort_later() -> None:
    assert make_event_id(1_000) < make_event_id(2_000) < derive_event_id(3_000, "x")


@given(TEXT, st.dictionaries(TEXT, TEXT))
def test_any_text_comes_back(source: str, data: dict[str, str]) -> None:
    event = Event(
        id=EXAMPLE.id,
        type="x.y",
        timestamp=EXAMPLE.timestamp,
        source=source,
        request_id=source,
        data=data,
    )
    assert decode_event(encode_event(event)) == event
