"""Log entries, queue changes and assignments, from and to protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libs.filters import DEFAULT_PRIORITY
from libs.serving.peers.calls import PeerFailed
from libs.storage.errors import CorruptRecord
from libs.storage.records.log_parts import read_log_parts
from services.router.entries import LogEntry
from services.router.pieces import Piece, Seen
from services.router.routing import Columns, QueueRule
from slatemq.v1 import assignment_pb2, ingest_pb2, queue_pb2


def log_entries(response: ingest_pb2.TailLogResponse) -> Iterator[LogEntry | None]:
    """The entries of one answer of TailLog, long ones in parts. Raises PeerFailed.

    Each is one step's work; None stands for a step that completes none.
    """
    try:
        for one in response.entries:
            for part in read_log_parts(one.value):
                yield part and LogEntry(*part)
    except CorruptRecord as error:
        raise PeerFailed(f"a log entry cannot be read: {error}") from error


def queue_rules(changes: Iterable[queue_pb2.QueueChange]) -> list[QueueRule]:
    """What changed, as far as routing goes; a change of a kind not known here is left out."""
    rules = []
    for change in changes:
        match change.WhichOneof("change"):
            case "queue":
                rules.append(queue_rule(change.queue))
            case "deleted_queue_id":
                rules.append(QueueRule(change.deleted_queue_id, deleted=True))
    return rules


def queue_rule(queue: queue_pb2.Queue) -> QueueRule:
    """A queue as it is now, as far as routing goes."""
    return QueueRule(
        queue.queue_id,
        queue.filter if queue.HasField("filter") else None,
        queue.priority,
        fallback_priority=queue.fallback_priority
        if queue.HasField("fallback_priority")
        else DEFAULT_PRIORITY,
        default_delay_ms=queue.default_delay_ms,
        quarantine=queue.quarantine.reason,
    )


def assign_request(
    pieces: Iterable[tuple[int, Piece, Seen | None]],
) -> assignment_pb2.AssignRequest:
    """The call that sends judged pieces, each with its log's ingest shard and what counts for it.

    See `Route.seen_of`.
    """
    ranges = []
    for ingest_shard, piece, seen in pieces:
        result = _range(ingest_shard, piece.previous, piece.last, piece.columns)
        result.config_revision = piece.revision
        if seen is not None:
            result.seen_revision, result.seen_by = seen.revision, seen.incarnation
        ranges.append(result)
    return assignment_pb2.AssignRequest(ranges=ranges)


def backfill_request(
    queue_id: str,
    queue_revision: int,
    ingest_shard: int,
    previous: int,
    last: int,
    columns: Columns,
    message_count: int,
    left_count: int,
) -> assignment_pb2.BackfillRequest:
    """The call that sends a queue's part of a judged piece of its replay."""
    return assignment_pb2.BackfillRequest(
        queue_id=queue_id,
        queue_revision=queue_revision,
        range=_range(ingest_shard, previous, last, columns),
        message_count=message_count,
        left_count=left_count,
    )


def _range(
    ingest_shard: int, previous: int, last: int, columns: Columns
) -> assignment_pb2.LogRange:
    log_range = assignment_pb2.LogRange(
        ingest_shard=ingest_shard, previous_sequence=previous, last_sequence=last
    )
    # Filled in place, there may be one for each of ten thousand queues: a quarter of the time that
    # a list of messages of its own takes.
    add = log_range.assignments.add
    for queue_id, column in columns.items():
        ids, deadlines_ms = column.message_ids, column.retention_deadlines_ms
        assignment = add(
            queue_id=queue_id,
            message_ids=ids,
            retention_deadlines_ms=deadlines_ms if any(deadlines_ms) else (),
        )
        if column.is_plain:
            continue
        priorities = column.priorities
        if priorities.count(DEFAULT_PRIORITY) != len(priorities):
            assignment.priorities.extend(priorities)
        if any(column.visible_at_ms):
            assignment.visible_at_ms.extend(column.visible_at_ms)
    return log_range
