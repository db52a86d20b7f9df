"""AssignmentService: the calls of routers."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from libs.serving.requests.paging import bad_page_token
from libs.storage.layout.buckets import MAX_PRIORITY
from libs.storage.layout.ids import (
    FIRST_SEQUENCE,
    MAX_MESSAGE_ID,
    MAX_SEQUENCE,
    MAX_SHARD,
    message_id,
)
from services.broker.core.config_log import ConfigLog
from services.broker.core.lists.replays import Counts
from services.broker.core.queue import Queue
from services.broker.core.shard import Assignment, Range, RangeApplication
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.introductions import Introductions
from services.broker.requests.limits import not_negative, within
from services.broker.requests.queues import QUEUE_ID, checked_id, pages_of
from services.broker.shard.owner import ShardOwner
from services.broker.shard.replay_starts import ReplayStarts
from slatemq._counts import counted
from slatemq.errors import InvalidArgument, NotFound
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc
from slatemq.v1.ingest_pb2 import StoredRun

FETCH_S = 2.0
"""How long an assignment waits for the payloads of messages with waiting claims; then it goes on
without them, and the claims fetch them."""

RUNS_MAX = 10_000
"""Runs of messages that come along with one call; routers send far fewer."""

REASON_BYTES_MAX = 1_000
MATCH_BYTES = 30
"""About what a match adds to a commit."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class AssignmentServicer(assignment_pb2_grpc.AssignmentServiceServicer):
    _shard: int
    _owner: ShardOwner
    _delivery: Dispatcher
    _introductions: Introductions
    _starts: ReplayStarts
    _incarnation: int = field(default_factory=lambda: 1 + secrets.randbelow((1 << 64) - 1))

    async def GetRoutingState(
        self, request: assignment_pb2.GetRoutingStateRequest, context: Any
    ) -> assignment_pb2.GetRoutingStateResponse:
        not_negative("known_revision", request.known_revision)
        owner = self._owner
        configs, known = owner.durable_configs, request.known_revision
        learned, revision, queue_id = _page_after(request.page_token) or (known, known, None)
        configs.check_remembered(learned, "known_revision")
        changes = configs.after(revision, queue_id)
        page = next(pages_of(changes, owner.durable_replays, self._shard))
        answer = assignment_pb2.GetRoutingStateResponse(
            config_revision=owner.durable_revision, changes=page, broker_shard=self._shard
        )
        if len(page) < len(changes):
            last = changes[len(page) - 1]
            learned = learned or answer.config_revision
            answer.next_page_token = f"{learned:x}/{last.revision:x}/{last.queue_id}"
            return answer
        for log, sequence in sorted(owner.durable_cursors.items()):
            answer.cursors.add(ingest_shard=log, sequence=sequence)
        return answer

    async def Assign(
        self, request: assignment_pb2.AssignRequest, context: Any
    ) -> assignment_pb2.AssignResponse:
        owner = self._owner
        ranges = _ranges(request.ranges)
        _check_messages(request.messages)
        owner.admit()
        # What is durable from here on was answered after these entries were published.
        revision = owner.durable_revision
        outdated = [
            self._is_outdated(piece, sent)
            for piece, sent in zip(ranges, request.ranges, strict=True)
        ]
        known = await self._introductions.known(piece.log for piece in ranges)
        judged = [
            piece
            for piece, is_old in zip(ranges, outdated, strict=True)
            if not is_old and piece.log in known
        ]
        cursors, applied = owner.durable_cursors, set[int]()
        if judged:
            await self._check_queues(judged)
            self._delivery.add_fresh(request.messages)
            await self._fetch(judged)
            for piece in judged:
                if await self._apply(piece):
                    applied.add(piece.log)
            cursors = dict(owner.shard.cursors)
            await owner.durable()
        return assignment_pb2.AssignResponse(
            results=[
                assignment_pb2.LogRangeResult(
                    ingest_shard=piece.log,
                    applied=piece.log in applied,
                    cursor=cursors.get(piece.log, 0),
                    outdated=is_old,
                    retry_later=not is_old and piece.log not in known,
                )
                for piece, is_old in zip(ranges, outdated, strict=True)
            ],
            config_revision=revision,
            broker_incarnation=self._incarnation,
        )

    def _is_outdated(self, piece: Range, sent: assignment_pb2.LogRange) -> bool:
        owner = self._owner
        if piece.previous != owner.shard.cursors.get(piece.log, 0):
            return False  # Refused for its place, no matter by which configs it was judged.
        seen_revision = sent.seen_revision if sent.seen_by == self._incarnation else 0
        return is_outdated(piece, owner.durable_configs, owner.durable_revision, seen_revision)

    async def Backfill(
        self, request: assignment_pb2.BackfillRequest, context: Any
    ) -> assignment_pb2.BackfillResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        not_negative("queue_revision", request.queue_revision)
        piece = _range("range", request.range)
        # No more than there are IDs: so the sum of all pieces has room in the replay's record.
        counts = Counts(
            within("message_count", request.message_count, 0, piece.last - piece.previous),
            within("left_count", request.left_count, 0, MAX_MESSAGE_ID),
        )
        for place, assignment in enumerate(piece.assignments):
            if assignment.queue_id != queue_id:
                field = f"range.assignments[{place}].queue_id"
                raise InvalidArgument(field, f"must be {queue_id!r}, as in `queue_id`")
        self._owner.admit()
        queue = await self._owner.find(queue_id)
        if _is_current(queue, request.queue_revision):
            await self._find_start(queue, piece.log)
            await self._fetch([piece])
        answer = await self._backfill(queue_id, request.queue_revision, piece, counts)
        await self._owner.durable()
        return answer

    async def QuarantineQueue(
        self, request: assignment_pb2.QuarantineQueueRequest, context: Any
    ) -> assignment_pb2.QuarantineQueueResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        not_negative("queue_revision", request.queue_revision)
        if not 0 < len(request.reason.encode()) <= REASON_BYTES_MAX:
            raise InvalidArgument("reason", f"must have 1 to {REASON_BYTES_MAX} bytes")

        def quarantine(now_ms: int) -> None:
            queue = self._owner.queue(queue_id)
            is_judged = queue.routing_revision <= request.queue_revision
            if is_judged and not queue.settings.quarantine:
                log.warning("queue %s is in quarantine: %s", queue_id, request.reason)
                self._owner.shard.quarantine(queue, request.reason, now_ms)

        await self._owner.run(quarantine)
        await self._owner.durable()
        return assignment_pb2.QuarantineQueueResponse()

    async def _find_start(self, queue: Queue, log: int) -> None:
        """Look up where a replay begins whose ingest was down when its queue was created."""
        replays = self._owner.shard.replays
        waiting = replays.range_of(queue.queue_id, log)
        if waiting is None or waiting.is_found:
            return
        start = await self._starts.look_up(log, waiting.since_ms)

        def note(now_ms: int) -> None:
            # A queue made since under this name needs a look-up of its own: only that raises the
            # purge epoch for its messages.
            if self._owner.owns(queue):
                replays.found(queue.queue_id, waiting, start)

        await self._owner.run(note)

    async def _backfill(
        self, queue_id: str, revision: int, piece: Range, counts: Counts
    ) -> assignment_pb2.BackfillResponse:
        answer = assignment_pb2.BackfillResponse()

        def begin(_: int) -> RangeApplication | None:
            queue, shard = self._owner.queue(queue_id), self._owner.shard
            replay = shard.replays.range_of(queue_id, piece.log)
            if replay is None:
                raise NotFound("replay", f"{queue_id} of log {piece.log}")
            begun = None
            if _is_current(queue, revision) and replay.is_found:
                if piece.last > replay.end:
                    raise InvalidArgument(
                        "range.last_sequence", f"must be at most the replay's end, {replay.end}"
                    )
                begun = shard.begin_backfill(queue, piece, counts)
            answer.cursor = replay.cursor if begun is None else piece.last
            answer.queue_revision = queue.routing_revision
            return begun

        answer.applied = await self._owner.apply(begin, self._deliver, _size_bytes(piece))
        return answer

    async def _apply(self, piece: Range) -> bool:
        def begin(_: int) -> RangeApplication | None:
            return self._owner.shard.begin(piece)

        return await self._owner.apply(begin, self._deliver, _size_bytes(piece))

    def _deliver(self, queues: Sequence[Queue], now_ms: int) -> None:
        """Claims the matches for waiting consumers: one commit has both matches and leases."""
        if self._delivery.is_waited_on:
            for queue in queues:
                self._delivery.deliver(queue, now_ms)

    async def _check_queues(self, ranges: list[Range]) -> None:
        queues, gone_since = self._owner.shard.queues, self._owner.shard.gone_since
        for index, piece in enumerate(ranges):
            for place, assignment in enumerate(piece.assignments):
                queue_id = assignment.queue_id
                if queue_id in queues:
                    continue
                gone = gone_since(queue_id)
                if gone is None or gone <= piece.revision:
                    await self._owner.durable()
                    raise InvalidArgument(
                        f"ranges[{index}].assignments[{place}].queue_id",
                        f"there is no queue {queue_id!r} at revision {piece.revision}",
                    )

    async def _fetch(self, ranges: list[Range]) -> None:
        fetches = [
            self._delivery.fetch_for_waiters(queue, message_ids)
            for piece in ranges
            for queue, message_ids in self._waited_on(piece).items()
        ]
        if fetches:
            try:
                async with asyncio.timeout(FETCH_S):
                    await asyncio.gather(*fetches)
            except TimeoutError:
                return  # The claims fetch for themselves.

    def _waited_on(self, piece: Range) -> dict[Queue, Sequence[int]]:
        """The queues of the range that have waiters, and their messages."""
        if not self._delivery.is_waited_on:
            return {}
        queues = self._owner.shard.queues
        waited_on = self._delivery.waited_on([one.queue_id for one in piece.assignments])
        return {
            queues[one.queue_id]: one.message_ids
            for one in piece.assignments
            if one.queue_id in waited_on and one.queue_id in queues
        }


def _size_bytes(piece: Range) -> int:
    """About what a range adds to a commit."""
    return MATCH_BYTES * sum(len(one.message_ids) for one in piece.assignments)


def _is_current(queue: Queue, revision: int) -> bool:
    """Whether a piece judged by the queue of this revision may be applied to it."""
    return queue.routing_revision <= revision and not queue.settings.quarantine


def _page_after(token: str) -> tuple[int, int, str] | None:
    """What a caller had learned before it read a page, and the change behind which that begins."""
    if not token:
        return None
    found = re.fullmatch("([0-9a-f]{1,15})/([0-9a-f]{1,15})/(.*)", token)
    if not found or not QUEUE_ID.fullmatch(found[3]):
        raise bad_page_token()
    return int(found[1], 16), int(found[2], 16), found[3]


def is_outdated(
    piece: Range, configs: ConfigLog, durable_revision: int, seen_revision: int
) -> bool:
    """Whether a queue there is may have to judge a range by what it became since.

    `seen_revision`: this process answered with it when all of the range had been read; 0: never.
    """
    if piece.revision > durable_revision:
        return True  # Judged by configs that this shard never had, or has no more.
    if 0 < seen_revision <= piece.revision:
        return False
    return configs.routes_differ(piece.revision)


def _check_messages(runs: Sequence[StoredRun]) -> None:
    if len(runs) > RUNS_MAX:
        raise InvalidArgument("messages", f"must be at most {RUNS_MAX:,}")
    for place, run in enumerate(runs):
        if not run.message_ids or len(run.message_ids) != len(run.payloads):
            what = "must have one for each message ID, of which there is at least one"
            raise InvalidArgument(f"messages[{place}].payloads", what)


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
    for name in ("config_revision", "seen_revision"):
        not_negative(f"{field}.{name}", getattr(piece, name))
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
    for item in piece.assignments:
        assignment = Assignment(
            item.queue_id,
            item.message_ids[:],
            column[:] if (column := item.priorities) else (),
            column[:] if (column := item.retention_deadlines_ms) else (),
            column[:] if (column := item.visible_at_ms) else (),
        )
        # There may be one for each of ten thousand queues: names are made for what is wrong only.
        if not _is_sound(assignment, *bounds):
            raise _what_is_wrong(f"{field}.assignments[{len(assignments)}]", assignment, *bounds)
        assignments.append(assignment)
    return Range(
        piece.ingest_shard,
        piece.previous_sequence,
        piece.last_sequence,
        assignments,
        piece.config_revision,
    )


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
        return InvalidArgument(f"{field}.message_ids", "holds a number that is not a message ID")
    if min(ids) < first or max(ids) > last:
        return InvalidArgument(f"{field}.message_ids", "holds a message of another log")
    for name in ("priorities", "retention_deadlines_ms", "visible_at_ms"):
        column = getattr(assignment, name)
        if column and len(column) != len(ids):
            return InvalidArgument(
                f"{field}.{name}",
                f"has {counted(len(column), 'value')} for {counted(len(ids), 'message')}",
            )
        if column and (min(column) < 0 or (name == "priorities" and max(column) > MAX_PRIORITY)):
            return InvalidArgument(f"{field}.{name}", "holds a value out of range")
    raise AssertionError(f"nothing is wrong with {assignment}")
