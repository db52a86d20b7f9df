"""RemovalService: removes what jobs found expired, and redrives archived dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from libs.serving.requests.headers import encoded_headers
from libs.storage.layout.buckets import (
    MAX_NUMBER,
    MAX_ORDER,
    MAX_ORDER_MS,
    MAX_PRIORITY,
    BucketKind,
    lane_order,
)
from libs.storage.layout.ids import MAX_MESSAGE_ID
from services.broker.core.batches.remove import DeadLetter, Outcome
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from services.broker.dead_letters.mover import ListedDeadLetter, Mover
from services.broker.dead_letters.removals import Archiver, Content, Remover, WaitingMessage
from services.broker.outbox.pusher import PUSHES_BYTES_MAX
from services.broker.requests.limits import within
from services.broker.requests.queues import checked_id
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.v1 import removal_pb2, removal_pb2_grpc

ROWS_MAX: Final = 10_000
"""Entries in one removal: some hundred milliseconds of work, in small bits."""

REDRIVEN_MAX: Final = 1000
"""Entries in one redrive: as many as commands in one Execute."""

RUN_BYTES_MAX: Final = 255
"""A name with a time and a random part has about 40."""

_REASONS: Final = {
    Outcome.NOT_EXPIRED: removal_pb2.RefusedRemoval.REASON_NOT_EXPIRED,
    Outcome.IN_FLIGHT: removal_pb2.RefusedRemoval.REASON_IN_FLIGHT,
    Outcome.EXPIRED: removal_pb2.RefusedRemoval.REASON_EXPIRED,
}


class RemovalServicer(removal_pb2_grpc.RemovalServiceServicer):
    def __init__(self, mover: Mover, remover: Remover, archiver: Archiver) -> None:
        self._limits = mover.pusher.limits
        self._owner = mover.owner
        self._remover = remover
        self._archiver = archiver

    async def RemoveEntries(  # noqa: N802 - the RPC's name
        self, request: removal_pb2.RemoveEntriesRequest, context: Any
    ) -> removal_pb2.RemoveEntriesResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        removal = request.WhichOneof("removal")
        within("created_revision", request.created_revision, 0 if removal == "archived" else 1)
        match removal:
            case "expired":
                waiting = _waiting(request.expired.rows)
                queue = await self._queue(queue_id, request.created_revision)
                return _removed(waiting, await self._remover.expired(queue, waiting))
            case "done":
                before_ms = request.done.done_before_ms
                within("done.done_before_ms", before_ms, 1, MAX_ORDER_MS)
                queue = await self._queue(queue_id, request.created_revision)
                count, more = await self._remover.done(queue, before_ms)
                return removal_pb2.RemoveEntriesResponse(removed_count=count, more=more)
            case "archive":
                dead_letters = _listed_dead_letters("archive.rows", request.archive.rows)
                run = _run("archive.run", request.archive.run)
                queue = await self._queue(queue_id, request.created_revision)
                return _removed(
                    dead_letters, await self._archiver.archive(queue, dead_letters, run)
                )
            case "failed_expired":
                dead_letters = _listed_dead_letters(
                    "failed_expired.rows", request.failed_expired.rows
                )
                queue = await self._queue(queue_id, request.created_revision)
                return _removed(dead_letters, await self._remover.failed(queue, dead_letters))
            case "archived":
                dead_letters = _listed_dead_letters("archived.rows", request.archived.rows)
                queue = await self._queue(queue_id, request.created_revision)
                outcomes = await self._archiver.drop(queue, dead_letters)
                answer = _removed(dead_letters, outcomes)
                answer.gone_rows.extend(_gone(outcomes))
                return answer
        raise InvalidArgument("removal", "must say what to remove")

    async def RedriveArchived(  # noqa: N802 - the RPC's name
        self, request: removal_pb2.RedriveArchivedRequest, context: Any
    ) -> removal_pb2.RedriveArchivedResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        within("created_revision", request.created_revision, 0)
        target_id = request.target_queue_id
        target_id = checked_id(target_id, "target_queue_id") if target_id else queue_id
        wanted, contents = self._archived(request.rows)
        queue = await self._queue(queue_id, request.created_revision)
        outcomes = await self._archiver.redrive(queue, target_id, wanted, contents)
        removed = _removed(wanted, outcomes)
        return removal_pb2.RedriveArchivedResponse(
            redriven_count=removed.removed_count,
            gone_count=removed.gone_count,
            refused=removed.refused,
            gone_rows=_gone(outcomes),
        )

    async def _queue(self, queue_id: str, created_revision: int) -> Queue:
        self._owner.admit()
        queue = await self._owner.find(queue_id)
        if created_revision not in (0, queue.created_revision):
            await self._owner.durable()
            raise FailedPrecondition(
                "QUEUE_CHANGED",
                f"queue {queue_id!r} was deleted and created again since",
                subject=queue_id,
                metadata={"created_revision": str(queue.created_revision)},
            )
        return queue

    def _archived(
        self, rows: Sequence[removal_pb2.ArchivedRow]
    ) -> tuple[list[ListedDeadLetter], list[Content]]:
        _check_count("rows", rows, REDRIVEN_MAX)
        wanted, contents = [], []
        size_bytes = 0
        for number, row in enumerate(rows):
            field = f"rows[{number}]"
            dead_letter = _dead_letter(field, row.message_id, row.failed_at_ms, row.bucket_order)
            run = _run(f"{field}.run", row.run)
            self._limits.check_payload(f"{field}.payload", len(row.payload))
            headers = dict(row.headers)
            encoded_headers(f"{field}.headers", 0, headers)
            size_bytes += row.ByteSize()
            if size_bytes > PUSHES_BYTES_MAX:
                raise InvalidArgument(
                    field, f"they have more than {PUSHES_BYTES_MAX} bytes together"
                )
            wanted.append(
                dead_letter._replace(dead_letter=dead_letter.dead_letter._replace(run=run))
            )
            contents.append(Content(row.payload, headers))
        return wanted, contents


def _waiting(rows: Sequence[removal_pb2.WaitingRow]) -> list[WaitingMessage]:
    _check_count("expired.rows", rows, ROWS_MAX)
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


def _listed_dead_letters(
    field: str, rows: Sequence[removal_pb2.FailedRow]
) -> list[ListedDeadLetter]:
    _check_count(field, rows, ROWS_MAX)
    return [
        _dead_letter(f"{field}[{number}]", row.message_id, row.failed_at_ms, row.bucket_order)
        for number, row in enumerate(rows)
    ]


def _dead_letter(field: str, message_id: int, failed_at_ms: int, order: int) -> ListedDeadLetter:
    within(f"{field}.message_id", message_id, 1, MAX_MESSAGE_ID)
    within(f"{field}.failed_at_ms", failed_at_ms, 1, MAX_ORDER_MS)
    within(f"{field}.bucket_order", order, 1, MAX_ORDER)
    return ListedDeadLetter(order, DeadLetter(message_id, failed_at_ms))


def _run(field: str, run: str) -> str:
    if not 1 <= len(run.encode()) <= RUN_BYTES_MAX:
        raise InvalidArgument(field, f"must have 1 to {RUN_BYTES_MAX} bytes")
    return run


def _check_count(field: str, rows: Sequence[object], most: int) -> None:
    if not 1 <= len(rows) <= most:
        raise InvalidArgument(field, f"1 to {most} rows, not {len(rows)}")


def _gone(outcomes: Sequence[Outcome]) -> list[int]:
    return [row for row, outcome in enumerate(outcomes) if outcome is Outcome.GONE]


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
