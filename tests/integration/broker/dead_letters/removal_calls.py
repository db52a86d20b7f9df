"""Calls of RemovalService and ArchivedService that several tests make."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import grpc.aio

from libs.storage.layout.buckets import BucketKind, number_of, order_in_time
from services.broker.entries.handles import parse_handle
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.v1 import (
    archived_pb2,
    archived_pb2_grpc,
    entry_pb2,
    queue_pb2,
    removal_pb2,
    removal_pb2_grpc,
)
from tests.integration.broker import queue_calls
from tests.integration.broker.entry_calls import listed
from tests.integration.broker.rig import Rig

ARCHIVED = queue_pb2.ENTRY_STATE_ARCHIVED
GRACE_MS = 60_000
NOT_EXPIRED = removal_pb2.RefusedRemoval.REASON_NOT_EXPIRED
IN_FLIGHT = removal_pb2.RefusedRemoval.REASON_IN_FLIGHT


def removals(rig: Rig) -> Any:
    return removal_pb2_grpc.RemovalServiceStub(rig.channel)


def archived_dead_letters(rig: Rig) -> Any:
    return archived_pb2_grpc.ArchivedServiceStub(rig.channel)


def revision(rig: Rig, queue_id: str = "q") -> int:
    return rig.owner.shard.queues[queue_id].created_revision


async def make_anew(rig: Rig, **settings: Any) -> None:
    """Deletes the queue, and creates it when it is swept away."""
    await queue_calls.delete(rig)
    while True:
        try:
            await rig.create(**settings)
        except grpc.aio.AioRpcError as error:
            if from_rpc_error(error).reason != "QUEUE_BEING_REMOVED":
                raise
            await asyncio.sleep(0.01)
        else:
            return


def waiting_rows(entries: Iterable[entry_pb2.Entry]) -> list[removal_pb2.WaitingRow]:
    """The rows of entries that wait, or did when they were listed."""
    rows = []
    for entry in entries:
        place = parse_handle(entry.handle, 0).waiting
        assert place is not None
        rows.append(
            removal_pb2.WaitingRow(
                message_id=entry.message_id,
                priority=place.priority,
                timed=place.kind is BucketKind.TIMED,
                bucket_order=order_in_time(place.kind, place.order),
                bucket_number=number_of(place.order) if place.kind is BucketKind.TIMED else 0,
            )
        )
    return rows


def failed_rows(entries: Iterable[entry_pb2.Entry]) -> list[removal_pb2.FailedRow]:
    """The rows of dead letters, as they were listed."""
    return [
        removal_pb2.FailedRow(
            message_id=entry.message_id,
            failed_at_ms=entry.finished_at_ms,
            bucket_order=parse_handle(entry.handle, 0).number,
        )
        for entry in entries
    ]


async def remove(rig: Rig, queue_id: str = "q", **removal: Any) -> tuple[int, int]:
    """How many are removed and how many were gone; none is refused."""
    answer = await asked(rig, queue_id, **removal)
    assert not answer.refused
    return answer.removed_count, answer.gone_count


async def asked(rig: Rig, queue_id: str = "q", **removal: Any) -> removal_pb2.RemoveEntriesResponse:
    request = removal_pb2.RemoveEntriesRequest(
        queue_id=queue_id, created_revision=revision(rig, queue_id), **removal
    )
    return await removals(rig).RemoveEntries(request)  # type: ignore[no-any-return]


async def drop(rig: Rig, rows: Sequence[removal_pb2.WaitingRow]) -> tuple[int, int]:
    return await remove(rig, expired=removal_pb2.ExpiredRemoval(rows=rows))


async def prune(rig: Rig, before_ms: int) -> int:
    """Prunes the done list, to the end."""
    count = 0
    while True:
        answer = await asked(rig, done=removal_pb2.DoneRemoval(done_before_ms=before_ms))
        count += answer.removed_count
        if not answer.more:
            return count


async def archive(
    rig: Rig, rows: Sequence[removal_pb2.FailedRow], run: str = "run"
) -> tuple[int, int]:
    return await remove(rig, archive=removal_pb2.ArchiveRemoval(rows=rows, run=run))


async def archived_rows(rig: Rig, payload: bytes = b"content") -> list[archived_pb2.ArchivedRow]:
    """What would bring all archived letters back."""
    return [
        archived_pb2.ArchivedRow(
            message_id=one.message_id,
            failed_at_ms=one.finished_at_ms,
            bucket_order=one.archived.bucket_order,
            run=one.archived.run,
            payload=payload + b" %d" % one.message_id,
            headers={"number": str(one.message_id)},
        )
        for one in await listed(rig, ARCHIVED)
    ]


async def come_back(
    rig: Rig, rows: Sequence[archived_pb2.ArchivedRow], **rest: Any
) -> archived_pb2.RedriveArchivedResponse:
    request = archived_pb2.RedriveArchivedRequest(queue_id="q", rows=rows, **rest)
    return await archived_dead_letters(rig).RedriveArchived(request)  # type: ignore[no-any-return]
