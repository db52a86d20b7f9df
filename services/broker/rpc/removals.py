"""RemovalService: removes what jobs of the janitor found expired or archived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from libs.storage.layout.buckets import (
    MAX_NUMBER,
    MAX_ORDER,
    MAX_ORDER_MS,
    MAX_PRIORITY,
    BucketKind,
    lane_order,
)
from libs.storage.layout.ids import MAX_MESSAGE_ID
from services.broker.core.batches.remove import Outcome
from services.broker.core.waiting.bucket import Place
from services.broker.dead_letters.mover import ListedDeadLetter, Mover
from services.broker.dead_letters.removals import Archiver, Remover, WaitingMessage
from services.broker.requests.limits import within
from services.broker.requests.queues import checked_id
from services.broker.rpc.dead_letter_rows import (
    check_count,
    checked_run,
    find_queue,
    listed_dead_letters,
)
from slatemq.errors import InvalidArgument
from slatemq.v1 import removal_pb2, removal_pb2_grpc

ROWS_MAX: Final = 10_000
"""Entries in one removal: some hundred milliseconds of work, in small bits."""

_REASONS: Final = {
    Outcome.NOT_EXPIRED: removal_pb2.RefusedRemoval.REASON_NOT_EXPIRED,
    Outcome.IN_FLIGHT: removal_pb2.RefusedRemoval.REASON_IN_FLIGHT,
}


class RemovalServicer(removal_pb2_grpc.RemovalServiceServicer):
    def __init__(self, mover: Mover, remover: Remover, archiver: Archiver) -> None:
        self._owner = mover.owner
        self._remover = remover
        self._archiver = archiver

    async def RemoveEntries(
        self, request: removal_pb2.RemoveEntriesRequest, context: Any
    ) -> removal_pb2.RemoveEntriesResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        removal = request.WhichOneof("removal")
        within("created_revision", request.created_revision, 1)
        match removal:
            case "expired":
                waiting = _waiting(request.expired.rows)
                queue = await find_queue(self._owner, queue_id, request.created_revision)
                return _removed(waiting, await self._remover.expired(queue, waiting))
            case "done":
                before_ms = request.done.done_before_ms
                within("done.done_before_ms", before_ms, 1, MAX_ORDER_MS)
                queue = await find_queue(self._owner, queue_id, request.created_revision)
                count, more = await self._remover.done(queue, before_ms)
                return removal_pb2.RemoveEntriesResponse(removed_count=count, more=more)
            case "archive":
                dead_letters = listed_dead_letters("archive.rows", request.archive.rows, ROWS_MAX)
                run = checked_run("archive.run", request.archive.run)
                queue = await find_queue(self._owner, queue_id, request.created_revision)
                return _removed(
                    dead_letters, await self._archiver.archive(queue, dead_letters, run)
                )
            case "failed_expired":
                dead_letters = listed_dead_letters(
                    "failed_expired.rows", request.failed_expired.rows, ROWS_MAX
                )
                queue = await find_queue(self._owner, queue_id, request.created_revision)
                return _removed(dead_letters, await self._remover.failed(queue, dead_letters))
        raise InvalidArgument("removal", "must say what to remove")


def _waiting(rows: Sequence[removal_pb2.WaitingRow]) -> list[WaitingMessage]:
    check_count("expired.rows", rows, ROWS_MAX)
    wanted = []
    for number, row in enumerate(rows):
        field = f"expired.rows[{number}]"
        within(f"{field}.message_id", row.message_id, 1, MAX_MESSAGE_ID)
        within(f"{field}.priority", row.priority, 0, MAX_PRIORITY)
        within(f"{field}.bucket_order", row.bucket_order, 1, MAX_ORDER)
        kind = BucketKind.TIMED if row.timed else BucketKind.READY
        within(f"{field}.bucket_number", row.bucket_number, 0, MAX_NUMBER)
        order = lane_order(kind, row.bucket_order, row.bucket_number)
        place = Place(row.priority, kind, order)
        wanted.append(WaitingMessage(place, row.message_id))
    return wanted


def _removed(
    wanted: Sequence[WaitingMessage | ListedDeadLetter], outcomes: Sequence[Outcome]
) -> removal_pb2.RemoveEntriesResponse:
    """The answer: how many are removed or gone, and which stay."""
    answer = removal_pb2.RemoveEntriesResponse(
        removed_count=outcomes.count(Outcome.REMOVED), gone_count=outcomes.count(Outcome.GONE)
    )
    for row, (one, outcome) in enumerate(zip(wanted, outcomes, strict=True)):
        if outcome in _REASONS:
            message_id = (one.dead_letter if isinstance(one, ListedDeadLetter) else one).message_id
            answer.refused.add(message_id=message_id, reason=_REASONS[outcome], row=row)
    return answer
