"""What a broker would have stored: the queues, their lists and where they stand, its clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

import numpy as np

from benchmarks.volume.packs import Packs
from benchmarks.volume.plan import HOUR_MS, Layout, State, retention_s
from libs.storage.layout.buckets import BucketKind, bucket_number, lane_order, order_of, split_order
from libs.storage.layout.keys import (
    active_key,
    attempts_key,
    done_key,
    failed_key,
    queue_state_key,
    waiting_key,
)
from libs.storage.layout.own_keys import (
    CLOCK_KEY,
    CONFIG_REVISION_KEY,
    delayed_key,
    routing_cursor_key,
)
from libs.storage.records.delayed_records import encode_delayed
from libs.storage.records.queues import (
    FailedAttempt,
    encode_active,
    encode_attempts,
    encode_done,
    encode_failed,
)
from libs.storage.records.states import (
    LaneRecord,
    QueueStateRecord,
    encode_clock,
    encode_config_revision,
    encode_queue_state,
    encode_routing_cursor,
)
from services.broker.core.leases import IN_FLIGHT_BUCKET_MAX
from services.broker.core.lifecycle import creation_rows, new_state
from services.broker.core.lists.finished_lists import LIST_ROW_MAX
from services.broker.core.queue import Notes, Queue
from services.broker.core.settings import DEFAULT_PRIORITY, QueueSettings
from services.broker.core.waiting.available import TIMED_BUCKET_MAX
from services.broker.core.waiting.lane import READY_BUCKET_MAX
from services.broker.core.waiting.orders import Orders

LEASE_MS = 30_000
CONSUMER = "worker"
ATTEMPTS = 3
REASON = "nack: no"
TOOK_MS = 500
"""From the receipt of a message to its claim, and from that to its ack."""

Row = tuple[bytes, bytes]


@dataclass(slots=True)
class Written:
    """Where one queue stands, as far as its lists are written."""

    lanes: list[LaneRecord] = field(default_factory=list)
    counts: dict[State, int] = field(default_factory=dict)
    first_orders: dict[State, int] = field(default_factory=dict)
    last_order: int = 0

    def note(self, state: State, count: int, orders: Orders, first_order: int) -> None:
        """A list is written."""
        self.counts[state] = count
        self.first_orders[state] = first_order
        self.last_order = max(self.last_order, orders.last)


class QueueWriter:
    """Encodes the lists of all queues of a layout."""

    def __init__(self, layout: Layout, states: Any) -> None:
        volume = layout.volume
        self._layout = layout
        self._states = states
        # All messages of a queue and state are neighbours then, in the order of their IDs.
        group = np.arange(volume.stored, dtype=np.int64) % volume.queues * len(State) + states
        self._sorted = np.argsort(group, kind="stable")
        groups = np.arange(volume.queues * len(State) + 1)
        self._starts = np.searchsorted(group[self._sorted], groups)
        self._chance = np.random.default_rng(1)
        self.written = [Written() for _ in range(volume.queues)]

    def rows(self) -> Iterator[Row]:
        """All lists, type after type, as the keys stand."""
        numbered = list(enumerate(self._layout.volume.queue_ids()))
        for number, queue_id in numbered:
            yield from self._in_flight(number, queue_id)
            yield from self._ready(number, queue_id)
            yield from self._timed(number, queue_id)
        for number, queue_id in numbered:
            yield from self._done(number, queue_id)
        for number, queue_id in numbered:
            yield from self._failed(number, queue_id)
        for number, queue_id in numbered:
            yield from self._attempts(number, queue_id)

    # --- Which messages -------------------------------------------------------

    def _places(self, number: int, *states: State) -> Any:
        parts = []
        for state in states:
            at = number * len(State) + state
            parts.append(self._sorted[self._starts[at] : self._starts[at + 1]])
        return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))

    def _by_commit(self, places: Any, at_most: int) -> Iterator[tuple[int, list[int]]]:
        """The time of each commit with these messages, and their places: a row of a list each."""
        commits = places // self._layout.volume.entry
        cuts = [0, *(np.flatnonzero(np.diff(commits)) + 1).tolist(), len(places)]
        for first, end in pairwise(cuts):
            for start in range(first, end, at_most):
                received_ms = self._layout.received_ms(int(commits[start]))
                yield received_ms, places[start : min(start + at_most, end)].tolist()

    def _ids(self, places: Sequence[int]) -> Iterator[int]:
        return map(self._layout.id_of, places)

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._chance.integers(1, 1 << 64, count, dtype=np.uint64).tolist()
        return tokens

    # --- What waits -----------------------------------------------------------

    def _ready(self, number: int, queue_id: str) -> Iterator[Row]:
        places = self._places(number, State.EXPIRED, State.WAITING)
        if not len(places):
            return
        orders, first_order = Orders(0, 0), 0
        for received_ms, part in self._by_commit(places, READY_BUCKET_MAX):
            order = orders.next(received_ms)
            first_order = first_order or order
            deadlines = [received_ms + 1000 * retention_s(self._states[place]) for place in part]
            items = zip(self._ids(part), repeat(DEFAULT_PRIORITY), repeat(0), deadlines, repeat(0))
            bucket = bucket_number(DEFAULT_PRIORITY, BucketKind.READY, order)
            yield active_key(queue_id, bucket), encode_active(list(items), ())
        written = self.written[number]
        written.note(State.WAITING, len(places), orders, first_order)
        written.lanes.append(
            LaneRecord(DEFAULT_PRIORITY, BucketKind.READY, first_order, 0, orders.last, len(places))
        )

    def _timed(self, number: int, queue_id: str) -> Iterator[Row]:
        """Buckets by the time at which messages fall due, and the journal of their coming."""
        places = self._places(number, State.DELAYED)
        if not len(places):
            return
        hours_ms = int(self._layout.volume.delayed_hours * HOUR_MS)
        begin_ms = self._layout.now_ms + HOUR_MS
        due_ms = begin_ms + self._chance.integers(0, hours_ms, len(places))
        by_time = np.argsort(due_ms, kind="stable")
        sorted_ms = due_ms[by_time]
        starts = np.flatnonzero(np.concatenate(([True], np.diff(sorted_ms) != 0)))
        within = np.arange(len(places)) - np.repeat(
            starts, np.diff(np.concatenate((starts, [len(places)])))
        )
        sorted_numbers = within // TIMED_BUCKET_MAX + 1
        yield from self._timed_buckets(queue_id, places[by_time], sorted_ms, sorted_numbers)
        numbers = np.empty_like(sorted_numbers)
        numbers[by_time] = sorted_numbers
        first_order, last_order = int(sorted_ms[0]) << 6, int(sorted_ms[-1]) << 6
        assert split_order(last_order).epoch == 0
        orders = Orders(0, 0)
        yield from self._journal(queue_id, places, due_ms, numbers, orders)
        written = self.written[number]
        written.note(State.DELAYED, len(places), orders, first_order)
        written.lanes.append(
            LaneRecord(DEFAULT_PRIORITY, BucketKind.TIMED, first_order, 0, last_order, len(places))
        )

    def _timed_buckets(self, queue_id: str, places: Any, ms: Any, numbers: Any) -> Iterator[Row]:
        changes = (np.diff(ms) != 0) | (np.diff(numbers) != 0)
        cuts = np.flatnonzero(np.concatenate(([True], changes, [True])))
        entry = self._layout.volume.entry
        long_ms = 1000 * retention_s(State.DELAYED)
        for chunk in range(0, len(cuts) - 1, 10_000):
            some = cuts[chunk : chunk + 10_001].tolist()
            base = some[0]
            here, times = places[base : some[-1]].tolist(), ms[base : some[-1]].tolist()
            for start, end in pairwise(some):
                items = [
                    (
                        self._layout.id_of(place),
                        DEFAULT_PRIORITY,
                        at_ms,
                        self._layout.received_ms(place // entry) + long_ms,
                        0,
                    )
                    for place, at_ms in zip(
                        here[start - base : end - base],
                        times[start - base : end - base],
                        strict=True,
                    )
                ]
                order = lane_order(BucketKind.TIMED, int(ms[start]) << 6, int(numbers[start]))
                key = waiting_key(queue_id, DEFAULT_PRIORITY, BucketKind.TIMED, order)
                yield key, encode_active(items, ())

    def _journal(
        self, queue_id: str, places: Any, due_ms: Any, numbers: Any, orders: Orders
    ) -> Iterator[Row]:
        at = 0
        for received_ms, part in self._by_commit(places, LIST_ROW_MAX):
            end = at + len(part)
            deadline_ms = received_ms + 1000 * retention_s(State.DELAYED)
            rows = zip(
                self._ids(part),
                repeat(DEFAULT_PRIORITY),
                due_ms[at:end].tolist(),
                repeat(deadline_ms),
                (due_ms[at:end] << 6).tolist(),
                numbers[at:end].tolist(),
            )
            yield (
                delayed_key(queue_id, orders.next(received_ms)),
                encode_delayed(list(rows)),  # type: ignore[arg-type]
            )
            at = end

    def _in_flight(self, number: int, queue_id: str) -> Iterator[Row]:
        places = self._places(number, State.IN_FLIGHT)
        if not len(places):
            return
        orders, now_ms, first_order = Orders(0, 0), self._layout.now_ms, 0
        for received_ms, part in self._by_commit(places, IN_FLIGHT_BUCKET_MAX):
            order = orders.next(now_ms)
            first_order = first_order or order
            rows = zip(
                self._ids(part),
                repeat(DEFAULT_PRIORITY),
                repeat(now_ms),
                repeat(now_ms + LEASE_MS),
                repeat(1),
                repeat(received_ms + 1000 * retention_s(State.IN_FLIGHT)),
                repeat(LEASE_MS),
                repeat(CONSUMER),
                self._tokens(len(part)),
            )
            bucket = bucket_number(0, BucketKind.IN_FLIGHT, order)
            yield active_key(queue_id, bucket), encode_active((), list(rows))
        self.written[number].note(State.IN_FLIGHT, len(places), orders, first_order)

    # --- What is over ---------------------------------------------------------

    def _done(self, number: int, queue_id: str) -> Iterator[Row]:
        places = self._places(number, State.DONE)
        if not len(places):
            return
        orders, first_order = Orders(0, 0), 0
        for received_ms, part in self._by_commit(places, LIST_ROW_MAX):
            done_ms = received_ms + 2 * TOOK_MS
            order = orders.next(done_ms)
            first_order = first_order or order
            rows = zip(
                self._ids(part),
                repeat(done_ms),
                repeat(1),
                repeat(CONSUMER),
                repeat(received_ms + TOOK_MS),
                self._tokens(len(part)),
                repeat(""),
            )
            yield done_key(queue_id, order), encode_done(list(rows))
        self.written[number].note(State.DONE, len(places), orders, first_order)

    def _failed(self, number: int, queue_id: str) -> Iterator[Row]:
        places = self._places(number, State.FAILED)
        if not len(places):
            return
        orders, first_order = Orders(0, 0), 0
        for received_ms, part in self._by_commit(places, LIST_ROW_MAX):
            failed_ms = received_ms + (ATTEMPTS + 1) * TOOK_MS
            order = orders.next(failed_ms)
            first_order = first_order or order
            rows = zip(
                self._ids(part),
                repeat(failed_ms),
                repeat(ATTEMPTS),
                repeat(DEFAULT_PRIORITY),
                repeat(received_ms + 1000 * retention_s(State.FAILED)),
                repeat(REASON),
            )
            yield failed_key(queue_id, order), encode_failed(list(rows))  # type: ignore[arg-type]
        self.written[number].note(State.FAILED, len(places), orders, first_order)

    def _attempts(self, number: int, queue_id: str) -> Iterator[Row]:
        for received_ms, part in self._by_commit(self._places(number, State.FAILED), LIST_ROW_MAX):
            claims = (received_ms + attempt * TOOK_MS for attempt in range(1, ATTEMPTS + 1))
            value = encode_attempts([FailedAttempt(CONSUMER, ms, REASON) for ms in claims])
            for message_id in self._ids(part):
                yield attempts_key(queue_id, message_id), value


def state_rows(layout: Layout, written: Sequence[Written]) -> Iterator[Row]:
    """The records of the queues and of the shard, once the lists are written."""
    volume = layout.volume
    notes = Notes()
    for revision, (queue_id, at) in enumerate(
        zip(volume.queue_ids(), written, strict=True), start=1
    ):
        settings = QueueSettings(
            f'headers["topic"] == "{queue_id}"',
            max_attempts=ATTEMPTS,
            done_retention_s=volume.done_retention_s,
            created_at_ms=layout.received_ms(0),
            updated_at_ms=layout.received_ms(0),
            revision=revision,
        )
        queue = Queue(queue_id, settings, new_state(None, revision), notes)
        yield from ((key, value) for key, value in creation_rows(queue) if value is not None)
        yield queue_state_key(queue_id), encode_queue_state(_state(revision, at))
    yield CONFIG_REVISION_KEY, encode_config_revision(volume.queues)
    yield routing_cursor_key(0), encode_routing_cursor(layout.last_message)
    yield CLOCK_KEY, encode_clock(layout.now_ms)


def _state(revision: int, at: Written) -> QueueStateRecord:
    return QueueStateRecord(
        epoch=0,
        deleted=False,
        last_order=max(at.last_order, order_of(0, 0, 0)),
        garbage_epochs=(),
        created_revision=revision,
        in_flight_count=at.counts.get(State.IN_FLIGHT, 0),
        done_count=at.counts.get(State.DONE, 0),
        failed_count=at.counts.get(State.FAILED, 0),
        first_in_flight_order=at.first_orders.get(State.IN_FLIGHT, 0),
        oldest_done_order=at.first_orders.get(State.DONE, 0),
        oldest_failed_order=at.first_orders.get(State.FAILED, 0),
        lanes=tuple(at.lanes),
    )


async def write_broker(layout: Layout, states: Any, packs: Packs) -> None:
    """All rows of the broker's database."""
    writer = QueueWriter(layout, states)
    await _put(writer.rows(), packs)
    await _put(state_rows(layout, writer.written), packs)
    await packs.finish()


async def _put(rows: Iterable[Row], packs: Packs) -> None:
    for at, (key, value) in enumerate(rows):
        packs.put(key, value)
        if not at % 64 and packs.full:
            await packs.write()
