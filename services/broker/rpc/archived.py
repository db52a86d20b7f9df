"""ArchivedService: archived dead letters brought back, or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from libs.access.current import require_pushes
from libs.serving.requests.headers import encoded_headers
from services.broker.core.batches.remove import Outcome
from services.broker.dead_letters.mover import ListedDeadLetter, Mover
from services.broker.dead_letters.removals import Archiver, Content
from services.broker.outbox.pusher import check_together
from services.broker.requests.limits import within
from services.broker.requests.queues import checked_id
from services.broker.rpc.dead_letter_rows import (
    check_count,
    checked_run,
    find_queue,
    listed_dead_letter,
    listed_dead_letters,
)
from slatemq.v1 import archived_pb2, archived_pb2_grpc

ROWS_MAX: Final = 1000
"""Entries in one call: as many as commands in one Execute."""


class ArchivedServicer(archived_pb2_grpc.ArchivedServiceServicer):
    def __init__(self, mover: Mover, archiver: Archiver) -> None:
        self._limits = mover.pusher.limits
        self._owner = mover.owner
        self._archiver = archiver

    async def RedriveArchived(
        self, request: archived_pb2.RedriveArchivedRequest, context: Any
    ) -> archived_pb2.RedriveArchivedResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        within("created_revision", request.created_revision, 0)
        target_id = request.target_queue_id
        target_id = checked_id(target_id, "target_queue_id") if target_id else queue_id
        wanted, contents = self._archived(request.rows)
        # The caller gives what is pushed: nothing here knows what was archived.
        pushes = (
            (place, target_id, content.headers, len(content.payload))
            for place, content in enumerate(contents)
        )
        await require_pushes(pushes, "row")
        queue = await find_queue(self._owner, queue_id, request.created_revision)
        outcomes = await self._archiver.redrive(queue, target_id, wanted, contents)
        return archived_pb2.RedriveArchivedResponse(
            redriven_count=outcomes.count(Outcome.REMOVED),
            gone_count=outcomes.count(Outcome.GONE),
            gone_rows=_rows(outcomes, Outcome.GONE),
            expired_rows=_rows(outcomes, Outcome.EXPIRED),
        )

    async def DropArchived(
        self, request: archived_pb2.DropArchivedRequest, context: Any
    ) -> archived_pb2.DropArchivedResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        dead_letters = listed_dead_letters("rows", request.rows, ROWS_MAX)
        queue = await find_queue(self._owner, queue_id)
        outcomes = await self._archiver.drop(queue, dead_letters)
        return archived_pb2.DropArchivedResponse(
            dropped_count=outcomes.count(Outcome.REMOVED),
            gone_count=outcomes.count(Outcome.GONE),
            gone_rows=_rows(outcomes, Outcome.GONE),
        )

    def _archived(
        self, rows: Sequence[archived_pb2.ArchivedRow]
    ) -> tuple[list[ListedDeadLetter], list[Content]]:
        check_count("rows", rows, ROWS_MAX)
        wanted, contents = [], []
        size_bytes = 0
        for number, row in enumerate(rows):
            field = f"rows[{number}]"
            one = listed_dead_letter(field, row.message_id, row.failed_at_ms, row.bucket_order)
            run = checked_run(f"{field}.run", row.run)
            self._limits.check_payload(f"{field}.payload", len(row.payload))
            headers = dict(row.headers)
            encoded_headers(f"{field}.headers", 0, headers)
            size_bytes += row.ByteSize()
            check_together(field, number + 1, size_bytes)
            wanted.append(one._replace(dead_letter=one.dead_letter._replace(run=run)))
            contents.append(Content(row.payload, headers))
        return wanted, contents


def _rows(outcomes: Sequence[Outcome], wanted: Outcome) -> list[int]:
    return [row for row, outcome in enumerate(outcomes) if outcome is wanted]
