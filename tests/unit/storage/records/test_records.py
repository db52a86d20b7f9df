"""Round trips of all values, and what their encoders and decoders refuse."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.storage.errors import CorruptRecord
from libs.storage.layout.buckets import BucketKind
from libs.storage.records import (
    archived_records,
    configs,
    execution_records,
    log_bounds,
    metadata,
    move_records,
    payloads,
    queues,
    replay_records,
    states,
    task_records,
)
from tests.unit.storage.records.golden import ATTEMPTS, AVAILABLE, DONE, FAILED, IN_FLIGHT, LOGGED
from tests.unit.storage.records.golden_own import FINISHED, REQUESTS, STATE

u8s, u16s = st.integers(0, 2**8 - 1), st.integers(0, 2**16 - 1)
u32s, u64s = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
i64s = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=12)


def some(*fields: st.SearchStrategy[Any], of: Callable[..., Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.builds(of, *fields), max_size=6)


available = some(u64s, u8s, i64s, i64s, u16s, of=queues.AvailableMessage)
in_flight = some(u64s, u8s, i64s, i64s, u16s, i64s, u32s, texts, u64s, of=queues.InFlightMessage)
done = some(u64s, i64s, u16s, texts, i64s, u64s, of=queues.DoneMessage)
failed = some(u64s, i64s, u16s, u8s, i64s, texts, of=queues.FailedMessage)
attempts = some(texts, i64s, texts, of=queues.FailedAttempt)
headers = st.dictionaries(texts, texts, max_size=5)
delays = st.none() | st.integers(0, 2**63 - 1)
messages = some(u64s, i64s, i64s, i64s, u32s, headers, delays, u32s, of=metadata.MessageMetadata)
lanes = st.builds(states.LaneRecord, u8s, st.sampled_from(BucketKind), u64s, u16s, u64s, u64s)
epochs = st.lists(u8s, max_size=4).map(tuple)
garbage = st.builds(states.OrderRange, u64s, u64s)
purges = st.none() | st.builds(states.PurgesRecord, u8s, epochs, garbage, garbage)
archives = st.none() | st.builds(states.ArchivedRecord, u64s, u64s, garbage)
archived = some(u64s, i64s, i64s, u16s, u8s, i64s, texts, of=archived_records.ArchivedMessage)
queue_states = st.builds(
    states.QueueStateRecord,
    u8s, st.booleans(), u64s, epochs,
    u64s, u32s, u64s, u64s, u64s, u64s, u64s,
    st.lists(lanes, max_size=5).map(tuple), purges, archives,
)  # fmt: skip


@given(available, in_flight)
def test_active_values_read_back(
    waiting: list[queues.AvailableMessage], claimed: list[queues.InFlightMessage]
) -> None:
    assert queues.decode_active(queues.encode_active(waiting, claimed)) == (waiting, claimed)


@given(done)
def test_done_values_read_back(messages: list[queues.DoneMessage]) -> None:
    assert queues.decode_done(queues.encode_done(messages)) == messages


@given(failed)
def test_failed_values_read_back(messages: list[queues.FailedMessage]) -> None:
    assert queues.decode_failed(queues.encode_failed(messages)) == messages


@given(archived)
def test_archived_values_read_back(messages: list[archived_records.ArchivedMessage]) -> None:
    data = archived_records.encode_archived(messages)
    assert archived_records.decode_archived(data) == messages


@given(attempts)
def test_attempts_values_read_back(tries: list[queues.FailedAttempt]) -> None:
    assert queues.decode_attempts(queues.encode_attempts(tries)) == tries


@given(messages)
def test_log_entries_read_back(entry: list[metadata.MessageMetadata]) -> None:
    decoded = metadata.decode_log_entry(metadata.encode_log_entry(entry))
    assert decoded == entry
    assert [list(message.headers) for message in decoded] == [list(m.headers) for m in entry]


@given(st.binary(max_size=100))
def test_inline_payloads_read_back(payload: bytes) -> None:
    assert payloads.decode_payload(payloads.encode_inline(payload)) == payload


@given(texts, u16s, u32s, st.dictionaries(texts, texts, max_size=5))
def test_configs_read_back_with_settings_that_no_one_knows(
    source: str, max_attempts: int, retention_s: int, settings: dict[str, str]
) -> None:
    config = configs.QueueConfigRecord(source, max_attempts, retention_s, settings)
    data = configs.encode_config(config)
    assert configs.decode_config(data) == config
    assert configs.encode_config(configs.decode_config(data)) == data


def test_settings_are_written_in_the_order_of_their_keys() -> None:
    one = configs.QueueConfigRecord("true", 5, 0, {"b": "1", "a": "2", "é": "3"})
    other = replace(one, settings={"é": "3", "a": "2", "b": "1"})
    assert configs.encode_config(one) == configs.encode_config(other)
    assert list(configs.decode_config(configs.encode_config(one)).settings) == ["a", "b", "é"]


@given(queue_states)
def test_queue_states_read_back(state: states.QueueStateRecord) -> None:
    decoded = states.decode_queue_state(states.encode_queue_state(state))
    if state.archived is not None and state.purges is None:
        state = state._replace(purges=states.PurgesRecord(state.epoch))  # the same, said
    assert decoded == state
    assert all(isinstance(lane.kind, BucketKind) for lane in decoded.lanes)


duplicates = st.lists(st.tuples(u32s, u64s), max_size=3).map(tuple)


@given(
    some(
        texts,
        u64s,
        u32s,
        st.binary(min_size=16, max_size=16),
        duplicates,
        of=states.RequestIdRecord,
    )
)
def test_request_ids_read_back(requests: list[states.RequestIdRecord]) -> None:
    assert states.decode_request_ids(states.encode_request_ids(requests)) == requests


@given(u64s, st.lists(st.tuples(u64s, st.sampled_from(states.LeaseOutcome)), max_size=9))
def test_finished_leases_read_back(
    sequence: int, ended: list[tuple[int, states.LeaseOutcome]]
) -> None:
    leases, outcomes = tuple(lease for lease, _ in ended), tuple(outcome for _, outcome in ended)
    finished = states.FinishedLeasesRecord(sequence, leases, outcomes)
    assert states.decode_finished_leases(states.encode_finished_leases(finished)) == finished


@given(u64s, i64s)
def test_single_numbers_read_back(number: int, now_ms: int) -> None:
    assert states.decode_routing_cursor(states.encode_routing_cursor(number)) == number
    assert states.decode_purge_epoch(states.encode_purge_epoch(number)) == number
    assert states.decode_config_revision(states.encode_config_revision(number)) == number
    assert states.decode_clock(states.encode_clock(now_ms)) == now_ms


DECODERS = [
    payloads.decode_payload, metadata.decode_log_entry,
    queues.decode_active, queues.decode_done, queues.decode_failed, queues.decode_attempts,
    configs.decode_config, states.decode_queue_state, states.decode_request_ids,
    states.decode_finished_leases, states.decode_clock,
]  # fmt: skip


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=120) | st.lists(st.sampled_from([0, 1, 2]), max_size=120).map(bytes))
def test_arbitrary_bytes_decode_or_raise_a_corrupt_record_and_nothing_else(
    decode: Callable[[bytes], object], data: bytes
) -> None:
    with suppress(CorruptRecord):
        decode(data)


@pytest.mark.parametrize("count", range(12))
def test_buckets_of_any_few_messages_read_back(count: int) -> None:
    waiting = [AVAILABLE._replace(message_id=n) for n in range(count)]

    assert queues.decode_active(queues.encode_active(waiting, [])) == (waiting, [])


def test_the_longest_lists_fit_and_one_more_is_refused() -> None:
    waiting, claimed = [AVAILABLE] * 65_535, [IN_FLIGHT] * 65_535
    assert queues.decode_active(queues.encode_active(waiting, claimed)) == (waiting, claimed)
    with pytest.raises(ValueError, match="available has 65536 elements"):
        queues.encode_active([*waiting, AVAILABLE], [])
    with pytest.raises(ValueError, match="in_flight has 65536 elements"):
        queues.encode_active([], [*claimed, IN_FLIGHT])
    with pytest.raises(ValueError, match="done has 65536 elements"):
        queues.encode_done([DONE] * 65_536)
    with pytest.raises(ValueError, match="failed has 65536 elements"):
        queues.encode_failed([FAILED] * 65_536)
    with pytest.raises(ValueError, match="log entry has 65536 elements"):
        metadata.encode_log_entry([LOGGED] * 65_536)
    with pytest.raises(ValueError, match="consumer has 65536 elements"):
        queues.encode_attempts(ATTEMPTS * 32_768)


def test_a_payload_of_65535_bytes_is_inline_and_a_longer_one_is_refused() -> None:
    longest = bytes(payloads.INLINE_PAYLOAD_MAX_BYTES)
    assert payloads.decode_payload(payloads.encode_inline(longest)) == longest
    with pytest.raises(ValueError, match="payload has 65536 bytes"):
        payloads.encode_inline(longest + b"x")


def test_255_headers_fit_and_256_are_refused() -> None:
    most = LOGGED._replace(headers={str(n): "" for n in range(255)})
    assert metadata.decode_log_entry(metadata.encode_log_entry([most])) == [most]
    with pytest.raises(ValueError, match="headers: 256, at most 255 fit"):
        metadata.encode_log_entry([most._replace(headers={**most.headers, "255": ""})])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (LOGGED._replace(headers={"type": "x" * 65_536}), "header 'type' has 65536 bytes"),
        (LOGGED._replace(headers={"x" * 65_536: ""}), "header key has 65536 bytes"),
        (LOGGED._replace(headers={"type": "\udc80"}), "header 'type' is not valid Unicode"),
        (LOGGED._replace(message_id=2**64), "message_id = "),
        (LOGGED._replace(retention_s=-1), "retention_s = "),
        (LOGGED._replace(delay_ms=-1), "delay_ms = -1"),
        (LOGGED._replace(payload_bytes=2**32), "payload_bytes holds a number"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_naming_the_field(
    message: metadata.MessageMetadata, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        metadata.encode_log_entry([message])


@pytest.mark.parametrize(
    ("encode", "why"),
    [
        (lambda: queues.encode_active([AVAILABLE._replace(priority=256)], []), "priority = 256"),
        (
            lambda: queues.encode_active([*[AVAILABLE] * 9, AVAILABLE._replace(attempts=-1)], []),
            "attempts = -1",
        ),
        (lambda: queues.encode_active([], [IN_FLIGHT._replace(attempts=-1)]), "attempts = -1"),
        (lambda: queues.encode_active([], [IN_FLIGHT._replace(lease=2**64)]), "lease holds"),
        (lambda: queues.encode_done([DONE._replace(consumer="\udc80")]), "consumer is not"),
        (lambda: queues.encode_failed([FAILED._replace(reason="x" * 65_536)]), "reason has"),
        (lambda: states.encode_queue_state(STATE._replace(epoch=256)), "epoch = 256"),
        (lambda: states.encode_queue_state(STATE._replace(garbage_epochs=(256,))), "garbage"),
        (lambda: states.encode_queue_state(STATE._replace(done_count=-1)), "done_count = -1"),
        (lambda: states.encode_request_ids([REQUESTS[0]._replace(fingerprint=b"")]), "finger"),
        (lambda: states.encode_finished_leases(replace(FINISHED, outcomes=())), "outcomes: 0"),
        (lambda: states.encode_clock(2**63), "milliseconds = "),
        (
            lambda: configs.encode_config(configs.QueueConfigRecord("", 65_536, 0)),
            "max_attempts = 65536",
        ),
    ],
)
def test_a_field_that_does_not_fit_is_refused_by_name(
    encode: Callable[[], bytes], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        encode()


@pytest.mark.parametrize(
    ("decode", "data", "record", "why"),
    [
        (payloads.decode_payload, "030000", "payload value", "unknown payload type 03"),
        (payloads.decode_payload, "000000", "payload value", "unknown payload type 00"),
        (states.decode_queue_state, "02", "queue state", "unknown version 02"),
        (states.decode_queue_state, "010002", "queue state", "deleted = 2"),
        (
            states.decode_queue_state,
            states.encode_queue_state(STATE).hex()[:-56] + "0303" + "00" * 26,
            "queue state",
            "unknown kind 3",
        ),
        (
            states.decode_finished_leases,
            "09000000000000000100efcdab8967452301010004",
            "finished leases",
            "unknown outcome: 4",
        ),
        (
            states.decode_finished_leases,
            "09000000000000000100efcdab89674523010000",
            "finished leases",
            "0 outcomes beside 1 leases",
        ),
        (
            move_records.decode_move,
            "05" + "00" * 30,
            "move",
            "unknown stage 5",
        ),
        (
            replay_records.decode_replay,
            "01000100" + "".join(n + "00" * 7 for n in ("05", "04", "09")) + "ff" * 8 + "00" * 16,
            "replay",
            "log 1: 4 is not within 5..9",
        ),
        (
            replay_records.decode_replay,
            "0100" "0100" + "01" + "00" * 7 + "01" + "00" * 7 + "09" + "00" * 7 + "05" + "00" * 23,
            "replay",
            "log 1: 1 done, from 5 ms on",
        ),
        (
            replay_records.decode_replay,
            "0100" "0100" + "00" * 24 + "ff" * 8 + "00" * 8 + "fe" + "ff" * 7,
            "replay",
            "log 1: -2 messages left",
        ),
        (
            log_bounds.decode_log_gaps,
            "0100" + "05" + "00" * 7 + "05" + "00" * 7,
            "log gaps",
            "the gap after 5 ends at 5",
        ),
        (
            log_bounds.decode_log_gaps,
            "0200" + "05" + "00" * 7 + "09" + "00" * 7 + "08" + "00" * 7 + "0a" + "00" * 7,
            "log gaps",
            "the gap after 8 begins before 9",
        ),
        (task_records.decode_task_record, "05" + "00" * 8, "task", "unknown kind 5"),
        (
            archived_records.decode_archived,
            "0100" + "00" * 35 + "0100" + "01000100" + "61",
            "archived value",
            "run 1 of 1",
        ),
        (configs.decode_config, "0000" "050000000000" "0200" "01006101003101006101003" "2",
         "config value", "it has the setting 'a' twice"),
        (configs.decode_config, "0000" "050000000000" "0200" "01006201003101006101003" "2",
         "config value", "it has the setting 'a' twice, or after 'b'"),
        (
            execution_records.decode_outbox,
            "00" * 36 + "0000" "02" "01006201003101006101003" "2" "010000",
            "outbox value",
            "it has a header key twice, or out of order",
        ),
        (
            execution_records.decode_outbox,
            "00" * 36 + "0000" "00" "010000" + "00" * 8,
            "outbox value",
            "retention deadline is 0, and not left out",
        ),
        (
            execution_records.decode_outbox_counter,
            "00" * 8 + "01" + "00" * 15 + "00" * 8,
            "outbox counter",
            "offset is 0, and not left out",
        ),
        (states.decode_request_ids, "0000" "0000", "request IDs", "their array is not left out"),
        (
            states.decode_request_ids,
            "0200" + ("0000" + "00" * 28) * 2
            + "0200" + ("0100" + "00" * 12) + ("0000" + "00" * 12),
            "request IDs",
            "a duplicate of request 0 comes late",
        ),
        (task_records.decode_task_record, "03" + "00" * 8 + "02", "task", "has failed = 2"),
        (
            metadata.decode_log_entry,
            "0100" + "00" * 36 + "02" + "01006101003101006101003" "2",
            "log entry",
            "it has a header key twice",
        ),
        (
            metadata.decode_log_entry,
            "0100" + "00" * 37 + "0100feffffffffffffff",
            "log entry",
            "delay_ms = -2",
        ),
    ],
)  # fmt: skip
def test_bytes_that_mean_nothing_raise_an_error_naming_the_record(
    decode: Callable[[bytes], object], data: str, record: str, why: str
) -> None:
    with pytest.raises(CorruptRecord, match=why) as caught:
        decode(bytes.fromhex(data))
    assert caught.value.record == record


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000])
@pytest.mark.parametrize("ends_ms", [0, 5000])
def test_new_messages_are_encoded_by_columns_as_one_by_one(count: int, ends_ms: int) -> None:
    ids = range(2**63, 2**63 + count)
    deadlines_ms = [ends_ms] * count if ends_ms else ()
    one_by_one = [queues.AvailableMessage(one, 128, 0, ends_ms, 0) for one in ids]
    assert queues.encode_new(ids, 128, deadlines_ms) == queues.encode_active(one_by_one, ())


@pytest.mark.parametrize(("ids", "priority"), [([2**64], 0), ([-1], 0), ([1], 256)])
def test_a_new_message_that_does_not_fit_is_refused_by_name(ids: list[int], priority: int) -> None:
    with pytest.raises(ValueError, match=r"message_id|priority"):
        queues.encode_new(ids, priority, ())


def test_arrays_of_ours_that_are_missing_read_as_zero_or_empty() -> None:
    data = queues.encode_active([AVAILABLE], [IN_FLIGHT])
    _, [without_lease] = queues.decode_active(data[:86])
    assert without_lease == IN_FLIGHT._replace(lease=0)
    _, [without_consumer] = queues.decode_active(data[:74])
    assert without_consumer == IN_FLIGHT._replace(lease=0, consumer="")
    [undelayed] = metadata.decode_log_entry(metadata.encode_log_entry([LOGGED])[:64])
    assert undelayed == LOGGED._replace(delay_ms=None, payload_bytes=0)
