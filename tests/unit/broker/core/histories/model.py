"""What a shard is expected to do, in the obvious way: dicts and lists, nothing clever.

It knows nothing of lanes, buckets or batches. Where the promise leaves room (two messages that came
within the same millisecond; a message past its retention that no one has looked at yet), so does
the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from libs.storage.records.queues import FailedAttempt

REMEMBERED = 20
"""Finished leases that must be remembered with the limits of these tests."""


@dataclass(frozen=True)
class Waiting:
    priority: int
    visible_at_ms: int
    deadline_ms: int  # of the retention; 0 = never
    attempts: int
    timed: bool
    arrival: int
    came_from_ms: int  # it was added, or fell due, not before
    came_until_ms: int  # and not after

    def expired(self, now_ms: int) -> bool:
        return 0 < self.deadline_ms <= now_ms

    @property
    def leaves_ms(self) -> int:
        return min(self.visible_at_ms, self.deadline_ms or self.visible_at_ms)

    def surely_before(self, other: Waiting) -> bool:
        if self.timed == other.timed:
            if not self.timed or self.visible_at_ms == other.visible_at_ms:
                return self.arrival < other.arrival
            return self.visible_at_ms < other.visible_at_ms
        return self.came_until_ms < other.came_from_ms


@dataclass(frozen=True)
class Held:
    token: int
    consumer: str
    claimed_at_ms: int
    deadline_ms: int
    length_ms: int
    attempts: int
    before: Waiting
    purges: int  # as many as there were at the claim: after another one its place is gone
    releasable: bool = True


@dataclass(frozen=True)
class Done:
    token: int
    attempts: int
    transferred_to: str = ""


@dataclass(frozen=True)
class Failed:
    attempts: int
    reason: str


@dataclass(frozen=True)
class Archived:
    attempts: int
    failed_at_ms: int
    deadline_ms: int


State = Waiting | Held | Done | Failed | Archived


@dataclass
class ModelQueue:
    max_attempts: int
    max_in_flight: int
    created: int
    lowest_max_attempts: int  # since the last commit: what had used them up is failed permanently
    walked_ms: int = 0  # the latest time at which a claim or peek looked, since the last start
    purges: int = 0  # of the available messages
    backoff_ms: int = 0  # times the attempts
    total_lease_ms: int = 43_200_000
    entries: dict[int, State] = field(default_factory=dict)
    attempts: dict[int, tuple[FailedAttempt, ...]] = field(default_factory=dict)
    replays: dict[int, tuple[int, int]] = field(default_factory=dict)  # by log: cursor, end

    def copy(self) -> ModelQueue:
        return replace(
            self,
            entries=dict(self.entries),
            attempts=dict(self.attempts),
            replays=dict(self.replays),
        )

    def end_of_extension(self, held: Held, lease_ms: int, now_ms: int) -> int:
        last_ms = max(held.claimed_at_ms + self.total_lease_ms, held.deadline_ms)
        return min(now_ms + (lease_ms or held.length_ms), last_ms)

    def waiting(self) -> dict[int, Waiting]:
        return {m: e for m, e in self.entries.items() if isinstance(e, Waiting)}

    def held(self) -> dict[int, Held]:
        return {m: e for m, e in self.entries.items() if isinstance(e, Held)}

    def done(self) -> dict[int, Done]:
        return {m: e for m, e in self.entries.items() if isinstance(e, Done)}

    def failed(self) -> dict[int, Failed]:
        return {m: e for m, e in self.entries.items() if isinstance(e, Failed)}

    def archived(self) -> dict[int, Archived]:
        return {m: e for m, e in self.entries.items() if isinstance(e, Archived)}

    def expire(self, message_id: int) -> None:
        """Removes an entry past its retention; its history goes, if it has failed in this life."""
        entry = self.entries.pop(message_id)
        assert isinstance(entry, Waiting)
        if entry.attempts:
            self.attempts.pop(message_id, None)

    def take_out(self, message_id: int) -> None:
        """Removes an entry out of turn."""
        assert isinstance(self.entries.pop(message_id), Waiting)

    def surely_visible(self, now_ms: int) -> dict[int, Waiting]:
        """What a claim must not pass over."""
        return {
            message_id: entry
            for message_id, entry in self.waiting().items()
            if not entry.expired(max(now_ms, self.walked_ms))
            and entry.attempts < self.lowest_max_attempts
            and (not entry.timed or entry.visible_at_ms <= now_ms)
        }

    def check_delivery(self, ids: list[int], now_ms: int, reachable: set[int]) -> None:
        """Whether these messages, in this order, may be the next ones."""
        waiting = self.waiting()
        assert len(set(ids)) == len(ids), "one message twice"
        for message_id in ids:
            assert message_id in waiting, f"{message_id} is {self.entries.get(message_id)}"
            entry = waiting[message_id]
            assert not entry.expired(now_ms), "delivered after its retention"
            assert not entry.timed or entry.visible_at_ms <= now_ms, "delivered early"
            assert entry.attempts < self.max_attempts, "more attempts than allowed"
            assert message_id in reachable, "delivered though its payload cannot be had"
        given = [waiting[message_id] for message_id in ids]
        for index, earlier in enumerate(given):
            for later in given[index + 1 :]:
                assert earlier.priority <= later.priority, "priorities are out of order"
                if earlier.priority == later.priority:
                    assert not later.surely_before(earlier), f"{later} came before {earlier}"
        passed_over = [
            entry
            for message_id, entry in self.surely_visible(now_ms).items()
            if message_id in reachable and message_id not in ids
        ]
        for entry in passed_over:
            for other in given:
                assert entry.priority >= other.priority, f"{entry} is more urgent than {other}"
                if entry.priority == other.priority:
                    assert not entry.surely_before(other), f"{entry} came before {other}"


@dataclass
class Model:
    """All that a crash can take back."""

    queues: dict[str, ModelQueue] = field(default_factory=dict)
    cursors: dict[int, int] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)  # oldest first
    arrivals: int = 0
    revision: int = 0
    executed: tuple[tuple[str, bytes, int], ...] = ()  # request IDs, their commands' hash, when
    pushes: tuple[bytes, ...] = ()  # all that there ever were, in order
    sent_count: int = 0  # of these

    def copy(self) -> Model:
        return replace(
            self,
            queues={name: queue.copy() for name, queue in self.queues.items()},
            cursors=dict(self.cursors),
            finished=dict(self.finished),
        )

    def arrival(self) -> int:
        self.arrivals += 1
        return self.arrivals

    def surely_remembered(self, token: int) -> bool:
        return token in list(self.finished)[-REMEMBERED:]

    def carry(self, message_id: int, source: ModelQueue, into: str) -> None:
        """The attempts at a message that gets an entry in another queue go along."""
        target = self.queues[into]
        if target is source or not source.attempts.get(message_id):
            return
        [name] = [queue_id for queue_id, queue in self.queues.items() if queue is source]
        items = list(target.attempts.get(message_id, ()))
        for one in source.attempts[message_id]:
            where = one.queue or name
            carried = one._replace(queue="" if where == into else where)
            if carried not in items:
                items.append(carried)
        target.attempts[message_id] = tuple(sorted(items, key=lambda one: one.claimed_at_ms))

    def holder(self, token: int) -> tuple[ModelQueue, int, Held] | None:
        for queue in self.queues.values():
            for message_id, entry in queue.held().items():
                if entry.token == token:
                    return queue, message_id, entry
        return None
