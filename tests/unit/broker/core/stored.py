"""Reads everything that the rows of a broker's database say about a queue, and checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from libs.storage.layout.buckets import BucketKind, split_bucket, split_order
from libs.storage.layout.keys import (
    BucketKey,
    RecordType,
    attempts_key,
    config_key,
    parse_active_key,
    parse_done_key,
    parse_failed_key,
    queue_state_key,
)
from libs.storage.layout.own_keys import parse_archived_key
from libs.storage.records.archived_records import ArchivedMessage, decode_archived
from libs.storage.records.queues import (
    AvailableMessage,
    DoneMessage,
    FailedAttempt,
    FailedMessage,
    InFlightMessage,
    decode_active,
    decode_attempts,
    decode_done,
    decode_failed,
)
from libs.storage.records.states import ArchivedRecord, QueueStateRecord, decode_queue_state
from services.broker.core.lists.finished_lists import FinishedList
from services.broker.core.queue import Queue
from tests.unit.storage.oracles import record_type_of

PARSERS = {
    RecordType.ACTIVE: parse_active_key,
    RecordType.DONE: parse_done_key,
    RecordType.FAILED: parse_failed_key,
    RecordType.ARCHIVED: parse_archived_key,
}


@dataclass
class StoredQueue:
    state: QueueStateRecord
    waiting: dict[int, AvailableMessage]
    held: dict[int, InFlightMessage]
    done: dict[int, DoneMessage]
    failed: dict[int, FailedMessage]
    archived: dict[int, ArchivedMessage]


def stored_queue(rows: dict[bytes, bytes], queue_id: str) -> StoredQueue | None:
    """The queue as the rows have it, None if there is none; each record must fit the others."""
    if config_key(queue_id) not in rows:
        return None
    state = decode_queue_state(rows[queue_state_key(queue_id)])
    assert not state.deleted
    found = StoredQueue(state, {}, {}, {}, {}, {})
    heads = {(lane.priority, lane.kind): lane for lane in state.lanes}
    counts = dict.fromkeys(heads, 0)
    for key in sorted(rows):
        kind = record_type_of(key)
        if kind is RecordType.ACTIVE and parse_active_key(key).queue == queue_id:
            bucket = split_bucket(parse_active_key(key).bucket)
            is_lane = bucket.kind is not BucketKind.IN_FLIGHT
            epoch = state.purges.lane_epoch if state.purges and is_lane else state.epoch
            if bucket.order == 0 or split_order(bucket.order).epoch != epoch:
                continue  # the empty record of the RFC's workflow, or garbage
            waiting, held = decode_active(rows[key])
            assert waiting or held, "an empty bucket is deleted, not written"
            assert bucket.order <= max(state.last_order, *(h.tail_order for h in heads.values()), 0)
            if bucket.kind is BucketKind.IN_FLIGHT:
                assert not waiting
                assert bucket.order >= state.first_in_flight_order > 0
                for lease in held:
                    assert lease.message_id not in found.held
                    found.held[lease.message_id] = lease
                continue
            assert not held
            lane = heads[bucket.priority, bucket.kind]
            assert lane.head_order <= bucket.order <= lane.tail_order, "a bucket left behind"
            if bucket.order == lane.head_order:
                assert lane.head_offset < len(waiting)
                waiting = waiting[lane.head_offset :]
            counts[bucket.priority, bucket.kind] += len(waiting)
            for item in waiting:
                assert item.message_id not in found.waiting, "one message twice"
                assert item.priority == bucket.priority
                found.waiting[item.message_id] = item
        else:
            _add_finished(found, queue_id, key, rows[key])
    assert counts == {name: lane.waiting_count for name, lane in heads.items()}
    assert all(counts.values()), "an empty lane is left out"
    _check_counts(found)
    return found


def _add_finished(found: StoredQueue, queue_id: str, key: bytes, value: bytes) -> None:
    """Adds a row of the done, failed or archived list, if it is a living one of this queue."""
    state = found.state
    lists: dict[RecordType, tuple[int, Callable[[bytes], list[Any]], dict[int, Any]]] = {
        RecordType.DONE: (state.oldest_done_order, decode_done, found.done),
        RecordType.FAILED: (state.oldest_failed_order, decode_failed, found.failed),
        RecordType.ARCHIVED: (_archived(state).oldest_order, decode_archived, found.archived),
    }
    kind = record_type_of(key)
    if kind not in lists:
        return
    oldest_order, decode, messages = lists[kind]
    if _is_of(PARSERS[kind](key), queue_id, state.epoch, oldest_order):
        for message in decode(value):
            assert message.message_id not in messages
            messages[message.message_id] = message


def _check_counts(found: StoredQueue) -> None:
    state = found.state
    assert len(found.held) == state.in_flight_count
    assert len(found.done) == state.done_count
    assert len(found.failed) == state.failed_count
    assert len(found.archived) == _archived(state).messages_count
    everywhere = [
        *found.waiting,
        *found.held,
        *found.done,
        *found.failed,
        *found.archived,
    ]
    assert len(everywhere) == len(set(everywhere)), "one message in two lists"


def _archived(state: QueueStateRecord) -> ArchivedRecord:
    return state.archived or ArchivedRecord()


def stored_attempts(
    rows: dict[bytes, bytes], queue_id: str, message_id: int
) -> tuple[FailedAttempt, ...]:
    value = rows.get(attempts_key(queue_id, message_id))
    return tuple(decode_attempts(value) if value else ())


def garbage_rows(
    rows: dict[bytes, bytes], queue_id: str, epoch: int, *, lanes_only: bool = False
) -> list[bytes]:
    """The rows that a former queue of this name, or the lanes of a purged one, left behind."""
    garbage = []
    for key in rows:
        parse = PARSERS.get(record_type_of(key))
        if parse is None or parse(key).queue != queue_id:
            continue
        if lanes_only and parse is not parse_active_key:
            continue
        bucket = split_bucket(parse(key).bucket)
        if lanes_only and bucket.kind is BucketKind.IN_FLIGHT:
            continue
        if bucket.order and split_order(bucket.order).epoch == epoch:
            garbage.append(key)
    return garbage


def garbage_lists(
    rows: dict[bytes, bytes], queue: Queue
) -> list[tuple[FinishedList[Any], list[tuple[bytes, int]]]]:
    """The rows that purges of the finished lists left behind, with their orders."""
    found = []
    lists: list[tuple[FinishedList[Any], RecordType]] = [
        (queue.done, RecordType.DONE),
        (queue.failed, RecordType.FAILED),
        (queue.archived, RecordType.ARCHIVED),
    ]
    for finished, kind in lists:
        keys = [key for key in sorted(rows) if record_type_of(key) is kind]
        orders = [(key, PARSERS[kind](key)) for key in keys]
        first, last = finished.garbage
        garbage = [
            (key, parsed.bucket)
            for key, parsed in orders
            if parsed.queue == queue.queue_id and first <= parsed.bucket <= last
        ]
        if finished.garbage.last:
            found.append((finished, garbage))
    return found


def _is_of(key: BucketKey, queue_id: str, epoch: int, oldest_order: int) -> bool:
    if key.queue != queue_id or not 0 < oldest_order <= key.bucket:
        return False
    return split_order(key.bucket).epoch == epoch
