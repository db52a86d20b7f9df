"""Removals: entries that a job wants removed, judged again by what the queue knows. Pure.

    available ──past its retention──► gone          done ──past the queue's done retention──► gone
    failed ──its content is archived──► archived ──redriven──► pushed, as a new message
       │                                   └──dropped──► gone
       └──past the queue's failed retention──► gone

Rows of lists are passed as they are stored; meanwhile the caller lets no others change them. What a
purge has made garbage since counts as gone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from libs.storage.records.archived_records import ArchivedMessage
from libs.storage.records.queues import DoneMessage, FailedMessage
from services.broker.core.lists.finished_lists import FinishedList
from services.broker.core.queue import Queue
from services.broker.core.shard import Shard
from services.broker.core.waiting.bucket import Bucket, Place

M = TypeVar("M", FailedMessage, ArchivedMessage)


class Outcome(Enum):
    """What became of an entry that was to be removed."""

    REMOVED = 1
    GONE = 2
    NOT_EXPIRED = 3  # its time has not come
    IN_FLIGHT = 4  # its lease may still be acked
    EXPIRED = 5  # no consumer would get it


class DeadLetter(NamedTuple):
    """A dead letter, in the failed list or archived."""

    message_id: int
    failed_at_ms: int
    run: str = ""
    """The run that archived it, if it is archived."""


# --- What waits -------------------------------------------------------------


def drop_waiting(
    queue: Queue, wanted: Mapping[Place, Sequence[int]], until_ms: int
) -> dict[Place, list[Outcome]]:
    """Drops messages from the buckets they should be in, if their retention ended by `until_ms`.

    May raise Needs. Name few buckets: they are in memory together.
    """
    found = queue.waiting.find_buckets(wanted)
    outcomes: dict[Place, list[Outcome]] = {}
    for place, ids in wanted.items():
        there = found[place]
        if there is None:
            outcomes[place] = [Outcome.GONE] * len(ids)
            continue
        lane, bucket = there
        outcomes[place], indexes = _judged_waiting(bucket, ids, until_ms)
        if indexes:
            queue.waiting.remove_expired(lane, bucket, indexes)
    return outcomes


def _judged_waiting(
    bucket: Bucket, ids: Sequence[int], until_ms: int
) -> tuple[list[Outcome], set[int]]:
    at: dict[int, list[int]] = {}  # a transfer may have brought a message twice
    for index in range(bucket.start, len(bucket.items)):
        at.setdefault(bucket.items[index].message_id, []).append(index)
    outcomes = []
    over: set[int] = set()
    for message_id in ids:
        indexes = at.get(message_id)
        if not indexes:
            outcomes.append(Outcome.GONE)
        elif 0 < bucket.items[indexes[-1]].retention_deadline_ms <= until_ms:
            outcomes.append(Outcome.REMOVED)
            over.add(indexes.pop())
        else:
            outcomes.append(Outcome.NOT_EXPIRED)
    return outcomes, over


# --- Done -------------------------------------------------------------------


def done_before(queue: Queue, before_ms: int, grace_ms: int, now_ms: int) -> int:
    """The time before which done messages may be removed; 0: none may."""
    retention_s = queue.settings.done_retention_s
    if not retention_s:
        return 0
    return max(min(before_ms, now_ms - retention_s * 1000 - grace_ms), 0)


class DoneRow(NamedTuple):
    """A row of the done list that is to lose messages: how many it has, and what stays of it.

    `tried` are those removed that have an attempts record, which is of no use any more.
    """

    order: int
    messages_count: int
    left: Sequence[DoneMessage]
    tried: Sequence[int]


def done_row(
    order: int, messages: Sequence[DoneMessage], before_ms: int, tried: Container[int]
) -> DoneRow | None:
    """What becomes of a row; None: nothing in it was done before then.

    `tried` has those of its messages that have an attempts record.
    """
    over = [one for one in messages if one.done_at_ms < before_ms]
    left = [one for one in messages if one.done_at_ms >= before_ms]
    # What was transferred may have come back, with its history.
    gone = [one.message_id for one in over if one.message_id in tried and not one.transferred_to]
    return DoneRow(order, len(messages), left, gone) if over else None


def prune_done(shard: Shard, queue: Queue, rows: Sequence[DoneRow]) -> int:
    """Removes the beginning of the done list; returns how many messages that is."""
    removed = 0
    tried: list[int] = []
    for row in rows:
        if not 0 < queue.done.oldest_order <= row.order:
            continue
        gone = row.messages_count - len(row.left)
        shard.write_rows([queue.done.rewrite(row.order, row.left, gone)])
        removed += gone
        tried += row.tried
    _forget_attempts(shard, queue, tried)
    return removed


# --- Failed and archived ----------------------------------------------------


class StoredRow(NamedTuple, Generic[M]):
    """A row of a list as it is stored, and which dead letters of it are wanted."""

    order: int
    stored: Sequence[M]
    wanted: Sequence[DeadLetter]
    numbers: Sequence[int] = ()
    """The places of those wanted in the call."""


def take_dead_letters(
    shard: Shard,
    queue: Queue,
    rows: Sequence[StoredRow[FailedMessage]],
    *,
    failed_by_ms: int | None = None,
) -> tuple[list[list[Outcome]], list[FailedMessage]]:
    """Removes dead letters that failed by then from the failed list, with their attempts records.

    Returns the outcomes by row, and the dead letters removed.
    """

    def judge(dead_letter: FailedMessage) -> Outcome:
        is_over = failed_by_ms is None or dead_letter.failed_at_ms <= failed_by_ms
        return Outcome.REMOVED if is_over else Outcome.NOT_EXPIRED

    items: list[list[Outcome]] = []
    taken: list[FailedMessage] = []
    for row in rows:
        outcomes, places = _judged(queue.failed, row, judge)
        items.append(outcomes)
        if places:
            _remove(shard, queue.failed, row, places)
            shard.redrives.note_removed(queue.queue_id, {row.order: places.keys()})
            taken += [row.stored[place] for place in places]
    _forget_attempts(shard, queue, [dead_letter.message_id for dead_letter in taken])
    return items, taken


def archive(queue: Queue, dead_letters: Sequence[FailedMessage], run: str, now_ms: int) -> None:
    queue.archived.add(ArchivedMessage.of(dead_letter, now_ms, run) for dead_letter in dead_letters)


def judge_archived(
    queue: Queue, row: StoredRow[ArchivedMessage], now_ms: int
) -> tuple[list[Outcome], dict[int, int]]:
    """What may be redriven of a row of archived messages: outcomes, and places by number."""

    def judge(one: ArchivedMessage) -> Outcome:
        is_over = 0 < one.retention_deadline_ms <= now_ms
        return Outcome.EXPIRED if is_over else Outcome.REMOVED

    return _judged(queue.archived, row, judge)


def redrive_archived(
    shard: Shard,
    queue: Queue,
    row: StoredRow[ArchivedMessage],
    pushes: Mapping[int, bytes],
    ingest_shard: int,
    now_ms: int,
) -> list[Outcome]:
    """Removes messages from a row of archived ones, and pushes their contents.

    `pushes` are the outbox rows, by the places of `wanted`; all that may be redriven have one.
    """
    outcomes, places = judge_archived(queue, row, now_ms)
    if not places:
        return outcomes
    values = [pushes[number] for number in places.values()]
    shard.outbox.check_capacity(len(values), sum(map(len, values)))
    for value in values:
        shard.outbox.push(ingest_shard, value, now_ms)
    _remove(shard, queue.archived, row, places)
    return outcomes


def drop_archived(shard: Shard, queue: Queue, row: StoredRow[ArchivedMessage]) -> list[Outcome]:
    """Removes messages from a row of archived ones, whichever run archived them."""
    runs = {(one.message_id, one.failed_at_ms): one.run for one in row.stored}
    named = [
        one._replace(run=runs.get((one.message_id, one.failed_at_ms), "")) for one in row.wanted
    ]
    row = row._replace(wanted=named)
    outcomes, places = _judged(queue.archived, row, lambda _: Outcome.REMOVED)
    if places:
        _remove(shard, queue.archived, row, places)
    return outcomes


def _judged(
    finished: FinishedList[M], row: StoredRow[M], judge: Callable[[M], Outcome]
) -> tuple[list[Outcome], dict[int, int]]:
    """The outcomes; and by their places in the row, the numbers of those removed in `wanted`."""
    at: dict[DeadLetter, list[int]] = {}
    # A purge since the row was read has left it as garbage.
    if 0 < finished.oldest_order <= row.order:
        for place, one in enumerate(row.stored):
            dead_letter = DeadLetter(one.message_id, one.failed_at_ms, getattr(one, "run", ""))
            at.setdefault(dead_letter, []).append(place)
    outcomes: list[Outcome] = []
    places: dict[int, int] = {}
    for number, dead_letter in enumerate(row.wanted):
        there = at.get(dead_letter)
        outcomes.append(judge(row.stored[there[-1]]) if there else Outcome.GONE)
        if there and outcomes[-1] is Outcome.REMOVED:
            places[there.pop()] = number
    return outcomes, places


def _remove(
    shard: Shard, finished: FinishedList[M], row: StoredRow[M], places: Mapping[int, int]
) -> None:
    left = [one for place, one in enumerate(row.stored) if place not in places]
    shard.write_rows([finished.rewrite(row.order, left, len(places))])


def _forget_attempts(shard: Shard, queue: Queue, ids: Sequence[int]) -> None:
    """Deletes attempts records, except of messages that are in flight here a second time.

    Scans all leases, some milliseconds for 100,000: call it once for many messages.
    """
    in_flight = queue.leases.message_ids() if ids else ()
    for message_id in ids:
        if message_id not in in_flight:
            shard.write_rows((key, None) for key in shard.attempts.forget(queue, message_id))
