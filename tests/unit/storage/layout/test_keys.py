from collections.abc import Callable

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from libs.storage.errors import CorruptRecord
from libs.storage.layout import buckets, keys, own_keys
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.primitives import KeyRange
from tests.unit.storage import oracles

QUEUE_LETTERS = "abzABZ059._-"
queues = st.text(QUEUE_LETTERS, min_size=1, max_size=8) | st.text(min_size=1, max_size=8)
u64s = st.integers(0, 2**64 - 1)
message_ids = st.integers(0, MAX_MESSAGE_ID)

Builder = Callable[[str, int], bytes]
LISTS = [
    (keys.active_key, keys.parse_active_key, keys.active_range),
    (keys.done_key, keys.parse_done_key, keys.done_range),
    (keys.failed_key, keys.parse_failed_key, keys.failed_range),
]
each_list = pytest.mark.parametrize(("build", "parse", "span"), LISTS)


def within(key: bytes, span: KeyRange) -> bool:
    return span.start <= key < span.end


@each_list
@given(queue=queues, bucket=u64s)
def test_the_keys_of_a_queues_lists_read_back(
    build: Builder,
    parse: Callable[[bytes], keys.BucketKey],
    span: Callable[[str, int, int], KeyRange],
    queue: str,
    bucket: int,
) -> None:
    assume(build is not keys.active_key or buckets.kind_of(bucket) != buckets.BucketKind.TIMED)
    assert parse(build(queue, bucket)) == keys.BucketKey(queue, bucket)


TIMED = buckets.BucketKind.TIMED
lane_orders = st.builds(
    lambda ms, number: buckets.lane_order(TIMED, buckets.order_of(1, ms, 0), number),
    st.integers(0, buckets.MAX_ORDER_MS),
    st.integers(0, buckets.MAX_NUMBER),
)


@given(queue=queues, order=lane_orders, other=lane_orders)
def test_timed_buckets_of_one_time_have_keys_of_their_own_that_sort_as_they_came(
    queue: str, order: int, other: int
) -> None:
    key, another = (keys.waiting_key(queue, 3, TIMED, one) for one in (order, other))
    whole = keys.active_range(
        queue,
        buckets.bucket_number(3, TIMED, buckets.order_in_time(TIMED, order)),
        buckets.bucket_number(3, TIMED, buckets.order_in_time(TIMED, order)),
    )

    assert keys.parse_waiting_key(key) == order
    assert (key < another) == (order < other)
    assert within(key, keys.waiting_range(queue, 3, TIMED, order, order))
    assert within(key, whole)


@each_list
@given(queue=queues, other=queues, first=u64s, last=u64s, bucket=u64s)
@example(queue="a", other="a", first=0, last=2**64 - 1, bucket=2**64 - 1)
@example(queue="a", other="a", first=5, last=5, bucket=5)
@example(queue="a", other="a-", first=0, last=2**64 - 1, bucket=0)
def test_a_range_of_buckets_holds_both_its_ends_and_no_other_queue(
    build: Builder,
    parse: Callable[[bytes], keys.BucketKey],
    span: Callable[[str, int, int], KeyRange],
    queue: str,
    other: str,
    first: int,
    last: int,
    bucket: int,
) -> None:
    expected = queue == other and first <= bucket <= last
    assert within(build(other, bucket), span(queue, first, last)) == expected


def test_one_priority_kind_and_epoch_can_be_scanned_from_a_known_head() -> None:
    # given the second bucket of an epoch as the head
    def bucket(priority: int, kind: buckets.BucketKind, epoch: int, ms: int) -> bytes:
        order = buckets.order_of(epoch, ms, 0)
        return keys.active_key("orders", buckets.bucket_number(priority, kind, order))

    ready = buckets.BucketKind.READY
    head = buckets.bucket_number(3, ready, buckets.order_of(1, 20, 0))
    end = buckets.bucket_number(3, ready, buckets.last_order(1))
    # when it is scanned to the end of the epoch
    span = keys.active_range("orders", head, end)
    # then all later buckets are within, and nothing of another epoch, kind or priority is
    assert within(bucket(3, ready, 1, 20), span)
    assert within(bucket(3, ready, 1, buckets.MAX_ORDER_MS), span)
    assert not within(bucket(3, ready, 1, 19), span)
    assert not within(bucket(3, ready, 2, 0), span)
    assert not within(bucket(3, buckets.BucketKind.TIMED, 1, 20), span)
    assert not within(bucket(4, ready, 1, 20), span)


@given(queues, message_ids, message_ids, message_ids)
def test_attempts_keys_read_back_and_lie_in_their_range(
    queue: str, message_id: int, first: int, last: int
) -> None:
    key = keys.attempts_key(queue, message_id)
    assert oracles.parse_attempts_key(key) == (queue, message_id)
    assert within(key, keys.attempts_range(queue, first, last)) == (first <= message_id <= last)


@given(queues, queues)
@example("a", "a")
@example("a", "a-")
def test_queue_records_are_scanned_in_the_order_of_their_ids_from_any_of_them(
    queue: str, after: str
) -> None:
    for build, parse, span in (
        (keys.config_key, keys.parse_config_key, keys.config_range),
        (keys.queue_state_key, keys.parse_queue_state_key, keys.queue_state_range),
    ):
        assert parse(build(queue)) == queue
        assert within(build(queue), span())
        assert within(build(queue), span(after)) == (queue > after)


@given(message_ids, message_ids, message_ids)
def test_payload_keys_read_back_and_lie_in_their_range(
    message_id: int, first: int, last: int
) -> None:
    key = keys.payload_key(message_id)
    assert keys.parse_payload_key(key) == message_id
    assert within(key, keys.payload_range(first, last)) == (first <= message_id <= last)


@given(u64s, u64s)
def test_log_keys_read_back(sequence: int, first: int) -> None:
    key = keys.log_key(sequence)
    assert keys.parse_log_key(key) == sequence
    assert within(key, keys.log_range(first)) == (first <= sequence)


def test_the_key_of_another_log_is_refused() -> None:
    other = b"\x01\x01opendata-queue/messages/metadata/newsfeeds\x00" + bytes(8)
    assert not within(other, keys.log_range(0))
    with pytest.raises(CorruptRecord, match="another log"):
        keys.parse_log_key(other)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), u64s)
def test_request_ids_are_scanned_by_the_minute(
    minute: int, first: int, last: int, sequence: int
) -> None:
    key = own_keys.request_ids_key(minute, sequence)
    assert own_keys.parse_request_ids_key(key) == (minute, sequence)
    assert within(key, own_keys.request_ids_range(first, last)) == (first <= minute <= last)


@given(u64s, st.integers(0, 2**16 - 1))
def test_cursors_and_finished_leases_read_back_and_lie_in_their_ranges(
    log_shard: int, slot: int
) -> None:
    cursor, leases = own_keys.routing_cursor_key(log_shard), own_keys.finished_leases_key(slot)
    assert own_keys.parse_routing_cursor_key(cursor) == log_shard
    assert oracles.parse_finished_leases_key(leases) == slot
    assert within(cursor, own_keys.routing_cursor_range())
    assert within(leases, own_keys.finished_leases_range())


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: keys.active_key("", 0), "queue is empty"),
        (lambda: keys.config_key(""), "queue is empty"),
        (lambda: keys.active_key("orders", 1 << 64), "bucket = "),
        (lambda: keys.attempts_key("orders", -1), "message_id = "),
        (lambda: keys.log_key(1 << 64), "number = "),
        (lambda: own_keys.request_ids_key(1 << 32, 0), "minute = "),
        (lambda: own_keys.finished_leases_key(1 << 16), "slot = "),
        (lambda: keys.payload_key(-1), "message_id = "),
    ],
)
def test_a_key_that_cannot_be_written_is_refused(build: Callable[[], bytes], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build()


def test_no_two_kinds_of_single_record_share_a_key() -> None:
    singles = {
        own_keys.ID_BLOCK_KEY,
        own_keys.PURGE_EPOCH_KEY,
        own_keys.CLOCK_KEY,
        own_keys.CONFIG_REVISION_KEY,
        own_keys.FORGOTTEN_REVISION_KEY,
        own_keys.DRAINING_KEY,
        own_keys.LEAVING_KEY,
    }
    assert len(singles) == 7
    assert len(set(keys.RecordType)) == len(keys.RecordType.__members__)
