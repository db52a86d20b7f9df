"""Leases in memory: each for itself, or those of a large claim as columns.

A claim of a thousand makes no object for every lease: a bucket keeps the messages as they lay in
their queue, and once what their leases share. Whoever needs a single lease, to extend it or to give
it back, has its bucket unpacked; most leases are claimed and acked by the hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from libs.storage.queues import AvailableMessage, InFlightMessage, encode_active, encode_in_flight
from services.broker.walks import Origin, Segment

if TYPE_CHECKING:
    from services.broker.queue_machine import Queue


class Lease:
    """One message in flight. `origin` is the bucket it came from, for giving it back."""

    __slots__ = (
        "attempts",
        "bucket",
        "claimed_at_ms",
        "consumer",
        "deadline_ms",
        "length_ms",
        "message_id",
        "origin",
        "priority",
        "queue",
        "retention_deadline_ms",
        "token",
        "visible_at_ms",
    )

    bucket: LeaseBucket

    def __init__(
        self,
        token: int,
        message_id: int,
        priority: int,
        claimed_at_ms: int,
        deadline_ms: int,
        attempts: int,
        retention_deadline_ms: int,
        length_ms: int,
        consumer: str,
        queue: Queue,
        visible_at_ms: int = 0,
        origin: Origin | None = None,
    ) -> None:
        self.token = token
        self.message_id = message_id
        self.priority = priority
        self.claimed_at_ms = claimed_at_ms
        self.deadline_ms = deadline_ms
        self.attempts = attempts
        self.retention_deadline_ms = retention_deadline_ms
        self.length_ms = length_ms
        self.consumer = consumer
        self.queue = queue
        self.visible_at_ms = visible_at_ms
        self.origin = origin

    @classmethod
    def restore(cls, stored: InFlightMessage, deadline_ms: int, queue: Queue) -> Lease:
        """The lease as it was stored, with the deadline that holds after a restart."""
        return cls(
            stored.lease,
            stored.message_id,
            stored.priority,
            stored.claimed_at_ms,
            deadline_ms,
            stored.attempts,
            stored.retention_deadline_ms,
            stored.lease_length_ms,
            stored.consumer,
            queue,
        )


_RECORD: Final[Callable[[Lease], tuple[Any, ...]]] = attrgetter(
    "message_id",
    "priority",
    "claimed_at_ms",
    "deadline_ms",
    "attempts",
    "retention_deadline_ms",
    "length_ms",
    "consumer",
    "token",
)
"""The fields of an InFlightMessage, without the time that its making takes."""


class Terms(NamedTuple):
    """What the leases of one claim share."""

    queue: Queue
    consumer: str
    claimed_at_ms: int
    deadline_ms: int
    length_ms: int


class Claimed:
    """What one claim took: messages with their tokens, as they were while they waited."""

    __slots__ = ("_segments", "items", "parts", "terms", "tokens")

    def __init__(self, terms: Terms, tokens: Sequence[int], segments: Sequence[Segment]) -> None:
        self.terms = terms
        self.tokens = tokens
        self.items: list[AvailableMessage] = [
            item for segment in segments for item in segment.items
        ]
        self.parts: list[tuple[LeaseBucket, int, int]] = []
        """The buckets that the leases lie in, each with the first and the end of its tokens."""
        self._segments = segments

    def leases(self) -> list[Lease]:
        """The leases one by one; none of them may have ended."""
        return [
            bucket.leases[token]
            for bucket, first, end in self.parts
            for token in self.tokens[first:end]
        ]

    def make(self, first: int, end: int) -> Iterator[Lease]:
        """Leases for the messages in these places."""
        queue, consumer, claimed_at_ms, deadline_ms, length_ms = self.terms
        origins = [
            (segment.kind, segment.order, place)
            for segment in self._segments
            for place in segment.places
        ]
        for at in range(first, end):
            item = self.items[at]
            yield Lease(
                self.tokens[at],
                item.message_id,
                item.priority,
                claimed_at_ms,
                deadline_ms,
                item.attempts + 1,
                item.retention_deadline_ms,
                length_ms,
                consumer,
                queue,
                item.visible_at_ms,
                origins[at],
            )


class LeaseBucket:
    """Leases that share a record, of one queue."""

    __slots__ = (
        "_claimed",
        "_leases",
        "_span",
        "_waited",
        "order",
        "queue",
        "stored",
        "watched_ms",
    )

    def __init__(self, queue: Queue, order: int, *, stored: bool = False) -> None:
        self.queue = queue
        self.order = order
        self.stored = stored
        self.watched_ms: int | None = None  # see Deadlines
        self._leases: dict[int, Lease] = {}
        # As long as they are columns: the claim, their part of it, and those that run, by token.
        self._claimed: Claimed | None = None
        self._span = (0, 0)
        self._waited: dict[int, AvailableMessage] = {}

    @classmethod
    def packed(cls, order: int, claimed: Claimed, first: int, end: int) -> LeaseBucket:
        """A bucket of a part of a claim, as columns."""
        bucket = cls(claimed.terms.queue, order)
        bucket._claimed, bucket._span = claimed, (first, end)
        bucket._waited = dict(zip(claimed.tokens[first:end], claimed.items[first:end], strict=True))
        return bucket

    @property
    def count(self) -> int:
        """How many leases there are."""
        return len(self._leases) if self._claimed is None else len(self._waited)

    @property
    def leases(self) -> dict[int, Lease]:
        """The leases one by one, by token; from now on they are kept so."""
        if self._claimed is not None:
            claimed, waited = self._claimed, self._waited
            self._claimed, self._waited = None, {}
            self.put(one for one in claimed.make(*self._span) if one.token in waited)
        return self._leases

    def put(self, leases: Iterable[Lease]) -> None:
        """Adds leases."""
        mine = self.leases
        for lease in leases:
            lease.bucket = self
            mine[lease.token] = lease

    def message_ids(self) -> list[int]:
        """The messages of the leases."""
        if self._claimed is not None:
            return [item.message_id for item in self._waited.values()]
        return [lease.message_id for lease in self._leases.values()]

    def tokens(self) -> list[int]:
        """The tokens of the leases."""
        return list(self._leases if self._claimed is None else self._waited)

    def earliest_ms(self) -> int:
        """The first deadline of its leases."""
        if self._claimed is not None:
            return self._claimed.terms.deadline_ms
        return min(lease.deadline_ms for lease in self._leases.values())

    def ended(self, now_ms: int) -> list[Lease]:
        """The leases whose deadline has come."""
        if self._claimed is not None and now_ms < self._claimed.terms.deadline_ms:
            return []
        return [lease for lease in self.leases.values() if lease.deadline_ms <= now_ms]

    def clear(self) -> None:
        """Drops all leases."""
        self._claimed, self._waited, self._leases = None, {}, {}

    def take_done(self, tokens: Sequence[int], now_ms: int) -> list[tuple[Any, ...]]:
        """Takes running leases out whose messages are done now; gives these as DoneMessages."""
        if self._claimed is None:
            return [done(self._leases.pop(token), now_ms) for token in tokens]
        terms = self._claimed.terms
        ids, _, _, _, attempts = zip(*map(self._waited.pop, tokens), strict=True)
        return list(
            zip(
                ids,
                repeat(now_ms),
                [before + 1 for before in attempts],
                repeat(terms.consumer),
                repeat(terms.claimed_at_ms),
                tokens,
                repeat(""),  # transferred to
                strict=False,
            )
        )

    def value(self) -> bytes:
        """The record, of at least one lease."""
        if self._claimed is None:
            return encode_active((), list(map(_RECORD, self._leases.values())))
        terms, count = self._claimed.terms, len(self._waited)
        ids, priorities, _, retention_deadlines_ms, attempts = zip(
            *self._waited.values(), strict=True
        )
        return encode_in_flight(
            (
                ids,
                priorities,
                (terms.claimed_at_ms,) * count,
                (terms.deadline_ms,) * count,
                [before + 1 for before in attempts],
                retention_deadlines_ms,
                (terms.length_ms,) * count,
                (terms.consumer,) * count,
                list(self._waited),
            )
        )


def done(lease: Lease, now_ms: int, transferred_to: str = "") -> tuple[Any, ...]:
    """The message of a lease, as a DoneMessage."""
    return (
        lease.message_id,
        now_ms,
        lease.attempts,
        lease.consumer,
        lease.claimed_at_ms,
        lease.token,
        transferred_to,
    )
