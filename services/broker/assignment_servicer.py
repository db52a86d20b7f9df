"""AssignmentService: what routers tell the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from libs.storage.buckets import MAX_PRIORITY
from libs.storage.ids import (
    FIRST_SEQUENCE,
    MAX_MESSAGE_ID,
    MAX_SEQUENCE,
    MAX_SHARD,
    message_id,
)
from services.broker.delivery import Delivery
from services.broker.owner import ShardOwner
from services.broker.queue_conversion import changes_between, checked_id
from services.broker.shard_machine import Assignment, Range
from slatemq.errors import InvalidArgument, NotFound
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc, queue_pb2

HAND_OVER_S = 2.0
"""How long an assignment waits for payloads of messages that somebody waits for; then it goes on
without, and the claims fetch them."""


class AssignmentServicer(assignment_pb2_grpc.AssignmentServiceServicer):
    """Turns requests into commands on the shard."""

    _owner: ShardOwner
    _delivery: Delivery

    def __init__(self, shard: int) -> None:
        """Serve this broker shard, from `begin` on."""
        self._shard = shard

    def begin(self, owner: ShardOwner, delivery: Delivery) -> None:
        """Take over what the start has opened; no call comes earlier."""
        self._owner = owner
        self._delivery = delivery

    async def GetRoutingState(  # noqa: N802 - the RPC's name
        self, request: assignment_pb2.GetRoutingStateRequest, context: Any
    ) -> assignment_pb2.GetRoutingStateResponse:
        """See the proto."""
        if request.known_revision < 0:
            raise InvalidArgument("known_revision", "must not be negative", reason="OUT_OF_RANGE")
        await self._owner.durable()
        return assignment_pb2.GetRoutingStateResponse(
            config_revision=self._owner.durable_revision,
            changes=self._changes(request.known_revision),
            cursors=[
                assignment_pb2.LogCursor(ingest_shard=log, sequence=sequence)
                for log, sequence in sorted(self._owner.durable_cursors.items())
            ],
            broker_shard=self._shard,
        )

    async def Assign(  # noqa: N802 - the RPC's name
        self, request: assignment_pb2.AssignRequest, context: Any
    ) -> assignment_pb2.AssignResponse:
        """See the proto."""
        if request.config_revision < 0:
            raise InvalidArgument("config_revision", "must not be negative", reason="OUT_OF_RANGE")
        ranges = _ranges(request.ranges)
        self._owner.admit()
        if request.config_revision == self._owner.shard.revision:
            await self._check_queues(ranges)
            await self._fetch(ranges)
        # The revision may have moved while the payloads were fetched: only this look counts.
        applied = await self._owner.run(
            lambda now_ms: self._apply(request.config_revision, ranges, now_ms),
            request.ByteSize(),
        )
        cursors = dict(self._owner.shard.cursors)
        await self._owner.durable()
        revision = self._owner.durable_revision
        return assignment_pb2.AssignResponse(
            results=[
                assignment_pb2.LogRangeResult(
                    ingest_shard=piece.log, applied=done, cursor=cursors.get(piece.log, 0)
                )
                for piece, done in zip(ranges, applied, strict=True)
            ],
            config_revision=revision,
            changes=self._changes(request.config_revision),
        )

    async def Backfill(  # noqa: N802 - the RPC's name
        self, request: assignment_pb2.BackfillRequest, context: Any
    ) -> assignment_pb2.BackfillResponse:
        """See the proto."""
        queue_id = checked_id(request.queue_id, "queue_id")
        if request.queue_revision < 0:
            raise InvalidArgument("queue_revision", "must not be negative", reason="OUT_OF_RANGE")
        piece = _range("range", request.range)
        for place, assignment in enumerate(piece.assignments):
            if assignment.queue_id != queue_id:
                field = f"range.assignments[{place}].queue_id"
                raise InvalidArgument(field, f"must be {queue_id!r}, as in `queue_id`")
        self._owner.admit()
        if (await self._owner.find(queue_id)).settings.revision == request.queue_revision:
            await self._fetch([piece])
        answer = await self._owner.run(
            lambda now_ms: self._apply_backfill(queue_id, request.queue_revision, piece, now_ms),
            request.ByteSize(),
        )
        await self._owner.durable()
        return answer

    def _apply_backfill(
        self, queue_id: str, revision: int, piece: Range, now_ms: int
    ) -> assignment_pb2.BackfillResponse:
        queue, shard = self._owner.queue(queue_id), self._owner.shard
        replay = shard.replays.range_of(queue_id, piece.log)
        if replay is None:
            raise NotFound("replay", f"{queue_id} of log {piece.log}")
        applied = False
        if revision == queue.settings.revision:
            if piece.last > replay.end:
                raise InvalidArgument(
                    "range.last_sequence", f"must be at most the replay's end, {replay.end}"
                )
            applied = shard.backfill(queue, piece, now_ms)
            if applied:
                self._delivery.hand_over(queue, now_ms)
        return assignment_pb2.BackfillResponse(
            applied=applied,
            cursor=piece.last if applied else replay.cursor,
            queue_revision=queue.settings.revision,
        )

    def _apply(self, revision: int, ranges: list[Range], now_ms: int) -> list[bool]:
        shard = self._owner.shard
        if revision != shard.revision:
            return [False] * len(ranges)
        applied = shard.assign(ranges, now_ms)
        # In the same turn, so in the same commit: one durable point from log to consumer.
        for piece, done in zip(ranges, applied, strict=True):
            if done and self._delivery.is_waited_on:
                for assignment in self._waited_on(piece):
                    self._delivery.hand_over(shard.queues[assignment.queue_id], now_ms)
        return applied

    async def _check_queues(self, ranges: list[Range]) -> None:
        queues = self._owner.shard.queues
        for index, piece in enumerate(ranges):
            for place, assignment in enumerate(piece.assignments):
                if assignment.queue_id not in queues:
                    await self._owner.durable()
                    raise InvalidArgument(
                        f"ranges[{index}].assignments[{place}].queue_id",
                        f"there is no queue {assignment.queue_id!r} at this revision",
                    )

    async def _fetch(self, ranges: list[Range]) -> None:
        if not self._delivery.is_waited_on:
            return
        fetches = [
            self._delivery.fetch_for_waiters(
                self._owner.shard.queues[assignment.queue_id], assignment.message_ids
            )
            for piece in ranges
            for assignment in self._waited_on(piece)
        ]
        if fetches:
            try:
                async with asyncio.timeout(HAND_OVER_S):
                    await asyncio.gather(*fetches)
            except TimeoutError:
                return  # The claims fetch for themselves.

    def _waited_on(self, piece: Range) -> list[Assignment]:
        queue_ids = [assignment.queue_id for assignment in piece.assignments]
        waited_on = self._delivery.waited_on(queue_ids)
        return [one for one in piece.assignments if one.queue_id in waited_on]

    def _changes(self, after: int) -> list[queue_pb2.QueueChange]:
        until = self._owner.durable_revision
        if after == until:
            return []
        shard = self._owner.shard
        changes = changes_between(
            shard.queues, shard.deleted, self._owner.durable_replays, after, until, self._shard
        )
        return [change for _, change in changes]


def _ranges(pieces: Iterable[assignment_pb2.LogRange]) -> list[Range]:
    ranges = []
    logs: set[int] = set()
    for index, piece in enumerate(pieces):
        ranges.append(_range(f"ranges[{index}]", piece))
        if piece.ingest_shard in logs:
            raise InvalidArgument(f"ranges[{index}].ingest_shard", "is named twice")
        logs.add(piece.ingest_shard)
    return ranges


def _range(field: str, piece: assignment_pb2.LogRange) -> Range:
    if not 0 <= piece.ingest_shard <= MAX_SHARD:
        raise InvalidArgument(f"{field}.ingest_shard", f"must be 0..{MAX_SHARD}")
    if not 0 <= piece.previous_sequence <= MAX_MESSAGE_ID:
        raise InvalidArgument(f"{field}.previous_sequence", "must be 0, or a message ID")
    if not piece.previous_sequence < piece.last_sequence <= MAX_MESSAGE_ID:
        raise InvalidArgument(
            f"{field}.last_sequence", "must be a message ID above previous_sequence"
        )
    bounds = (
        message_id(piece.ingest_shard, FIRST_SEQUENCE),
        message_id(piece.ingest_shard, MAX_SEQUENCE),
    )
    assignments: list[Assignment] = []
    for told in piece.assignments:
        assignment = Assignment(
            told.queue_id,
            told.message_ids[:],
            column[:] if (column := told.priorities) else (),
            column[:] if (column := told.retention_deadlines_ms) else (),
            column[:] if (column := told.visible_at_ms) else (),
        )
        # There may be one for each of ten thousand queues: names are made for what is wrong only.
        if not _is_sound(assignment, *bounds):
            raise _what_is_wrong(f"{field}.assignments[{len(assignments)}]", assignment, *bounds)
        assignments.append(assignment)
    return Range(piece.ingest_shard, piece.previous_sequence, piece.last_sequence, assignments)


def _is_sound(assignment: Assignment, first: int, last: int) -> bool:
    _, ids, priorities, deadlines_ms, visible_at_ms = assignment
    count = len(ids)
    if not count or min(ids) < first or max(ids) > last:
        return False
    if priorities and max(priorities) > MAX_PRIORITY:
        return False
    # One by one, without a loop: mostly two of the three are empty.
    return (
        (not deadlines_ms or (len(deadlines_ms) == count and min(deadlines_ms) >= 0))
        and (not priorities or (len(priorities) == count and min(priorities) >= 0))
        and (not visible_at_ms or (len(visible_at_ms) == count and min(visible_at_ms) >= 0))
    )


def _what_is_wrong(field: str, assignment: Assignment, first: int, last: int) -> InvalidArgument:
    ids = assignment.message_ids
    if not ids:
        return InvalidArgument(f"{field}.message_ids", "must not be empty")
    if min(ids) < 1 or max(ids) > MAX_MESSAGE_ID:
        return InvalidArgument(f"{field}.message_ids", "holds a number that is no message ID")
    if min(ids) < first or max(ids) > last:
        return InvalidArgument(f"{field}.message_ids", "holds a message of another log")
    for name in ("priorities", "retention_deadlines_ms", "visible_at_ms"):
        column = getattr(assignment, name)
        if column and len(column) != len(ids):
            return InvalidArgument(
                f"{field}.{name}", f"has {len(column)} values for {len(ids)} messages"
            )
        if column and (min(column) < 0 or (name == "priorities" and max(column) > MAX_PRIORITY)):
            return InvalidArgument(f"{field}.{name}", "holds a value out of range")
    raise AssertionError(f"nothing is wrong with {assignment}")
