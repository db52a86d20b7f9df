"""Queues between protobuf and settings: validation, defaults, and the public form."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

from libs.filters import DEFAULT_FILTER, SOURCE_BYTES_MAX, check
from libs.serving.limits import HEADER_TEXT_BYTES_MAX
from libs.serving.requests.expressions import checking_expression
from libs.serving.requests.headers import check_delay_ms
from libs.storage.layout.partitions import Partition
from libs.storage.records.replay_records import OPEN_END, ReplayRange
from services.broker.core.commands import Purge
from services.broker.core.config_log import ConfigChange
from services.broker.core.lists.replays import Ranges
from services.broker.core.queue import Queue
from services.broker.core.settings import (
    BACKOFF_MS_MAX,
    DEFAULT_BACKOFF,
    MAX_LEASE_MS,
    MAX_TOTAL_LEASE_MS,
    MULTIPLIER_DEFAULT,
    MULTIPLIER_MAX,
    Backoff,
    BackoffKind,
    QueueSettings,
)
from services.broker.requests.limits import within, within_bytes
from slatemq._grouping import groups_of
from slatemq.errors import InvalidArgument
from slatemq.v1 import queue_pb2

QUEUE_ID = re.compile(r"[A-Za-z0-9._-]{1,255}")

_DEFAULTS = QueueSettings(filter="")

_U32_MAX = (1 << 32) - 1

_LEAST_MOST = {
    "max_attempts": (1, 65_535),
    "lease_ms": (1000, MAX_LEASE_MS),
    "max_lease_ms": (1000, MAX_LEASE_MS),
    "done_retention_s": (0, _U32_MAX),
    "max_in_flight": (1, 1_000_000),
    "fallback_priority": (0, 255),
    "max_total_lease_ms": (1000, MAX_TOTAL_LEASE_MS),
    "failed_retention_s": (0, _U32_MAX),
}

CHANGES_MAX = 1000
"""Changes of queues in one answer at most."""

CHANGES_BYTES_MAX = 1 << 20
"""Their bytes, unless there is one alone: a queue has 16 KiB of expressions, its replay 1 MB."""

PARTITIONS_MAX = 1000
"""Partitions of one queue at most: a claim of its name, and a look for it, name all shards."""

ETAG_BYTES = 8
"""Two states of a queue do not share one by chance."""

BEING_CREATED = "its partitions are being created; if that broke off, create it again"
"""The quarantine in which a partition begins."""

EntryState: TypeAlias = "queue_pb2.EntryState.ValueType"

SETTINGS = ("filter", "priority", "default_delay_ms", "backoff", *_LEAST_MOST)
"""The settings that a queue's owner may set, as they are named in the proto."""


_PUBLIC = {*SETTINGS, "revision", "created_at_ms", "updated_at_ms", "paused"} - {"backoff"}
"""What users see of the settings, under the same names."""


def checked_id(queue_id: str, field: str) -> str:
    """The queue ID; InvalidArgument naming `field` when it cannot be one."""
    if not QUEUE_ID.fullmatch(queue_id):
        raise InvalidArgument(
            field, "must be 1 to 255 characters of A-Z a-z 0-9 . _ -", reason="INVALID_QUEUE_ID"
        )
    return queue_id


def partition_of(
    request: queue_pb2.CreateQueueRequest, shard: int
) -> tuple[Partition | None, tuple[int, ...]]:
    """The partition to create on this shard, None for a whole queue, and the queue's shards.

    Raises InvalidArgument.
    """
    shards = tuple(request.broker_shards)
    if not request.queue.HasField("partition"):
        if shards:
            raise InvalidArgument("broker_shards", "is for partitions: set queue.partition")
        return None, (shard,)
    wire = request.queue.partition
    within("queue.partition.count", wire.count, 1, PARTITIONS_MAX)
    within("queue.partition.index", wire.index, 0, wire.count - 1)
    within_bytes("queue.partition.ordering_header", wire.ordering_header, HEADER_TEXT_BYTES_MAX)
    if len(shards) != wire.count or len(set(shards)) != wire.count or min(shards) < 0:
        raise InvalidArgument(
            "broker_shards", f"must be {wire.count} different shards, one for each partition"
        )
    if shards[wire.index] != shard:
        raise InvalidArgument(
            f"broker_shards[{wire.index}]", f"must be {shard}, the shard of this broker"
        )
    return Partition(wire.index, wire.count, wire.ordering_header), shards


def changes_of(
    queue: queue_pb2.Queue, names: Iterable[str], max_delay_ms: int = 0
) -> dict[str, Any]:
    """The settings named, checked one by one; those absent go to their default.

    Checking an expression may take 50 ms: call it in a thread where there is one.
    """
    changes: dict[str, Any] = {}
    defaults = QueueSettings(filter=DEFAULT_FILTER(queue.queue_id), backoff=DEFAULT_BACKOFF)
    checks: dict[str, Callable[[str, Any], Any]]
    checks = {"backoff": _backoff, "default_delay_ms": partial(_delay, max_delay_ms)}
    for name in names:
        if name in _EXPRESSIONS:
            source = getattr(queue, name) if queue.HasField(name) else None  # type: ignore[arg-type]
            changes |= _expression(name, source, getattr(defaults, name))
        elif queue.HasField(name):  # type: ignore[arg-type]
            changes[name] = checks.get(name, _number)(name, getattr(queue, name))
        elif name in _BOUNDED:
            changes[name] = None  # as long as the default, or as it may be
        else:
            changes[name] = getattr(defaults, name)
    return changes


def changed(base: QueueSettings, changes: Mapping[str, Any]) -> QueueSettings:
    """The settings with these changes; InvalidArgument when they do not go together."""
    changes = dict(changes)
    for name, bound in _BOUNDED.items():
        most_ms = changes.get(bound, getattr(base, bound))
        if name in changes and changes[name] is None:
            changes[name] = min(getattr(_DEFAULTS, name), most_ms)
        value_ms = changes.get(name, getattr(base, name))
        if value_ms > most_ms:
            raise InvalidArgument(
                f"queue.{name}" if name in changes else f"queue.{bound}",
                f"{name} {value_ms} would be above {bound} {most_ms}",
                reason="OUT_OF_RANGE",
            )
    return base.changed(**changes)


_BOUNDED = {"max_lease_ms": "max_total_lease_ms", "lease_ms": "max_lease_ms"}
"""Lengths that must not be above another one; that other one first."""


def _number(name: str, value: int) -> int:
    return within(f"queue.{name}", value, *_LEAST_MOST[name])


def _delay(most_ms: int, name: str, value: int) -> int:
    return check_delay_ms(f"queue.{name}", value, most_ms)


def _backoff(name: str, backoff: queue_pb2.Backoff) -> Backoff | None:
    if backoff == queue_pb2.Backoff(kind=queue_pb2.Backoff.KIND_NONE):
        return None
    if backoff.kind not in _KINDS:
        if backoff.kind == queue_pb2.Backoff.KIND_NONE:
            raise InvalidArgument(f"queue.{name}", "of KIND_NONE has no other field")
        kinds = ", ".join(queue_pb2.Backoff.Kind.Name(kind) for kind in (*_KINDS, *_NO_WAIT))
        raise InvalidArgument(f"queue.{name}.kind", f"must be one of {kinds}")
    within(f"queue.{name}.initial_ms", backoff.initial_ms, 1, BACKOFF_MS_MAX)
    max_ms = backoff.max_ms or BACKOFF_MS_MAX
    within(f"queue.{name}.max_ms", max_ms, backoff.initial_ms, BACKOFF_MS_MAX)
    if backoff.multiplier and backoff.kind != queue_pb2.Backoff.KIND_EXPONENTIAL:
        raise InvalidArgument(f"queue.{name}.multiplier", "is for KIND_EXPONENTIAL only")
    multiplier = backoff.multiplier or MULTIPLIER_DEFAULT
    within(f"queue.{name}.multiplier", multiplier, 1, MULTIPLIER_MAX)
    within(f"queue.{name}.jitter", backoff.jitter, 0, 1)
    return Backoff(_KINDS[backoff.kind], backoff.initial_ms, max_ms, multiplier, backoff.jitter)


_KINDS = {
    queue_pb2.Backoff.KIND_FIXED: BackoffKind.FIXED,
    queue_pb2.Backoff.KIND_LINEAR: BackoffKind.LINEAR,
    queue_pb2.Backoff.KIND_EXPONENTIAL: BackoffKind.EXPONENTIAL,
}
_NO_WAIT = (queue_pb2.Backoff.KIND_NONE,)
_PUBLIC_KINDS = {kind: public_kind for public_kind, kind in _KINDS.items()}


def _expression(name: str, source: str | None, default: str) -> dict[str, Any]:
    """An expression and its cost; the default, whose cost hardly counts, for None."""
    if source is None:
        return {name: default, f"{name}_cost": 0}
    field, cost = f"queue.{name}", 0
    if not source and name == "filter":
        raise InvalidArgument(field, "must not be empty; for the default, name none or reset it")
    if within_bytes(field, source, SOURCE_BYTES_MAX):
        with checking_expression(field):
            cost = check(source, _EXPRESSIONS[name]).cost
    return {name: source, f"{name}_cost": cost}


_EXPRESSIONS: Final[dict[str, Literal["bool", "int"]]] = {"filter": "bool", "priority": "int"}
"""The settings that are expressions, and the type of each result."""


def etag_of(settings: QueueSettings) -> str:
    """Changes with every change of the settings, and not where the queue moves.

    It comes from what they are, since shards count their revisions apart.
    """
    content = repr(_EDITABLE(settings)).encode()
    return hashlib.blake2s(content, digest_size=ETAG_BYTES).hexdigest()


_EDITABLE = attrgetter(*SETTINGS, "paused", "created_at_ms", "updated_at_ms")
"""What callers change, and when the queue and they were."""


def with_counts(queue: Queue, shard: int, now_ms: int, replay: Ranges) -> queue_pb2.Queue:
    """The queue as its users see it, with the counts of its messages."""
    answer = public(queue.queue_id, queue.settings, shard, replay)
    answer.counts.CopyFrom(_counts(queue, now_ms))
    answer.totals.CopyFrom(_totals(queue))
    return answer


def public(
    queue_id: str, settings: QueueSettings, shard: int, replay: Ranges = ()
) -> queue_pb2.Queue:
    """A queue of these settings as its users see it, without counts."""
    queue = queue_pb2.Queue(
        queue_id=queue_id,
        broker_shard=shard,
        etag=etag_of(settings),
        **{name: getattr(settings, name) for name in _PUBLIC},
    )
    queue.backoff.CopyFrom(_public_backoff(settings.backoff))
    if settings.quarantine:
        queue.quarantine.reason = settings.quarantine
        queue.quarantine.since_ms = settings.quarantined_at_ms
        queue.quarantine.being_created = settings.quarantine == BEING_CREATED
    if settings.partition is not None:
        queue.partition.MergeFrom(queue_pb2.Partition(**asdict(settings.partition)))
    if closed := [one for one in replay if one.end != OPEN_END]:
        queue.replay.CopyFrom(_replay(closed))
    return queue


def _counts(queue: Queue, now_ms: int) -> queue_pb2.QueueCounts:
    waiting = queue.waiting.counts(now_ms)
    return queue_pb2.QueueCounts(
        available_count=waiting.available,
        delayed_count=waiting.delayed,
        in_flight_count=queue.leases.count,
        done_count=queue.done.count,
        failed_count=queue.failed.count,
        archived_count=queue.archived.count,
        by_priority=[
            queue_pb2.PriorityCounts(
                priority=priority, available_count=available, delayed_count=delayed
            )
            for priority, available, delayed in waiting.by_priority
        ],
        oldest_claimable_age_ms=waiting.oldest_claimable_ms,
    )


def _totals(queue: Queue) -> queue_pb2.QueueTotals:
    return queue_pb2.QueueTotals(
        entered_count=queue.waiting.entered_count - queue.requeued_count,
        claimed_count=queue.claimed_count,
        acked_count=queue.acked_count,
        requeued_count=queue.requeued_count,
    )


def _public_backoff(backoff: Backoff | None) -> queue_pb2.Backoff:
    if backoff is None:
        return queue_pb2.Backoff(kind=queue_pb2.Backoff.KIND_NONE)
    return queue_pb2.Backoff(
        kind=_PUBLIC_KINDS[backoff.kind],
        initial_ms=backoff.initial_ms,
        max_ms=backoff.max_ms,
        multiplier=backoff.multiplier if backoff.kind is BackoffKind.EXPONENTIAL else 0,
        jitter=backoff.jitter,
    )


def _replay(ranges: Sequence[ReplayRange]) -> queue_pb2.Replay:
    counts = [one.message_count for one in ranges]
    known = [count for count in counts if count is not None]
    return queue_pb2.Replay(
        ranges=[
            queue_pb2.ReplayRange(
                ingest_shard=one.ingest_shard,
                start_sequence=one.start,
                cursor=one.cursor,
                end_sequence=one.end,
                waits_for_ingest=not one.is_found,
                replayed_count=one.done_count,
                message_count=count,
            )
            for one, count in zip(ranges, counts, strict=True)
        ],
        done=all(one.cursor == one.end for one in ranges),
        replayed_count=sum(one.done_count for one in ranges),
        message_count=sum(known) if len(known) == len(ranges) else None,
    )


def purges_of(states: Sequence[EntryState]) -> set[Purge]:
    """What a purge of these states empties; InvalidArgument for one that there is not."""
    if len(states) > len(_PURGES):
        raise InvalidArgument(
            "states", f"has {len(states)} items, but only {len(_PURGES)} states exist"
        )
    for index, state in enumerate(states):
        if state not in _PURGES:
            known = ", ".join(queue_pb2.EntryState.Name(one) for one in _PURGES)
            raise InvalidArgument(f"states[{index}]", f"must be one of {known}")
    return {_PURGES[state] for state in states} or {Purge.AVAILABLE}


_PURGES: dict[EntryState, Purge] = {
    queue_pb2.ENTRY_STATE_AVAILABLE: Purge.AVAILABLE,
    queue_pb2.ENTRY_STATE_DELAYED: Purge.AVAILABLE,
    queue_pb2.ENTRY_STATE_IN_FLIGHT: Purge.IN_FLIGHT,
    queue_pb2.ENTRY_STATE_DONE: Purge.DONE,
    queue_pb2.ENTRY_STATE_FAILED: Purge.FAILED,
    queue_pb2.ENTRY_STATE_ARCHIVED: Purge.ARCHIVED,
}


def pages_of(
    changes: Sequence[ConfigChange], replays: Mapping[str, Ranges], shard: int
) -> Iterator[list[queue_pb2.QueueChange]]:
    """The changes as messages, in pages of CHANGES_MAX and CHANGES_BYTES_MAX; one at least.

    Each page is made when it is asked for: that takes some milliseconds.
    """
    made = (_change(change, replays, shard) for change in changes)
    pages = groups_of(made, queue_pb2.QueueChange.ByteSize, CHANGES_BYTES_MAX, CHANGES_MAX)
    yield next(pages, [])
    yield from pages


def _change(
    change: ConfigChange, replays: Mapping[str, Ranges], shard: int
) -> queue_pb2.QueueChange:
    if change.settings is None:
        return queue_pb2.QueueChange(deleted_queue_id=change.queue_id)
    replay = replays.get(change.queue_id, ())
    return queue_pb2.QueueChange(queue=public(change.queue_id, change.settings, shard, replay))
