"""Messages that are alike are written and read as a whole, to the same bytes and from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, repeat

from hypothesis import example, given, settings
from hypothesis import strategies as st

from libs.storage.errors import CorruptRecord
from libs.storage.layout.primitives import Reader
from libs.storage.records.log_runs import LogRun, one_by_one
from libs.storage.records.metadata import (
    MessageMetadata,
    decode_log_entry,
    encode_headers,
    encode_log_columns,
    encode_log_entry,
    read_log_runs,
)
from tests.forms import examples
from tests.unit.storage.oracles import decode_metadata_record

Kind = tuple[int, int, int, str, int | None, str]
"""Created at, visible at, retention, a header's value, delay, queue."""

KINDS = st.tuples(
    st.sampled_from([0, 1_767_225_600_005]),
    st.sampled_from([0, 0, 1_767_225_700_000]),
    st.sampled_from([0, 3600]),
    st.sampled_from(["", "a", "b", "ab"]),
    st.sampled_from([None, None, 0, 5]),
    st.sampled_from(["", "", "orders"]),
)
RUNS = st.lists(
    st.tuples(KINDS, st.integers(1, 5) | st.integers(30, 300), st.booleans()), max_size=6
)
FIRST_IDS = st.sampled_from([1, 200, 2**16 - 20, 2**32 - 300, (3 << 48) - 5]) | st.integers(
    0, 2**63
)
Runs = list[tuple[Kind, int, bool]]


def messages_of(runs: Runs, first_id: int, received_ms: int = 7) -> list[MessageMetadata]:
    """With IDs in a row, and in some of the runs with payloads of all sizes."""
    kinds = chain.from_iterable(repeat((kind, vary), count) for kind, count, vary in runs)
    return [
        MessageMetadata(
            message_id,
            created,
            received_ms,
            visible,
            retention,
            {"k": value} if value else {},
            delay,
            message_id % 1000 if vary else 1024,
            queue,
        )
        for message_id, ((created, visible, retention, value, delay, queue), vary) in enumerate(
            kinds, first_id
        )
    ]


def by_columns(messages: list[MessageMetadata]) -> bytes:
    places = list(enumerate(messages))
    return encode_log_columns(
        messages[0].message_id if messages else 0,
        messages[0].received_at_ms if messages else 0,
        [one.created_at_ms for one in messages],
        [one.retention_s for one in messages],
        [encode_headers(one.headers) for one in messages],
        [one.payload_bytes for one in messages],
        {at: one.visible_at_ms for at, one in places if one.visible_at_ms},
        {at: one.delay_ms for at, one in places if one.delay_ms is not None},
        {at: one.direct_queue_id for at, one in places if one.direct_queue_id},
    )


def each_message(runs: Iterable[LogRun]) -> list[MessageMetadata]:
    """The messages of runs, one by one."""
    return [
        MessageMetadata(*fields, headers, None if delay < 0 else delay, sizes[0], queue)
        for run in runs
        for fields, headers, delay, sizes, queue in one_by_one(run)
    ]


@settings(max_examples=examples(300), deadline=None)
@given(RUNS, FIRST_IDS)
@example([], 1)
@example([((0, 0, 0, "a", None, ""), 1_000, True)], 2**16 - 500)
@example([((0, 0, 0, "a", None, ""), 70, False), ((0, 0, 0, "b", None, ""), 70, False)], 250)
def test_runs_are_written_and_read_as_message_by_message(runs: Runs, first_id: int) -> None:
    messages = messages_of(runs, first_id)

    entry = by_columns(messages)

    assert entry == encode_log_entry(messages)
    assert decode_log_entry(entry) == messages
    assert each_message(read_log_runs(entry)) == messages


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), RUNS, FIRST_IDS)
def test_what_is_only_nearly_a_run_is_read_as_it_stands(
    data: st.DataObject, runs: Runs, first_id: int
) -> None:
    messages = messages_of(runs, first_id)
    for _ in range(data.draw(st.integers(1, 3))):
        if messages:
            at = data.draw(st.integers(0, len(messages) - 1))
            one = messages[at]
            other = data.draw(
                st.sampled_from(
                    [
                        one._replace(message_id=data.draw(st.integers(0, 2**64 - 1))),
                        one._replace(
                            message_id=one.message_id ^ 1 << data.draw(st.integers(0, 63))
                        ),
                        one._replace(received_at_ms=8),
                        one._replace(retention_s=1),
                        one._replace(headers={"k": "c"}),
                        messages[at - 1],
                    ]
                )
            )
            messages[at] = other

    entry = encode_log_entry(messages)

    assert decode_log_entry(entry) == messages
    assert each_message(read_log_runs(entry)) == messages


def plainly(entry: bytes) -> list[MessageMetadata]:
    """What an entry says, by the layout: each record for itself."""
    reader = Reader("log entry", entry)
    records = []
    for _ in range(reader.number("count of records", "H")):
        raw = reader.take("head", 37)
        for _ in range(2 * raw[36]):
            size = reader.take("length", 2)
            raw += size + reader.take("text", int.from_bytes(size, "little"))
        records.append(decode_metadata_record(raw))
    delays = reader.parallel_numbers("delay_ms", "q", len(records), default=-1)
    sizes = reader.parallel_numbers("payload_bytes", "I", len(records))
    queues = reader.parallel_texts("direct_queue_id", len(records))
    reader.finish()
    if any(delay < -1 for delay in delays):
        raise reader.corrupt("delay_ms")
    return [
        one._replace(
            delay_ms=None if delay < 0 else delay, payload_bytes=size, direct_queue_id=queue
        )
        for one, delay, size, queue in zip(records, delays, sizes, queues, strict=True)
    ]


def outcome(read: Callable[[bytes], list[MessageMetadata]], entry: bytes) -> object:
    try:
        return read(entry)
    except CorruptRecord:
        return "corrupt"


@settings(max_examples=examples(500), deadline=None)
@given(st.data(), RUNS, FIRST_IDS)
def test_damage_is_read_and_refused_as_message_by_message(
    data: st.DataObject, runs: Runs, first_id: int
) -> None:
    entry = bytearray(encode_log_entry(messages_of(runs, first_id)))
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, len(entry)))
        match data.draw(st.sampled_from(["cut", "flip", "flip", "insert", "remove"])):
            case "cut":
                del entry[place:]
            case "flip":
                entry[place : place + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "insert":
                entry[place:place] = data.draw(st.binary(min_size=1, max_size=9))
            case "remove":
                del entry[place : place + data.draw(st.integers(1, 9))]

    assert outcome(decode_log_entry, bytes(entry)) == outcome(plainly, bytes(entry))


def test_every_byte_of_a_run_counts() -> None:
    entry = encode_log_entry(messages_of([((3, 0, 5, "a", None, ""), 9, False)], 250))
    for place in range(len(entry)):
        for flipped in (1, 128):
            damaged = bytearray(entry)
            damaged[place] ^= flipped
            assert outcome(decode_log_entry, bytes(damaged)) == outcome(plainly, bytes(damaged))
        assert outcome(decode_log_entry, entry[:place]) == outcome(plainly, entry[:place])


def test_the_ids_of_a_run_end_with_the_last_number() -> None:
    kind: Kind = (0, 0, 0, "a", None, "")
    messages = messages_of([(kind, 40, False)], 2**64 - 40)
    wrapped = [*messages, *messages_of([(kind, 40, False)], 0, received_ms=7)]

    assert decode_log_entry(by_columns(messages)) == messages
    assert decode_log_entry(encode_log_entry(wrapped)) == wrapped


def test_a_batch_is_one_run_and_so_are_all_who_are_delayed_alike() -> None:
    plain, delayed = (0, 0, 0, "a", None, ""), (0, 0, 0, "a", 5, "")
    (run,) = read_log_runs(by_columns(messages_of([(plain, 1_000, True)], 250)))
    assert (run[0][0], len(run[3])) == (250, 1_000)

    (run,) = read_log_runs(by_columns(messages_of([(delayed, 1_000, True)], 250)))
    assert (run[2], len(run[3])) == (5, 1_000)

    runs = read_log_runs(by_columns(messages_of([(plain, 9, True), (delayed, 1, True)], 250)))
    assert [len(run[3]) for run in runs] == [1] * 10
