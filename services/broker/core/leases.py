"""The leases of a queue: its messages in flight, in buckets by the order of the claims.

A bucket is one record, one or more for each commit that claimed: it is written again when some of
its leases finish, and deleted with the last of them. A claim of a thousand makes no object for
every lease: its buckets keep the messages as they lay in their queue, and once what their leases
share. To extend or requeue a single lease, its bucket is unpacked; most leases are claimed and
acked by the hundred.

A lease's token is a block and a place in it, and no two claims have a block in common::

    token   | block: 56 random bits | place: 8 bits |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from libs.storage.layout.buckets import BucketKind, bucket_number
from libs.storage.layout.keys import active_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.queues import (
    AvailableMessage,
    InFlightMessage,
    encode_active,
    encode_in_flight,
)
from services.broker.core.settings import QueueSettings
from services.broker.core.waiting.orders import Orders
from services.broker.core.waiting.scan import Origin, Segment

PLACE_BITS: Final = 8
"""A block has at most 256 tokens."""

IN_FLIGHT_BUCKET_MAX = 250
"""Leases in a bucket at most: finishing one writes the others again, about 60 bytes each. No more
than a block has tokens."""

PACKED_MIN = 50
"""Claims of this many messages get a bucket of their own, which keeps them as columns."""


class LeaseOwner(Protocol):
    """What leases need of their queue; its methods are those of `Queue`."""

    queue_id: str
    created_revision: int
    settings: QueueSettings
    nacked_count: int
    ended_leases_count: int

    def ack_in(self, bucket: LeaseBucket, tokens: Sequence[int], now_ms: int) -> None: ...

    def ack(self, leases: Sequence[Lease], now_ms: int, transferred_to: str = "") -> None: ...

    def requeue(self, lease: Lease, visible_at_ms: int, now_ms: int) -> bool: ...

    def extend(self, lease: Lease, deadline_ms: int) -> None: ...

    def fail(self, lease: Lease, reason: str, now_ms: int) -> None: ...

    def release(self, leases: Sequence[Lease]) -> None: ...


@dataclass(eq=False, slots=True)
class Lease:
    """One message in flight. `origin` is where it was taken from, for a release."""

    bucket: LeaseBucket = field(init=False)

    token: int
    message_id: int
    priority: int
    claimed_at_ms: int
    deadline_ms: int
    attempts: int
    retention_deadline_ms: int
    length_ms: int
    consumer: str
    queue: LeaseOwner
    visible_at_ms: int = 0
    origin: Origin | None = None

    @classmethod
    def restore(cls, stored: InFlightMessage, queue: LeaseOwner) -> Lease:
        """A stored lease."""
        return cls(
            stored.lease,
            stored.message_id,
            stored.priority,
            stored.claimed_at_ms,
            stored.lease_deadline_ms,
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
"""The fields of an InFlightMessage, without the time that making one takes."""


class Terms(NamedTuple):
    """What the leases of one claim share."""

    queue: LeaseOwner
    consumer: str
    claimed_at_ms: int
    deadline_ms: int
    length_ms: int
    principal: str = ""
    """Who claimed; empty where there is no policy."""


class Claimed:
    """What one claim took: messages as they were while they waited, with their tokens."""

    __slots__ = ("_segments", "items", "parts", "terms", "tokens")

    def __init__(self, terms: Terms, segments: Sequence[Segment]) -> None:
        self.terms = terms
        self.tokens: list[int] = []
        """Assigned with the buckets that the leases are put into."""
        self.items: list[AvailableMessage] = [
            item for segment in segments for item in segment.items
        ]
        self.parts: list[tuple[LeaseBucket, int, int]] = []
        """The buckets that the leases lie in, each with the first and the end of its tokens."""
        self._segments = segments

    def leases(self) -> list[Lease]:
        """The leases as objects; none of them may have ended."""
        return [
            bucket.leases[token]
            for bucket, first, end in self.parts
            for token in self.tokens[first:end]
        ]

    def make(self, first: int, end: int) -> Iterator[Lease]:
        """Makes the leases of the messages from `first` to `end`."""
        queue, consumer, claimed_at_ms, deadline_ms, length_ms, _ = self.terms
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
    """Leases that share a record, of one queue, claimed by one principal.

    Who that is, is not stored: after a restart it is unknown, and empty.
    """

    __slots__ = (
        "_claimed",
        "_leases",
        "_span",
        "_waited",
        "is_block",
        "order",
        "principal",
        "queue",
        "stored",
        "watched_ms",
        "whole",
    )

    def __init__(
        self, queue: LeaseOwner, order: int, principal: str = "", *, stored: bool = False
    ) -> None:
        self.queue = queue
        self.order = order
        self.principal = principal
        self.stored = stored
        self.is_block = False
        """Whether it was made of all tokens of a block; none is ever added."""
        self.watched_ms: int | None = None  # see Deadlines
        self._leases: dict[int, Lease] = {}
        # While they are columns: the claim, their part of it, and the leases that run: all of
        # them (`whole` has their tokens), or some by token.
        self._claimed: Claimed | None = None
        self._span = (0, 0)
        self.whole: tuple[int, ...] = ()
        """The tokens of all leases that the bucket ever had if all of them run, else empty."""
        self._waited: dict[int, AvailableMessage] = {}

    @classmethod
    def packed(cls, order: int, claimed: Claimed, first: int, tokens: Sequence[int]) -> LeaseBucket:
        """A bucket of the part of a claim from `first` on, as columns."""
        bucket = cls(claimed.terms.queue, order, claimed.terms.principal)
        bucket.is_block = True
        bucket._claimed, bucket._span = claimed, (first, first + len(tokens))
        bucket.whole = tuple(tokens)
        return bucket

    @property
    def count(self) -> int:
        if self._claimed is None:
            return len(self._leases)
        return len(self.whole or self._waited)

    @property
    def leases(self) -> dict[int, Lease]:
        """The leases by token, as objects; from now on they are kept so."""
        if self._claimed is not None:
            claimed, waited = self._claimed, self._by_token()
            self._claimed, self._waited = None, {}
            self.put(one for one in claimed.make(*self._span) if one.token in waited)
        return self._leases

    def _by_token(self) -> dict[int, AvailableMessage]:
        """The messages of columns, by token; from now on some may be removed."""
        assert self._claimed is not None
        if self.whole:
            self._waited = dict(zip(self.whole, self._items(), strict=True))
            self.whole = ()
        return self._waited

    def _items(self) -> list[AvailableMessage]:
        """The messages of columns of which none was removed."""
        assert self._claimed is not None
        first, end = self._span
        return self._claimed.items[first:end]

    def put(self, leases: Iterable[Lease]) -> None:
        mine = self.leases
        for lease in leases:
            lease.bucket = self
            mine[lease.token] = lease

    def holds(self, token: int) -> bool:
        if self.whole:
            return self.whole[0] <= token <= self.whole[-1]  # a block goes up by one
        return token in (self._leases if self._claimed is None else self._waited)

    def holds_all(self, tokens: Sequence[int]) -> bool:
        """Whether all of these leases run, and none is named twice."""
        wanted, running = set(tokens), self._by_token() if self._claimed is not None else None
        held: Mapping[int, object] = self._leases if running is None else running
        return len(wanted) == len(tokens) and wanted <= held.keys()

    def message_ids(self) -> list[int]:
        if self._claimed is None:
            return [lease.message_id for lease in self._leases.values()]
        items = self._items() if self.whole else self._waited.values()
        return [item.message_id for item in items]

    def tokens(self) -> list[int]:
        return list(self._leases if self._claimed is None else self.whole or self._waited)

    def earliest_ms(self) -> int:
        if self._claimed is not None:
            return self._claimed.terms.deadline_ms
        return min(lease.deadline_ms for lease in self._leases.values())

    def ended(self, now_ms: int) -> list[Lease]:
        if self._claimed is not None and now_ms < self._claimed.terms.deadline_ms:
            return []
        return [lease for lease in self.leases.values() if lease.deadline_ms <= now_ms]

    def lengthen(self, since_ms: int, now_ms: int, grace_ms: int) -> bool:
        """Gives leases alive at `since_ms` their length from `now_ms` on, or `grace_ms` if shorter.

        Returns whether the end of any has moved; none moves back.
        """
        if self._claimed is not None:
            terms = self._claimed.terms
            if not since_ms < terms.deadline_ms < now_ms + min(terms.length_ms, grace_ms):
                return False
        has_moved = False
        for lease in self.leases.values():
            deadline_ms = now_ms + min(lease.length_ms, grace_ms)
            if since_ms < lease.deadline_ms < deadline_ms:
                lease.deadline_ms = deadline_ms
                has_moved = True
        return has_moved

    def clear(self) -> None:
        self._claimed, self.whole, self._waited, self._leases = None, (), {}, {}

    def remove_done(self, tokens: Sequence[int], now_ms: int) -> list[tuple[Any, ...]]:
        """Removes running leases whose messages are done now; returns these as DoneMessages."""
        if self._claimed is None:
            return [done(self._leases.pop(token), now_ms) for token in tokens]
        terms = self._claimed.terms
        items: Iterable[AvailableMessage]
        if len(tokens) == len(self.whole):
            items, tokens = self._items(), self.whole
            self.clear()
        else:
            items = map(self._by_token().pop, tokens)
        ids, _, _, _, attempts = zip(*items, strict=True)
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
        """The record; there must be a lease."""
        if self._claimed is None:
            return encode_active((), list(map(_RECORD, self._leases.values())))
        terms, count = self._claimed.terms, self.count
        items = self._items() if self.whole else self._waited.values()
        ids, priorities, _, retention_deadlines_ms, attempts = zip(*items, strict=True)
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
                self.tokens(),
            )
        )


def done(lease: Lease, now_ms: int, transferred_to: str = "") -> tuple[Any, ...]:
    """The message of a lease as a DoneMessage."""
    return (
        lease.message_id,
        now_ms,
        lease.attempts,
        lease.consumer,
        lease.claimed_at_ms,
        lease.token,
        transferred_to,
    )


@dataclass(eq=False)
class InFlight:
    """The in-flight messages of one queue, in buckets by the order in which they were claimed."""

    _queue_id: str
    _orders: Orders
    _touch: Callable[[], None]
    """Called whenever the queue's state record changes."""
    count: int = field(default=0, init=False)
    _buckets: dict[int, LeaseBucket] = field(default_factory=dict, init=False)
    _open: dict[str, LeaseBucket] = field(default_factory=dict, init=False)  # by principal
    _changed: dict[int, LeaseBucket] = field(default_factory=dict, init=False)

    @property
    def first_order(self) -> int:
        """The order of the first bucket; 0 when there is none."""
        return next(iter(self._buckets), 0)

    def __iter__(self) -> Iterator[Lease]:
        for bucket in self._buckets.values():
            yield from bucket.leases.values()

    def put(self, claimed: Claimed, next_block: Callable[[], int]) -> None:
        """Adds leases and gives them their tokens: those of one bucket have a block."""
        queue, principal = claimed.terms.queue, claimed.terms.principal
        now_ms = claimed.terms.claimed_at_ms
        first, count = 0, len(claimed.items)
        while first < count:
            length = min(count - first, IN_FLIGHT_BUCKET_MAX)
            if count - first >= PACKED_MIN:
                tokens = tokens_of(next_block(), length)
                bucket = LeaseBucket.packed(self._orders.next(now_ms), claimed, first, tokens)
                claimed.tokens += bucket.whole
                self._buckets[bucket.order] = bucket
            else:
                bucket = self._open_bucket(queue, principal, now_ms)
                self._buckets[bucket.order] = bucket
                length = min(length, IN_FLIGHT_BUCKET_MAX - bucket.count)
                claimed.tokens += tokens_of(next_block(), length)
                bucket.put(claimed.make(first, first + length))
                if bucket.count == IN_FLIGHT_BUCKET_MAX:
                    del self._open[principal]
            self.note_changed(bucket)
            claimed.parts.append((bucket, first, first + length))
            first += length
        self.count += count

    def _open_bucket(self, queue: LeaseOwner, principal: str, now_ms: int) -> LeaseBucket:
        bucket = self._open.get(principal)
        if bucket is None:
            bucket = LeaseBucket(queue, self._orders.next(now_ms), principal)
            self._open[principal] = bucket
        return bucket

    def remove(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            del lease.bucket.leases[lease.token]
            self.note_removed(lease.bucket, 1)

    def note_removed(self, bucket: LeaseBucket, count: int) -> None:
        """Notes that leases have left a bucket."""
        self.count -= count
        self.note_changed(bucket)

    def note_changed(self, bucket: LeaseBucket) -> None:
        """Notes that the leases of a bucket differ from what is stored."""
        self._changed[bucket.order] = bucket
        self._touch()

    def restore(self, lease: Lease, order: int) -> LeaseBucket:
        """Takes in a stored lease; orders must come ascending."""
        bucket = self._buckets.get(order)
        if bucket is None:
            bucket = self._buckets[order] = LeaseBucket(lease.queue, order, stored=True)
        bucket.put((lease,))
        self.count += 1
        return bucket

    def of_message(self, message_id: int) -> list[Lease]:
        """The leases on the entries of a message: scans all, some milliseconds for 100,000.

        An index would slow every claim, and only a handle that is out of date asks.
        """
        return [
            lease
            for bucket in self._buckets.values()
            if message_id in bucket.message_ids()
            for lease in bucket.leases.values()
            if lease.message_id == message_id
        ]

    def message_ids(self) -> set[int]:
        """The messages of all leases; some milliseconds for 100,000."""
        return {one for bucket in self._buckets.values() for one in bucket.message_ids()}

    def buckets_from(self, order: int) -> Iterator[LeaseBucket]:
        """The buckets from an order on, ascending."""
        for at in self._buckets:
            if at >= order:
                yield self._buckets[at]

    def empty(self) -> Iterator[tuple[LeaseBucket, Sequence[int], bool]]:
        """Drops all leases; yields each bucket with its tokens, and whether they are a whole block.

        The next commit deletes the rows.
        """
        for bucket in self._buckets.values():
            if bucket.count:
                is_whole, tokens = bool(bucket.whole), bucket.whole or bucket.tokens()
                bucket.clear()
                self.note_removed(bucket, len(tokens))
                yield bucket, tokens, is_whole

    def forget(self) -> Iterator[tuple[LeaseBucket, Sequence[int], bool]]:
        """Like `empty`, but writes nothing."""
        yield from self.empty()
        self._buckets, self._changed, self._open = {}, {}, {}

    def drain(self) -> Iterator[RowChange]:
        """The rows of the buckets that changed since the last drain."""
        for order, bucket in self._changed.items():
            key = active_key(self._queue_id, bucket_number(0, BucketKind.IN_FLIGHT, order))
            if bucket.count:
                yield key, bucket.value()
                bucket.stored = True
            else:
                del self._buckets[order]
                if bucket.stored:
                    yield key, None
        self._changed, self._open = {}, {}


def tokens_of(block: int, count: int) -> range:
    first = block << PLACE_BITS
    return range(first, first + count)
