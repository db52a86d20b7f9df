"""Which keys of a queue are alive, by its state record."""

from __future__ import annotations

from libs.storage.database.queue_ranges import (
    LATE_MS,
    NumberRange,
    active_runs,
    attempts_run,
    done_run,
    failed_run,
    log_run,
    pack_run,
    payload_run,
)
from libs.storage.layout.buckets import BucketKind, bucket_number, last_order, order_of
from libs.storage.layout.keys import (
    active_key,
    active_range,
    attempts_key,
    done_key,
    failed_key,
    log_key,
    log_range,
    parse_active_key,
    payload_key,
    payload_range,
)
from libs.storage.records.payload_packs import pack_key, pack_range
from libs.storage.records.states import LaneRecord, PurgesRecord, QueueStateRecord

NOW_MS = 1_767_225_600_000
HEAD = order_of(2, NOW_MS, 1)

STATE = QueueStateRecord(
    epoch=2,
    deleted=False,
    last_order=HEAD + 100,
    garbage_epochs=(),
    created_revision=1,
    in_flight_count=3,
    done_count=1,
    failed_count=1,
    first_in_flight_order=HEAD + 9,
    oldest_done_order=HEAD,
    oldest_failed_order=HEAD + 1,
    lanes=(
        LaneRecord(128, BucketKind.READY, HEAD, 7, HEAD + 50, 20),
        LaneRecord(3, BucketKind.TIMED, HEAD, 0, HEAD, 0),
    ),
)


def holds(run: NumberRange | None, key: bytes) -> bool:
    assert run is not None
    return run.span.start <= key < run.span.end


def test_runs_span_what_the_builders_of_keys_span() -> None:
    for run, span in (
        (log_run(0), log_range(0)),
        (log_run(5, 9), log_range(5, 9)),
        (payload_run(5, 9), payload_range(5, 9)),
        (pack_run(5, 9), pack_range(5, 9)),
    ):
        assert (run.span.start, run.span.end[:-1]) == (span.start, span.end[:-1])
    assert log_run(0).number(log_key(7)) == payload_run(0, 9).number(payload_key(7)) == 7
    assert pack_run(0, 9).number(pack_key(7)) == 7
    assert holds(attempts_run("q", 5, 9), attempts_key("q", 9))
    assert not holds(attempts_run("q", 5, 9), attempts_key("q", 10))


def test_a_lane_begins_at_its_head_and_ends_with_its_epoch() -> None:
    lane, in_flight = active_runs("q", STATE)

    first = bucket_number(128, BucketKind.READY, HEAD)
    last = bucket_number(128, BucketKind.READY, last_order(2))
    assert lane.run.span == active_range("q", first, last)
    assert lane[1:] == (HEAD, 7, 20)
    assert parse_active_key(in_flight.run.span.start).bucket == bucket_number(
        0, BucketKind.IN_FLIGHT, HEAD + 9
    )
    assert not holds(lane.run, active_key("q", first - 1))


def test_after_a_purge_the_lanes_lie_in_their_own_epoch_and_leases_do_not() -> None:
    head = order_of(5, NOW_MS, 1)
    lane = LaneRecord(0, BucketKind.READY, head, 0, head, 1)
    purged = STATE._replace(lanes=(lane,), purges=PurgesRecord(5))

    waiting, in_flight = active_runs("q", purged)

    assert holds(waiting.run, active_key("q", bucket_number(0, BucketKind.READY, last_order(5))))
    last_lease = bucket_number(0, BucketKind.IN_FLIGHT, last_order(2))
    assert holds(in_flight.run, active_key("q", last_lease))
    assert not holds(in_flight.run, active_key("q", last_lease + 1))


def test_lists_begin_at_their_oldest_row_or_at_the_time_asked_for() -> None:
    day_ms = 86_400_000
    later = order_of(2, NOW_MS + day_ms, 0)
    late = order_of(2, NOW_MS + 2 * day_ms + LATE_MS, 0)

    whole = done_run("q", STATE, 0, None)
    day = done_run("q", STATE, NOW_MS + day_ms, NOW_MS + 2 * day_ms)

    assert holds(whole, done_key("q", HEAD))
    assert not holds(whole, done_key("q", HEAD - 1))
    assert holds(day, done_key("q", later))
    assert not holds(day, done_key("q", later - 1))
    assert holds(day, done_key("q", late))
    assert not holds(day, done_key("q", late + 64))
    assert holds(failed_run("q", STATE, 0, None), failed_key("q", HEAD + 1))
    assert done_run("q", STATE, 0, NOW_MS - LATE_MS - 1) is None


def test_an_empty_queue_has_no_runs() -> None:
    empty = STATE._replace(lanes=(), in_flight_count=0, done_count=0, failed_count=0)

    assert list(active_runs("q", empty)) == []
    assert done_run("q", empty, 0, None) is None
    assert failed_run("q", empty, 0, None) is None
