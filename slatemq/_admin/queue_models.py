"""Queues as the client shows them: settings, counts, and the progress of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypedDict

from slatemq._checks import moved
from slatemq._requests import fields_of, message_of
from slatemq.errors import InvalidArgument
from slatemq.models import Duration, milliseconds
from slatemq.v1 import queue_pb2

BACKOFF_MS_MAX = 43_200_000
"""The longest wait after a failed attempt: 12 h."""


class BackoffKind(StrEnum):
    """How the wait grows with the attempts: initial; initial × n; initial × multiplierⁿ⁻¹."""

    FIXED = "fixed"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a message waits after its n-th failed attempt.

    `max_ms`: the longest wait. `jitter` j: the wait is multiplied by a random number between 1 - j
    and 1. As in::

        Backoff.exponential(1, max=600, jitter=0.5)  # about 1, 2, 4, … seconds, at most 10 minutes
    """

    kind: BackoffKind
    initial_ms: int
    max_ms: int = BACKOFF_MS_MAX
    multiplier: float = 0.0
    jitter: float = 0.0

    @staticmethod
    def none() -> Backoff:
        """No wait: a short outage of something that workers need makes dead letters."""
        return Backoff(BackoffKind.NONE, 0, 0)

    @staticmethod
    def fixed(initial: Duration, *, jitter: float = 0.0) -> Backoff:
        """Always the same wait."""
        return Backoff(BackoffKind.FIXED, milliseconds(initial, "initial"), jitter=jitter)

    @staticmethod
    def linear(
        initial: Duration,
        *,
        max: Duration | None = None,  # noqa: A002 - the usual word
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
        """Raises InvalidArgument for values that have no wire form."""
        if self.kind not in list(BackoffKind):
            known = ", ".join(BackoffKind)
            raise InvalidArgument("backoff.kind", f"must be one of {known}, not {self.kind!r}")
        try:
            return message_of(
                queue_pb2.Backoff,
                kind=_KINDS[BackoffKind(self.kind)],
                initial_ms=self.initial_ms,
                max_ms=self.max_ms,
                multiplier=self.multiplier,
                jitter=self.jitter,
            )
        except InvalidArgument as error:
            raise moved(error, f"backoff.{error.field}") from None


def _max_ms(longest: Duration | None) -> int:
    return milliseconds(longest, "max") if longest is not None else BACKOFF_MS_MAX


_KINDS = {one: queue_pb2.Backoff.Kind.Value(f"KIND_{one.name}") for one in BackoffKind}
_KIND_OF = {wire: kind for kind, wire in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class PriorityCounts:
    """The waiting messages of one priority."""

    available_count: int = 0
    delayed_count: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """The messages of a queue by state.

    `by_priority` has the priorities with waiting messages. `oldest_claimable_age_ms`: the longest
    time that a message has been claimable, delayed ones excluded; None when none is.
    """

    available_count: int = 0
    delayed_count: int = 0
    in_flight_count: int = 0
    done_count: int = 0
    failed_count: int = 0
    archived_count: int = 0
    by_priority: Mapping[int, PriorityCounts] = field(default_factory=dict)
    oldest_claimable_age_ms: int | None = None


_STATES = [one.name for one in fields(Counts) if one.name.endswith("_count")]


@dataclass(frozen=True, slots=True)
class Totals:
    """What has passed through a queue since its broker opened the shard; 0 again at a restart.

    Attributes:
        entered_count: Messages that came into it.
        claimed_count: Messages claimed, each as often as it was.
        acked_count: Messages acked, completed or transferred away.
        requeued_count: Messages put back for another attempt.
    """

    entered_count: int = 0
    claimed_count: int = 0
    acked_count: int = 0
    requeued_count: int = 0


@dataclass(frozen=True, slots=True)
class ReplayRange:
    """The replay of one log: sequences after the start, up to the end; done up to the cursor.

    `waits_for_ingest`: the log's ingest is down, and the start is not known yet. `replayed_count`
    messages of `message_count` were judged; None: not counted yet.
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
    """The replay of messages from before a queue's creation.

    `replayed_count` messages of `message_count` were judged, whether or not they matched; None: not
    counted yet.
    """

    ranges: tuple[ReplayRange, ...] = ()
    done: bool = False
    replayed_count: int = 0
    message_count: int | None = None

    @property
    def fraction(self) -> float:
        """The replayed part of the messages, 0 to 1; 0 while they are not counted yet."""
        if self.done:
            return 1.0
        return self.replayed_count / self.message_count if self.message_count else 0.0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why routing leaves a queue out, and since when, in ms since the Unix epoch.

    `being_created`: its partitions are; a creation that broke off is to be repeated.
    """

    reason: str
    since_ms: int
    being_created: bool = False


class QueueSettings(TypedDict, total=False):
    """The settings that `create_queue` and `update_queue` take; None stands for the default."""

    filter: str | None
    priority: str | None
    max_attempts: int | None
    lease: Duration | None
    max_lease: Duration | None
    done_retention: Duration | None
    max_in_flight: int | None
    default_delay: Duration | None
    backoff: Backoff | None
    fallback_priority: int | None
    max_total_lease: Duration | None
    failed_retention: Duration | None


@dataclass(frozen=True, slots=True)
class QueuePartition:
    """One partition of a queue, on a broker shard of its own; the last two as there."""

    broker_shard: int
    counts: Counts = field(default_factory=Counts)
    moving_to_broker_shard: int | None = None
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue and its settings; queue.proto has the limits of each.

    `replay` is None when the queue began with its creation, or there was nothing to replay;
    `quarantine` is None when the queue is routed.

    A partitioned queue is shown as one: counts and totals are sums, `replay` is the one with the
    most left. Its settings, `broker_shard` and `revision` are those of the first partition found.

    Attributes:
        partitions: By index, those that were found; empty where the queue is not partitioned.
        partitions_count: How many it has; 0 where it is not partitioned.
        ordering_header: Messages with the same value of it are in one partition; empty: none.
        missing_partitions: The indexes of those that were not found: their broker is down, or a
            creation or deletion broke off, which should be repeated. Counts are without them.
        paused: Of a partitioned queue: some of it is; `partitions` has which.
        settings_differ: Those that are not alike in all partitions, `paused` among them, since a
            change did not reach all: repeat it.
        moving_to_broker_shard: In lists, of a queue that moves, and is not there yet; else None.
            Of a partitioned queue that of the first partition that moves.
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
    totals: Totals = field(default_factory=Totals)
    default_delay_ms: int = 0
    backoff: Backoff = field(default_factory=Backoff.none)
    fallback_priority: int = 128
    max_total_lease_ms: int = 0
    failed_retention_s: int = 0
    paused: bool = False
    replay: Replay | None = None
    quarantine: Quarantine | None = None
    partitions: Mapping[int, QueuePartition] = field(default_factory=dict)
    partitions_count: int = 0
    ordering_header: str = ""
    missing_partitions: tuple[int, ...] = ()
    settings_differ: tuple[str, ...] = ()
    moving_to_broker_shard: int | None = None

    @property
    def broker_shards(self) -> tuple[int, ...]:
        """The broker shards that have the queue, by partition, as far as they were found."""
        return tuple(one.broker_shard for one in self.partitions.values()) or (self.broker_shard,)


@dataclass(frozen=True, slots=True)
class QueueDraft:
    """A queue that need not exist, as `explain` judges by it; None stands for the default.

    The default filter takes messages whose header `queue` is `queue_id`.
    """

    filter: str | None = None
    priority: str | None = None
    fallback_priority: int | None = None
    queue_id: str = ""


@dataclass(frozen=True, slots=True)
class DeletedQueue:
    """A queue that was deleted, as `watch_queues` reports it."""

    queue_id: str


ETAGS_BETWEEN = "."
"""Between the etags of partitions in that of their queue."""

_OWN = {
    "broker_shard",
    "revision",
    "etag",
    "created_at_ms",
    "updated_at_ms",
    "counts",
    "totals",
    "replay",
    "quarantine",
    "partition",
    "moving_to_broker_shard",
}
"""What is of a partition alone, and may differ from that of the others."""


def joined(parts: Sequence[queue_pb2.Queue]) -> Queue:
    """A queue of what brokers say of it: of all of it, or of each partition that was found.

    Of one that moves, what its new shard says counts.
    """
    # Last what is not moving: of each partition it counts.
    parts = sorted(parts, key=lambda part: not part.HasField("moving_to_broker_shard"))
    by_partition = {part.partition.index: part for part in parts}
    parts = [by_partition[index] for index in sorted(by_partition)]
    queues = [queue_of(part) for part in parts]
    first, partition = queues[0], parts[0].partition
    if not parts[0].HasField("partition"):
        return first
    by_index = {part.partition.index: one for part, one in zip(parts, queues, strict=True)}
    counts = [queue.counts for queue in queues]
    left = [queue.replay for queue in queues if queue.replay is not None]
    moving_to = (queue.moving_to_broker_shard for queue in queues)
    return replace(
        first,
        etag=ETAGS_BETWEEN.join(queue.etag for queue in queues),
        updated_at_ms=max(queue.updated_at_ms for queue in queues),
        counts=replace(sum_of_counts(counts), by_priority=_by_priority(counts)),
        totals=Totals(*map(sum, zip(*(astuple(queue.totals) for queue in queues), strict=True))),
        replay=min(left, key=lambda replay: replay.fraction) if left else None,
        quarantine=next((one.quarantine for one in queues if one.quarantine is not None), None),
        paused=any(queue.paused for queue in queues),
        partitions={
            index: QueuePartition(
                queue.broker_shard, queue.counts, queue.moving_to_broker_shard, queue.paused
            )
            for index, queue in by_index.items()
        },
        partitions_count=partition.count,
        ordering_header=partition.ordering_header,
        missing_partitions=tuple(n for n in range(partition.count) if n not in by_index),
        moving_to_broker_shard=next((shard for shard in moving_to if shard is not None), None),
        settings_differ=tuple(
            name
            for name in queue_pb2.Queue.DESCRIPTOR.fields_by_name
            if name not in _OWN
            and any(getattr(one, name) != getattr(parts[0], name) for one in parts)
        ),
    )


def _by_priority(each: Sequence[Counts]) -> dict[int, PriorityCounts]:
    by_priority: dict[int, PriorityCounts] = {}
    for counts in each:
        for priority, one in counts.by_priority.items():
            before = by_priority.get(priority, PriorityCounts())
            by_priority[priority] = PriorityCounts(
                before.available_count + one.available_count,
                before.delayed_count + one.delayed_count,
            )
    return dict(sorted(by_priority.items()))


def sum_of_counts(all_counts: Iterable[Counts]) -> Counts:
    """The counts of several queues, or of the partitions of one; not those by priority."""
    each = list(all_counts)
    ages = [one.oldest_claimable_age_ms for one in each if one.oldest_claimable_age_ms is not None]
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in _STATES}
    return Counts(**sums, oldest_claimable_age_ms=max(ages, default=None))


def queue_of(queue: queue_pb2.Queue) -> Queue:
    """A queue, or one partition of a queue, as its broker says it is."""
    return Queue(
        **fields_of(queue, Queue),
        counts=_counts_of(queue.counts),
        totals=Totals(**fields_of(queue.totals, Totals)),
        backoff=backoff_of(queue.backoff),
        replay=_replay_of(queue.replay) if queue.HasField("replay") else None,
        quarantine=Quarantine(**fields_of(queue.quarantine, Quarantine))
        if queue.HasField("quarantine")
        else None,
    )


def backoff_of(backoff: queue_pb2.Backoff) -> Backoff:
    """A backoff with its defaults filled in."""
    kind = _KIND_OF.get(backoff.kind, BackoffKind.NONE)
    if kind is BackoffKind.NONE:
        return Backoff.none()
    is_exponential = kind is BackoffKind.EXPONENTIAL
    multiplier = (backoff.multiplier or 2.0) if is_exponential else 0.0
    return Backoff(
        kind, backoff.initial_ms, backoff.max_ms or BACKOFF_MS_MAX, multiplier, backoff.jitter
    )


def _counts_of(counts: queue_pb2.QueueCounts) -> Counts:
    by_priority = {
        each.priority: PriorityCounts(**fields_of(each, PriorityCounts))
        for each in counts.by_priority
    }
    return Counts(**fields_of(counts, Counts), by_priority=by_priority)


def _replay_of(replay: queue_pb2.Replay) -> Replay:
    ranges = (ReplayRange(**fields_of(one, ReplayRange)) for one in replay.ranges)
    return Replay(**fields_of(replay, Replay), ranges=tuple(ranges))
