"""Random histories of an instance in plain Python, and what each job may remove after one.

The histories know nothing of DataFrames. They go on after the jobs have judged: whatever then needs
a message that was removed has found a mistake in the rules.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from libs.storage.layout.ids import message_id, sequence_of

NOW_MS = 1_800_000_000_000
SPAN_MS = 1_000_000
WINDOW_S = 300
GRACE_MS = 7_000
LEASE_MS = 40_000

Row = dict[str, Any]


@dataclass
class Message:
    message_id: int
    shard: int
    sequence: int
    received_ms: int
    retention_s: int
    size: int
    direct_queue: str

    @property
    def deadline_ms(self) -> int:
        return self.received_ms + 1000 * self.retention_s if self.retention_s else 0


@dataclass
class Entry:
    queue: str
    message_id: int
    deadline_ms: int
    state: str = "available"
    attempts: int = 0
    first_claimed_ms: int = 0
    lease_ms: int = 0
    ended_ms: int = 0
    moved_to: str = ""


@dataclass
class Queue:
    name: str
    broker: int
    max_attempts: int
    done_retention_s: int
    failed_retention_s: int
    matches: int
    replay: dict[int, list[int]] = field(default_factory=dict)


class History:
    """Two ingests, two brokers and some queues, and what happened to them until NOW_MS.

    Attributes:
        removed: Messages that jobs have removed; entries that need one are in `missed`.
    """

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self.number = number
        self.now_ms = NOW_MS - SPAN_MS
        self.shards = (2 * number, 2 * number + 1)
        self.brokers = (2 * number, 2 * number + 1)
        # Of ingests and brokers alike: up to 6 s between two of them, less than the grace.
        self.skews_ms = {shard: self.random.randint(-3000, 3000) for shard in self.shards}
        self.messages: dict[int, Message] = {}
        self.logs: dict[int, list[Message]] = {shard: [] for shard in self.shards}
        self.cursors = {broker: dict.fromkeys(self.shards, 0) for broker in self.brokers}
        self.queues: dict[str, Queue] = {}
        self.entries: dict[tuple[str, int], Entry] = {}
        self.removed: set[int] = set()
        self.missed: list[tuple[str, int]] = []
        for _ in range(3):
            self._create(replayed=False)
        self._live(NOW_MS, steps=120)

    def go_on(self) -> None:
        """Lives on after the jobs; no replay begins: it would have their removals refused."""
        self._live(NOW_MS + SPAN_MS, steps=120, replays=False)

    def _live(self, until_ms: int, steps: int, *, replays: bool = True) -> None:
        times = sorted(self.random.randint(self.now_ms, until_ms) for _ in range(steps))
        usual: list[Callable[[], None]] = [
            *[self._publish] * 4,
            *[self._route] * 4,
            *[self._claim] * 4,
            *[self._finish] * 4,
            *[self._redrive, self._replay, self._sweep, self._archive],
        ]
        for time_ms in [*times, until_ms]:
            self.now_ms = time_ms
            self._end_leases()
            if replays and self.random.random() < 0.03:
                self._create(replayed=True)
            else:
                self.random.choice(usual)()
        self._end_leases()

    # --- What happens -------------------------------------------------------

    def _create(self, *, replayed: bool) -> None:
        choose = self.random.choice
        queue = Queue(
            f"h{self.number}-q{len(self.queues)}",
            choose(self.brokers),
            choose((1, 2, 3)),
            choose((0, 50, 400)),
            choose((0, 0, 100, 500)),
            choose((1, 2, 3)),
        )
        if replayed:
            for shard in self.shards:
                end = self.cursors[queue.broker][shard]
                before = [
                    one.message_id for one in self.logs[shard] if not self._in_window(one, queue)
                ]
                start = min(max(before, default=0), end)
                queue.replay[shard] = [start, end]
        self.queues[queue.name] = queue

    def _in_window(self, one: Message, queue: Queue) -> bool:
        return one.received_ms >= self._time(queue) - 1000 * WINDOW_S

    def _time(self, queue: Queue) -> int:
        return self.now_ms + self.skews_ms[queue.broker]

    def _publish(self) -> None:
        shard = self.random.choice(self.shards)
        log = self.logs[shard]
        last = sequence_of(log[-1].message_id) if log else 0
        sequence = last + self.random.choice((1, 1, 5))
        retention_s = self.random.choice((0, 0, 30, 200, 700))
        direct = self.random.choice(("", "", "", *self.queues))
        for offset in range(self.random.randint(1, 3)):
            one_id = message_id(shard, sequence + offset)
            size = self.random.choice((0, 10, 70_000))
            received_ms = max(self.now_ms + self.skews_ms[shard], log[-1].received_ms if log else 0)
            one = Message(one_id, shard, sequence, received_ms, retention_s, size, direct)
            self.messages[one_id] = one
            log.append(one)

    def _route(self) -> None:
        broker, shard = self.random.choice(self.brokers), self.random.choice(self.shards)
        cursor = self.cursors[broker][shard]
        ahead = sorted({one.message_id for one in self.logs[shard] if one.message_id > cursor})
        if not ahead:
            return
        last = self.random.choice(ahead[:6])
        for one in self.logs[shard]:
            if cursor < one.message_id <= last:
                for queue in self.queues.values():
                    if queue.broker == broker and self._is_for(one, queue):
                        self._enter(queue, one)
        self.cursors[broker][shard] = last

    def _is_for(self, one: Message, queue: Queue) -> bool:
        if one.direct_queue:
            return one.direct_queue == queue.name
        return one.message_id % 4 in range(queue.matches)

    def _enter(self, queue: Queue, one: Message) -> None:
        if not 0 < one.deadline_ms <= self._time(queue):
            self._need(queue.name, one.message_id)
        entry = Entry(queue.name, one.message_id, one.deadline_ms)
        self.entries.setdefault((queue.name, one.message_id), entry)

    def _replay(self) -> None:
        for queue in self.queues.values():
            for shard, place in queue.replay.items():
                cursor, end = place
                ahead = [one for one in self.logs[shard] if cursor < one.message_id <= end]
                if not ahead:
                    place[0] = end
                    continue
                last = self.random.choice(ahead).message_id
                for one in ahead:
                    if one.message_id <= last and not one.direct_queue and self._is_for(one, queue):
                        self._enter(queue, one)
                place[0] = last

    def _claim(self) -> None:
        waiting = [entry for entry in self._in("available") if not self._is_over(entry)]
        for entry in self.random.sample(waiting, min(3, len(waiting))):
            self._need(entry.queue, entry.message_id)
            entry.state = "in-flight"
            entry.attempts += 1
            time_ms = self._time(self.queues[entry.queue])
            entry.first_claimed_ms = entry.first_claimed_ms or time_ms
            entry.lease_ms = time_ms + LEASE_MS

    def _finish(self) -> None:
        for entry in self._some("in-flight"):
            match self.random.choice(("ack", "ack", "nack", "transfer")):
                case "ack":
                    self._end(entry, "done")
                case "nack":
                    self._return(entry)
                case "transfer":
                    self._move(entry)

    def _redrive(self) -> None:
        for entry in self._some("failed"):
            if self._is_over(entry):
                continue
            if self.random.random() < 0.5:
                entry.state, entry.attempts = "available", 0
                self._need(entry.queue, entry.message_id)
            else:
                self._move(entry)

    def _move(self, entry: Entry) -> None:
        broker = self.queues[entry.queue].broker
        others = [one for one in self.queues.values() if one.broker == broker]
        target = self.random.choice(others).name
        if (target, entry.message_id) in self.entries:
            return
        self._need(target, entry.message_id)
        moved = Entry(target, entry.message_id, entry.deadline_ms)
        self.entries[target, entry.message_id] = moved
        self._end(entry, "done")
        entry.moved_to = target

    def _end(self, entry: Entry, state: str) -> None:
        entry.state, entry.ended_ms = state, self._time(self.queues[entry.queue])

    def _sweep(self) -> None:
        """Brokers drop what is past its retention when they come by."""
        for entry in self._in("available"):
            if self._is_over(entry) and self.random.random() < 0.5:
                del self.entries[entry.queue, entry.message_id]

    def _archive(self) -> None:
        for entry in self._some("failed"):
            self._need(entry.queue, entry.message_id)
            del self.entries[entry.queue, entry.message_id]

    def _end_leases(self) -> None:
        for entry in self._in("in-flight"):
            if entry.lease_ms <= self._time(self.queues[entry.queue]):
                self._return(entry)

    def _return(self, entry: Entry) -> None:
        if entry.attempts >= self.queues[entry.queue].max_attempts:
            self._need(entry.queue, entry.message_id)
            self._end(entry, "failed")
        elif self._is_over(entry):
            del self.entries[entry.queue, entry.message_id]
        else:
            entry.state = "available"

    def _is_over(self, entry: Entry) -> bool:
        return 0 < entry.deadline_ms <= self._time(self.queues[entry.queue])

    def _in(self, state: str) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.state == state]

    def _some(self, state: str) -> list[Entry]:
        there = self._in(state)
        return self.random.sample(there, min(2, len(there)))

    def _need(self, queue: str, message_id: int) -> None:
        if message_id in self.removed:
            self.missed.append((queue, message_id))

    # --- What jobs may remove, at NOW_MS ------------------------------------

    def may_expire_entries(self) -> set[tuple[str, int]]:
        until_ms = NOW_MS - GRACE_MS
        return {
            (entry.queue, entry.message_id)
            for entry in self.entries.values()
            if entry.state == "available" and 0 < entry.deadline_ms <= until_ms
        }

    def may_expire_failed(self) -> set[tuple[str, int, int]]:
        found = set()
        for entry in self._in("failed"):
            kept_s = self.queues[entry.queue].failed_retention_s
            if kept_s and entry.ended_ms + 1000 * kept_s + GRACE_MS <= NOW_MS:
                found.add((entry.queue, entry.message_id, entry.ended_ms))
        return found

    def may_expire_messages(self) -> set[int]:
        needed = {
            entry.message_id
            for entry in self.entries.values()
            if entry.state in ("in-flight", "failed")
        }
        return {
            one.message_id
            for one in self.messages.values()
            if 0 < one.deadline_ms <= NOW_MS - GRACE_MS and one.message_id not in needed
        }

    def may_go_unreferenced(self) -> set[int]:
        needed = {entry.message_id for entry in self.entries.values() if entry.state != "done"}
        before_ms = NOW_MS - 1000 * WINDOW_S - GRACE_MS
        return {
            one.message_id
            for one in self.messages.values()
            if one.received_ms < before_ms
            and one.retention_s
            and one.message_id not in needed
            and all(one.message_id <= self.cursors[broker][one.shard] for broker in self.brokers)
            and not any(
                place[0] < place[1] and place[0] < one.message_id
                for queue in self.queues.values()
                for place in [queue.replay.get(one.shard, (0, 0))]
            )
        }

    def may_prune_done(self) -> set[tuple[str, int]]:
        found = set()
        for entry in self._in("done"):
            kept_s = self.queues[entry.queue].done_retention_s
            if kept_s and entry.ended_ms < NOW_MS - GRACE_MS - 1000 * kept_s:
                found.add((entry.queue, entry.message_id))
        return found

    def due_letters(self, older_than_ms: int) -> set[tuple[str, int, int]]:
        return {
            (entry.queue, entry.message_id, entry.ended_ms)
            for entry in self._in("failed")
            if entry.ended_ms < NOW_MS - older_than_ms
        }


def moment(ms: int) -> datetime | None:
    """The time that a table has for milliseconds; 0 is none."""
    return datetime.fromtimestamp(ms / 1000, UTC) if ms else None
