"""From and to protobuf: log entries, assignments, and a broker's queue configs.

Rules are brought up to the configs here, and a queue is left out by a call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import grpc
import grpc.aio

from libs.filters import DEFAULT_PRIORITY, TooSlow
from libs.serving.peers.calls import PeerFailed
from libs.storage.errors import CorruptRecord
from libs.storage.layout.partitions import Partition
from libs.storage.records.log_parts import read_log_parts
from services.router.entries import FreshMessages, LogEntry
from services.router.pieces import Piece, Seen
from services.router.routing import STEP_NS, BrokerRules, Columns, QueueRule
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc, ingest_pb2, queue_pb2


def log_entries(response: ingest_pb2.TailLogResponse) -> Iterator[LogEntry | None]:
    """The entries of one answer of TailLog, long ones in parts. Raises PeerFailed.

    Each is one step's work; None stands for a step that completes none.
    """
    try:
        for one in response.entries:
            for part in read_log_parts(one.value):
                entry = part and LogEntry(*part)
                if entry is not None and response.messages:
                    entry.keep_fresh(_fresh(entry, response.messages))
                yield entry
    except CorruptRecord as error:
        raise PeerFailed(f"a log entry cannot be read: {error}") from error


def _fresh(entry: LogEntry, messages: Sequence[ingest_pb2.StoredRun]) -> FreshMessages:
    """The messages that came with an entry and begin in it, and their size."""
    runs = [
        run
        for run in messages
        if run.message_ids and entry.first <= run.message_ids[0] <= entry.last
    ]
    return FreshMessages(runs, sum(run.ByteSize() + FRESH_RUN_BYTES for run in runs))


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
    return QueueRule(
        queue.queue_id,
        queue.filter if queue.HasField("filter") else None,
        queue.priority,
        fallback_priority=queue.fallback_priority
        if queue.HasField("fallback_priority")
        else DEFAULT_PRIORITY,
        default_delay_ms=queue.default_delay_ms,
        quarantine=queue.quarantine.reason,
        partition=_partition(queue.partition) if queue.HasField("partition") else None,
    )


def _partition(partition: queue_pb2.Partition) -> Partition:
    return Partition(partition.index, partition.count, partition.ordering_header)


FRESH_BYTES_MAX = 256 << 10
"""Messages that come along with one call, from some logs of which each brings 64 KiB at most: with
more there is no hurry, and the broker reads what it needs."""

FRESH_RUN_BYTES = 64
"""Memory of such a message, or of a run of them, besides its bytes on the wire."""


def assign_request(
    pieces: Iterable[tuple[int, Piece, Seen | None]],
) -> assignment_pb2.AssignRequest:
    """The call that sends judged pieces, each with its log's ingest shard and what counts for it.

    See `Route.seen_of`.
    """
    left_bytes = FRESH_BYTES_MAX
    ranges: list[assignment_pb2.LogRange] = []
    messages: list[ingest_pb2.StoredRun] = []
    for ingest_shard, piece, seen in pieces:
        result = _range(ingest_shard, piece.previous, piece.last, piece.columns)
        result.config_revision = piece.revision
        if seen is not None:
            result.seen_revision, result.seen_by = seen.revision, seen.incarnation
        ranges.append(result)
        for entry in piece.entries if piece.columns else ():
            fresh = entry.fresh
            if fresh is not None and fresh.size_bytes <= left_bytes:
                messages += fresh.runs
                left_bytes -= fresh.size_bytes
    return assignment_pb2.AssignRequest(ranges=ranges, messages=messages)


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


log = logging.getLogger(__name__)


class RoutingState(NamedTuple):
    """What a broker shard says of itself.

    Attributes:
        config_revision: Up to which the changes are.
        changes: Of queues; of one that changed meanwhile there may be two, the newer one last.
        cursors: Of the logs, by shard.
    """

    config_revision: int
    changes: Sequence[queue_pb2.QueueChange]
    cursors: dict[int, int]


async def read_state(
    channel: grpc.aio.Channel, shard: int, known: int, timeout_seconds: float | None = None
) -> RoutingState:
    """The cursors of a broker shard, and what changed after a revision, read page by page.

    The timeout is that of a page. Raises PeerFailed for an answer of another shard, and what the
    call raises.
    """
    stub = assignment_pb2_grpc.AssignmentServiceStub(channel)
    request = assignment_pb2.GetRoutingStateRequest(known_revision=known)
    changes: list[queue_pb2.QueueChange] = []
    while True:
        page = await stub.GetRoutingState(request, timeout=timeout_seconds)
        if not isinstance(page, assignment_pb2.GetRoutingStateResponse):
            raise PeerFailed("an answer that cannot be read")
        if page.broker_shard != shard:
            raise PeerFailed(f"broker shard {page.broker_shard} answers there")
        changes += page.changes
        if not page.next_page_token:
            cursors = {cursor.ingest_shard: cursor.sequence for cursor in page.cursors}
            return RoutingState(page.config_revision, changes, cursors)
        request.page_token = page.next_page_token


async def apply_changes(
    rules: BrokerRules, changes: Sequence[queue_pb2.QueueChange], revision: int
) -> None:
    """Bring rules to a revision, in steps: compiling ten thousand filters takes seconds."""
    until_ns = time.perf_counter_ns() + STEP_NS
    for change in changes:
        rules.change(queue_rules([change]), revision)
        if time.perf_counter_ns() > until_ns:
            await asyncio.sleep(0)
            until_ns = time.perf_counter_ns() + STEP_NS
    rules.revision = revision


async def ask_for_quarantine(
    channel: grpc.aio.Channel, slow: TooSlow, revision: int, timeout_seconds: float
) -> None:
    """Have the broker leave a queue out that takes too long, as it was at this revision.

    Raises what the call raises, but for the queue being gone.
    """
    log.warning("queue %s holds up others: %s", slow.queue_id, slow.reason)
    request = assignment_pb2.QuarantineQueueRequest(
        queue_id=slow.queue_id, queue_revision=revision, reason=slow.reason
    )
    try:
        stub = assignment_pb2_grpc.AssignmentServiceStub(channel)
        await stub.QuarantineQueue(request, timeout=timeout_seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
