"""Messages as bytes: the same as protobuf's own objects make of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq._publish.wire import REPEATED_BYTES_MAX, Runs, numbered
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


def single(message: OutgoingMessage) -> ingest_pb2.PublishRun:
    """A run of one, by protobuf's own means."""
    fields = {name: value for name, value in message._asdict().items() if value is not None}
    keys = [fields.pop("dedupe_key", "")]
    return ingest_pb2.PublishRun(payloads=[fields.pop("payload")], dedupe_keys=keys, **fields)


def gathered(messages: list[OutgoingMessage]) -> Runs:
    runs = Runs()
    for message in messages:
        runs.add(message, "")
    return runs


def decoded(runs: Runs) -> ingest_pb2.PublishRequest:
    return ingest_pb2.PublishRequest.FromString(runs.encoded())


def singles(request: ingest_pb2.PublishRequest) -> list[ingest_pb2.PublishRun]:
    """Each message of a request as a run of one."""
    found = []
    for run in request.runs:
        keys = run.dedupe_keys or [""] * len(run.payloads)
        for payload, key in zip(run.payloads, keys, strict=True):
            one = ingest_pb2.PublishRun()
            one.CopyFrom(run)
            del one.payloads[:], one.dedupe_keys[:]
            one.payloads.append(payload)
            one.dedupe_keys.append(key)
            found.append(one)
    return found


@given(in_runs())
def test_a_request_has_the_messages_that_were_added(messages: list[OutgoingMessage]) -> None:
    runs = gathered(messages)
    assert len(runs) == len(messages)
    request = ingest_pb2.PublishRequest.FromString(runs.encoded("r-ä"))
    assert request.request_id == "r-ä"
    assert singles(request) == list(map(single, messages))
    assert len(runs.encoded()) <= runs.size_bytes
    keys = [message.dedupe_key for message in messages]
    assert runs.dedupe_keys == (keys if any(keys) else [])


@given(in_runs())
def test_neighbours_that_are_alike_are_one_run(messages: list[OutgoingMessage]) -> None:
    runs_count = sum(one[1:6] != other[1:6] for one, other in pairwise(messages)) + bool(messages)
    assert len(decoded(gathered(messages)).runs) == runs_count


def requests_of(
    messages: list[OutgoingMessage], count_max: int, bytes_max: int, *, at_once: bool
) -> list[tuple[bytes, int, int]]:
    """The bytes, size and length of each request; none takes more messages or bytes than these."""
    requests = list[Runs]()
    each = iter(messages)
    message = next(each, None)
    while message is not None:
        if (
            not requests
            or len(requests[-1]) >= count_max
            or not requests[-1].add(message, "", bytes_max)
        ):
            requests.append(Runs())
            requests[-1].add(message, "")
        runs = requests[-1]
        if at_once:
            _, message = runs.add_alike(each, count_max - len(runs), bytes_max)
        else:
            message = next(each, None)
    return [(runs.encoded(), runs.size_bytes, len(runs)) for runs in requests]


@given(in_runs(), st.integers(1, 9), st.integers(1, 1000))
def test_alike_messages_are_added_at_once_as_one_by_one(
    messages: list[OutgoingMessage], count_max: int, bytes_max: int
) -> None:
    at_once = requests_of(messages, count_max, bytes_max, at_once=True)
    assert at_once == requests_of(messages, count_max, bytes_max, at_once=False)


@pytest.mark.parametrize("short_bytes", [-1, 0, 1])
def test_long_headers_are_repeated_as_often_at_once_as_one_by_one(short_bytes: int) -> None:
    long = OutgoingMessage(b"x", {"long": "x" * (REPEATED_BYTES_MAX // 8 - short_bytes - 12)})
    messages = [long] * 20
    at_once = requests_of(messages, 100, 1 << 30, at_once=True)
    assert at_once == requests_of(messages, 100, 1 << 30, at_once=False)


def test_what_is_no_message_is_not_added_with_those_before_it() -> None:
    runs = gathered([OutgoingMessage(b"x")])
    odd = OutgoingMessage("text")  # type: ignore[arg-type]
    assert runs.add_alike(iter([OutgoingMessage(b"y"), odd]), 9, 1000) == (1, odd)
    assert len(runs) == 2


@given(in_runs(), st.data())
def test_some_of_the_messages_are_those_that_were_chosen(
    messages: list[OutgoingMessage], data: st.DataObject
) -> None:
    places = data.draw(st.permutations(range(len(messages))))[: len(messages) // 2]
    chosen = gathered(messages).only(places)
    assert len(chosen) == len(places)
    assert singles(decoded(chosen)) == [single(messages[place]) for place in places]


@given(in_runs(), in_runs())
def test_two_requests_become_one(one: list[OutgoingMessage], two: list[OutgoingMessage]) -> None:
    runs = gathered(one)
    runs.extend(gathered(two))
    for message in one:
        runs.add(message, "")
    assert singles(decoded(runs)) == list(map(single, [*one, *two, *one]))


@given(in_runs(), in_runs())
def test_a_request_after_another_has_its_own_messages(
    one: list[OutgoingMessage], two: list[OutgoingMessage]
) -> None:
    runs = Runs(before=gathered(one))
    for message in [*one[-1:], *two]:
        runs.add(message, "")
    assert singles(decoded(runs)) == list(map(single, [*one[-1:], *two]))


def test_headers_are_changed_in_all_messages() -> None:
    runs = gathered([OutgoingMessage(b"a", {"n": "1"}), OutgoingMessage(b"b", dedupe_key="k")])
    runs.change_headers(lambda headers: headers.update(new="x"))
    runs.add(OutgoingMessage(b"c"), "")
    assert singles(decoded(runs)) == [
        single(OutgoingMessage(b"a", {"n": "1", "new": "x"})),
        single(OutgoingMessage(b"b", {"new": "x"}, dedupe_key="k")),
        single(OutgoingMessage(b"c")),
    ]


@given(st.integers(0, (1 << 63) - 1), st.binary(max_size=300), st.integers(1, 30_000))
def test_a_numbered_request_is_what_protobuf_writes(
    number: int, payload: bytes, timeout_ms: int
) -> None:
    runs = gathered([OutgoingMessage(payload)])
    encoded = numbered(number, runs.encoded("r"), timeout_ms)
    request = ingest_pb2.PublishStreamRequest.FromString(encoded)
    assert (request.number, request.publish.request_id) == (number, "r")
    assert request.timeout_ms == timeout_ms
    assert singles(request.publish) == [single(OutgoingMessage(payload))]


def test_an_error_about_a_run_is_one_about_its_messages() -> None:
    alike = [OutgoingMessage(b"", {"n": "1"})] * 3
    runs = gathered([*alike, OutgoingMessage(b"", {"n": "2"}), *alike])
    assert runs.places_of("runs[0].payloads[2]") == (range(2, 3), "payload")
    assert runs.places_of("runs[2].dedupe_keys[1]") == (range(5, 6), "dedupe_key")
    assert runs.places_of('runs[2].headers["n"]') == (range(4, 7), 'headers["n"]')
    assert runs.places_of("runs[1].retention_s") == (range(3, 4), "retention_s")
    assert runs.places_of("runs[3].retention_s") is None
    assert runs.places_of("runs") is None
    assert runs.places_of("request_id") is None


def test_a_mapping_that_is_used_for_all_messages_is_read_each_time() -> None:
    runs = Runs()
    headers = {"n": "0"}
    for number in range(3):
        headers["n"] = str(number)
        runs.add(OutgoingMessage(b"x", headers), "")
    assert [run.headers["n"] for run in decoded(runs).runs] == ["0", "1", "2"]


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
    assert singles(decoded(runs)) == [single(OutgoingMessage(b"good", {}))]


def test_runs_repeat_no_more_headers_than_the_server_takes() -> None:
    message = OutgoingMessage(b"x", {"h": "v" * 1000})
    request = decoded(gathered([message] * 3000))
    assert singles(request) == [single(message)] * 3000
    longest, *others = request.runs
    common_bytes = longest.ByteSize() - len(longest.payloads) * 3
    assert 0 <= REPEATED_BYTES_MAX - common_bytes * (len(longest.payloads) - 1) < common_bytes
    assert {len(run.payloads) for run in others} == {1}


@pytest.mark.parametrize("at_once", [False, True])
def test_each_message_has_the_headers_of_its_time_though_all_share_one_mapping(
    at_once: bool,
) -> None:
    def growing() -> Iterator[OutgoingMessage]:
        headers: dict[str, str] = {}
        for number in range(3):
            yield OutgoingMessage(b"", headers)
            headers[str(number)] = "x"

    runs, each = Runs(), growing()
    message = next(each, None)
    while message is not None:
        runs.add(message, "")
        message = runs.add_alike(each, 9, 1000)[1] if at_once else next(each, None)

    assert [dict(run.headers) for run in decoded(runs).runs] == [
        {},
        {"0": "x"},
        {"0": "x", "1": "x"},
    ]
