"""Queues as the client tells them: settings, counts, and how far a replay is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from slatemq.models import Duration, milliseconds
from slatemq.v1 import queue_pb2

BACKOFF_MS_MAX = 43_200_000
"""The longest wait after a failed attempt: 12 h."""


class BackoffKind(StrEnum):
    """How the wait grows with the attempts."""

    FIXED = "fixed"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a message waits after its n-th failed attempt; see the proto for the formulas.

    `max_ms`: the longest wait. `jitter` j: the wait is a random part between (1 - j) and 1 of it.
    Made by::

        Backoff.exponential(1, max=600, jitter=0.5)  # about 1, 2, 4, … seconds, at most 10 minutes
    """

    kind: BackoffKind
    initial_ms: int
    max_ms: int = BACKOFF_MS_MAX
    multiplier: float = 0.0
    jitter: float = 0.0

    @staticmethod
    def none() -> Backoff:
        """No wait at all: what a worker needs and is down for a moment makes dead letters."""
        return Backoff(BackoffKind.NONE, 0, 0)

    @staticmethod
    def fixed(initial: Duration, *, jitter: float = 0.0) -> Backoff:
        """Always the same wait."""
        return Backoff(BackoffKind.FIXED, milliseconds(initial, "initial"), jitter=jitter)

    @staticmethod
    def linear(
        initial: Duration,
        *,
        max: Duration | None = None,  # noqa: A002 - the word of everybody
        jitter: float = 0.0,
    ) -> Backoff:
        """`initial` times n; `max` None: up to 12 h."""
        return Backoff(
            BackoffKind.LINEAR, milliseconds(initial, "initial"), _max_ms(max), jitter=jitter
        )

    @staticmethod
    def exponential(
        initial: Duration,
        *,
        multiplier: float = 2.0,
        max: Duration | None = None,  # noqa: A002 - as above
        jitter: float = 0.0,
    ) -> Backoff:
        """`initial` first, then `multiplier` times the wait before; `max` None: up to 12 h."""
        length = milliseconds(initial, "initial")
        return Backoff(BackoffKind.EXPONENTIAL, length, _max_ms(max), multiplier, jitter)

    def wire(self) -> queue_pb2.Backoff:
        """Its wire form. Raises ValueError or TypeError for what has none."""
        return queue_pb2.Backoff(
            kind=_KINDS[BackoffKind(self.kind)],
            initial_ms=self.initial_ms,
            max_ms=self.max_ms,
            multiplier=self.multiplier,
            jitter=self.jitter,
        )


def _max_ms(longest: Duration | None) -> int:
    return milliseconds(longest, "max") if longest is not None else BACKOFF_MS_MAX


_KINDS = {
    BackoffKind.FIXED: queue_pb2.Backoff.KIND_FIXED,
    BackoffKind.LINEAR: queue_pb2.Backoff.KIND_LINEAR,
    BackoffKind.EXPONENTIAL: queue_pb2.Backoff.KIND_EXPONENTIAL,
    BackoffKind.NONE: queue_pb2.Backoff.KIND_NONE,
}
_KIND_OF = {wire: kind for kind, wire in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class PriorityCounts:
    """How many messages of one priority wait."""

    available_count: int = 0
    delayed_count: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """How many messages of a queue are in which state.

    `by_priority` has the priorities with waiting messages. `oldest_claimable_age_ms`: how long the
    message that waits longest has been claimable, delayed ones excluded; None when none is.
    """

    available_count: int = 0
    delayed_count: int = 0
    in_flight_count: int = 0
    done_count: int = 0
    failed_count: int = 0
    archived_count: int = 0
    by_priority: Mapping[int, PriorityCounts] = field(default_factory=dict)
    oldest_claimable_age_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ReplayRange:
    """The replay of one log: sequences after the start, up to the end; done up to the cursor.

    `waits_for_ingest`: the log's ingest is down, and the start is not known yet. `replayed_count`
    messages were judged, of `message_count` in all; None: not counted yet.
    """

    ingest_shard: int
    start_sequence: int
    cursor: int
    end_sequence: int
    waits_for_ingest: bool = False
    replayed_count: int = 0
    message_count: int | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """How far the messages from before a queue's creation are brought in.

    `replayed_count` messages were judged, whether or not they matched, of `message_count` in all;
    None: not counted yet.
    """

    ranges: tuple[ReplayRange, ...] = ()
    done: bool = False
    replayed_count: int = 0
    message_count: int | None = None

    @property
    def fraction(self) -> float:
        """Which part of the messages is replayed: 0 to 1; 0 while they are not counted yet."""
        if self.done:
            return 1.0
        return self.replayed_count / self.message_count if self.message_count else 0.0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why routing leaves a queue out, and since when, in ms since 1970."""

    reason: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue and its settings; see the proto for units and limits.

    `replay` is None when the queue began with its creation, or nothing was there to replay;
    `quarantine` when it is routed as it should.
    """

    queue_id: str
    filter: str
    priority: str
    max_attempts: int
    lease_ms: int
    max_lease_ms: int
    done_retention_s: int
    max_in_flight: int
    broker_shard: int
    revision: int
    etag: str
    created_at_ms: int
    updated_at_ms: int
    counts: Counts = field(default_factory=Counts)
    default_delay_ms: int = 0
    backoff: Backoff = field(default_factory=Backoff.none)
    fallback_priority: int = 128
    max_total_lease_ms: int = 0
    failed_retention_s: int = 0
    paused: bool = False
    replay: Replay | None = None
    quarantine: Quarantine | None = None


@dataclass(frozen=True, slots=True)
class DeletedQueue:
    """A queue that is gone, as `watch_queues` tells it."""

    queue_id: str


def queue_of(queue: queue_pb2.Queue) -> Queue:
    """A queue from its wire form."""
    return Queue(
        queue_id=queue.queue_id,
        filter=queue.filter,
        priority=queue.priority,
        max_attempts=queue.max_attempts,
        lease_ms=queue.lease_ms,
        max_lease_ms=queue.max_lease_ms,
        done_retention_s=queue.done_retention_s,
        max_in_flight=queue.max_in_flight,
        broker_shard=queue.broker_shard,
        revision=queue.revision,
        etag=queue.etag,
        created_at_ms=queue.created_at_ms,
        updated_at_ms=queue.updated_at_ms,
        counts=_counts_of(queue.counts),
        default_delay_ms=queue.default_delay_ms,
        backoff=backoff_of(queue.backoff),
        fallback_priority=queue.fallback_priority,
        max_total_lease_ms=queue.max_total_lease_ms,
        failed_retention_s=queue.failed_retention_s,
        paused=queue.paused,
        replay=_replay_of(queue.replay) if queue.HasField("replay") else None,
        quarantine=Quarantine(queue.quarantine.reason, queue.quarantine.since_ms)
        if queue.HasField("quarantine")
        else None,
    )


def backoff_of(backoff: queue_pb2.Backoff) -> Backoff:
    """A backoff from its wire form, its defaults filled in."""
    kind = _KIND_OF.get(backoff.kind, BackoffKind.NONE)
    if kind is BackoffKind.NONE:
        return Backoff.none()
    is_exponential = kind is BackoffKind.EXPONENTIAL
    multiplier = (backoff.multiplier or 2.0) if is_exponential else 0.0
    return Backoff(
        kind, backoff.initial_ms, backoff.max_ms or BACKOFF_MS_MAX, multiplier, backoff.jitter
    )


def _counts_of(queue_counts: queue_pb2.QueueCounts) -> Counts:
    has_age = queue_counts.HasField("oldest_claimable_age_ms")
    return Counts(
        queue_counts.available_count,
        queue_counts.delayed_count,
        queue_counts.in_flight_count,
        queue_counts.done_count,
        queue_counts.failed_count,
        queue_counts.archived_count,
        {
            each.priority: PriorityCounts(each.available_count, each.delayed_count)
            for each in queue_counts.by_priority
        },
        queue_counts.oldest_claimable_age_ms if has_age else None,
    )


def _replay_of(replay: queue_pb2.Replay) -> Replay:
    ranges = (
        ReplayRange(
            part.ingest_shard,
            part.start_sequence,
            part.cursor,
            part.end_sequence,
            part.waits_for_ingest,
            part.replayed_count,
            part.message_count if part.HasField("message_count") else None,
        )
        for part in replay.ranges
    )
    message_count = replay.message_count if replay.HasField("message_count") else None
    return Replay(tuple(ranges), replay.done, replay.replayed_count, message_count)
