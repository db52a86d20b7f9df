"""What the queues of a shard hold, told in the plainest way: dicts that every command walks whole.

It is compared with a real broker after random histories. Time never stands still between commands,
so that the order of delivery is certain but for what falls due in the very millisecond of another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Waiting:
    """Available or delayed. `since_ms` is when it came, or may be claimed first."""

    message_id: int
    priority: int
    since_ms: int
    deadline_ms: int
    attempts: int = 0

    def over(self, now_ms: int) -> bool:
        return 0 < self.deadline_ms <= now_ms


@dataclass(frozen=True)
class Held:
    """In flight."""

    token: str
    was: Waiting
    consumer: str
    claimed_ms: int
    ends_ms: int
    length_ms: int


class Attempt(NamedTuple):
    """A failed attempt; `queue_id` is empty where that was in the queue that tells it."""

    claimed_ms: int
    consumer: str
    outcome: str
    queue_id: str = ""


@dataclass
class PlainQueue:
    """One queue: what waits, by message; leases, by token; what is done and failed, in order."""

    name: str
    max_attempts: int
    backoff_ms: int = 0
    max_lease_ms: int = 30_000
    total_lease_ms: int = 43_200_000
    fallback_priority: int = 128
    paused: bool = False
    waiting: dict[int, Waiting] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    done: list[tuple[int, int, str, str]] = field(default_factory=list)
    failed: list[tuple[int, int, str]] = field(default_factory=list)
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    history: dict[int, list[Attempt]] = field(default_factory=dict)

    def has(self, message_id: int) -> bool:
        """Whether an entry of this message is in any of its lists but done."""
        return (
            message_id in self.waiting
            or any(lease.was.message_id == message_id for lease in self.held.values())
            or any(message_id == one for one, _, _ in self.failed)
        )

    def claimable(self, now_ms: int) -> list[Waiting]:
        """What may be claimed, in the order of delivery."""
        return [w for w in self.available(now_ms) if w.attempts < self.max_attempts]

    def available(self, now_ms: int) -> list[Waiting]:
        """As `claimable`, with those that a claim finds to have no attempts left."""
        there = [w for w in self.waiting.values() if w.since_ms <= now_ms and not w.over(now_ms)]
        return sorted(there, key=lambda w: (w.priority, w.since_ms))

    def delayed(self, now_ms: int) -> set[int]:
        """What waits for a later time."""
        return {
            w.message_id
            for w in self.waiting.values()
            if w.since_ms > now_ms and not w.over(now_ms)
        }

    def add(self, entry: Waiting, now_ms: int) -> None:
        """An entry comes, unless its retention is over."""
        if not entry.over(now_ms):
            self.waiting[entry.message_id] = replace(entry, since_ms=max(entry.since_ms, now_ms))

    def claim(
        self, message_id: int, token: str, consumer: str, length_ms: int, now_ms: int
    ) -> None:
        """A message was given to a consumer."""
        was = self.waiting.pop(message_id)
        was = replace(was, attempts=was.attempts + 1)
        self.held[token] = Held(token, was, consumer, now_ms, now_ms + length_ms, length_ms)

    def exhaust(self, message_id: int, reason: str) -> None:
        """A claim found that no attempts are left, since fewer are allowed than there were."""
        was = self.waiting.pop(message_id)
        assert was.attempts >= self.max_attempts
        self.failed.append((message_id, was.attempts, reason))
        self.kept[message_id] = (was.priority, was.deadline_ms)

    def extend(self, token: str, length_ms: int, now_ms: int) -> int:
        """A lease goes on; gives its end."""
        lease = self.held[token]
        wanted_ms = now_ms + min(length_ms or lease.length_ms, self.max_lease_ms)
        last_ms = max(lease.claimed_ms + self.total_lease_ms, lease.ends_ms)
        self.held[token] = replace(lease, ends_ms=min(wanted_ms, last_ms))
        return self.held[token].ends_ms

    def restarted(self, grace_ms: int, now_ms: int) -> None:
        """The broker was down: leases that run get some grace."""
        for token, lease in self.held.items():
            ends_ms = max(lease.ends_ms, now_ms + min(lease.length_ms, grace_ms))
            self.held[token] = replace(lease, ends_ms=ends_ms)

    def complete(self, token: str, transferred_to: str = "") -> Held:
        """A lease is finished well."""
        lease = self.held.pop(token)
        was = lease.was
        self.done.append((was.message_id, was.attempts, lease.consumer, transferred_to))
        return lease

    def give_back(self, token: str, delay_ms: int, now_ms: int) -> None:
        """A lease is released: the attempt does not count."""
        was = self.held.pop(token).was
        entry = replace(was, attempts=was.attempts - 1, since_ms=now_ms + delay_ms)
        self.add(entry, now_ms)

    def failed_attempt(self, token: str, outcome: str, delay_ms: int | None, now_ms: int) -> None:
        """A nack, or a lease that ended. A delay of None is the queue's backoff."""
        lease = self.held.pop(token)
        was = lease.was
        if was.attempts >= self.max_attempts:
            self._fail(lease, outcome, now_ms)
            return
        if was.over(now_ms):
            return
        self._remember(lease, outcome)
        wait_ms = self.backoff_ms if delay_ms is None else delay_ms
        self.add(replace(was, since_ms=now_ms + wait_ms), now_ms)

    def give_up(self, token: str, outcome: str, now_ms: int) -> None:
        """A fail command."""
        self._fail(self.held.pop(token), outcome, now_ms)

    def _fail(self, lease: Held, outcome: str, now_ms: int) -> None:
        was = lease.was
        self.failed.append((was.message_id, was.attempts, outcome))
        self.kept[was.message_id] = (was.priority, was.deadline_ms)
        self._remember(lease, outcome)

    def _remember(self, lease: Held, outcome: str) -> None:
        history = self.history.setdefault(lease.was.message_id, [])
        history.append(Attempt(lease.claimed_ms, lease.consumer, outcome))

    def carry_history(self, message_id: int, target: PlainQueue) -> None:
        """A message gets an entry in another queue, which tells the attempts here, too."""
        if target is self or not self.history.get(message_id):
            return
        items = list(target.history.get(message_id, ()))
        for one in self.history[message_id]:
            queue_id = one.queue_id or self.name
            carried = one._replace(queue_id="" if queue_id == target.name else queue_id)
            if carried not in items:
                items.append(carried)
        target.history[message_id] = sorted(items, key=lambda one: one.claimed_ms)

    def ended(self, now_ms: int) -> list[str]:
        """The leases whose time has come."""
        return [token for token, lease in self.held.items() if lease.ends_ms <= now_ms]

    def redrive(self, wanted: Iterable[int], into: str, target: PlainQueue, now_ms: int) -> None:
        """Dead letters become available again, with no attempts counted, but for expired ones.

        Those that go into another queue are done here.
        """
        moved = []
        for message_id in wanted:
            priority, deadline_ms = self.kept[message_id]
            entry = Waiting(message_id, priority, now_ms, deadline_ms)
            if not entry.over(now_ms):
                del self.kept[message_id]
                target.add(entry, now_ms)
                self.carry_history(message_id, target)
                moved.append(message_id)
        if target is not self:
            attempts = {message_id: count for message_id, count, _ in self.failed}
            self.done += [(message_id, attempts[message_id], "", into) for message_id in moved]
        self.failed = [one for one in self.failed if one[0] not in moved]
