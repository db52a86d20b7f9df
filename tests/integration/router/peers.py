"""An ingest and a broker of a few lines each, for tests of the router between them.

Their memory outlives their server, as durable memory would, so stopping and starting them is a
restart. Both refuse what the contract refuses, so a router that asks for it fails its test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from libs.serving.limits import server_options
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.records.metadata import MessageMetadata
from slatemq.v1 import (
    assignment_pb2,
    assignment_pb2_grpc,
    ingest_pb2,
    ingest_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
)
from tests.log_entries import DecodedEntry

Headers = dict[str, str]


@dataclass
class LogMemory:
    """What an ingest shard has stored."""

    shard: int = 0
    entries: list[DecodedEntry] = field(default_factory=list)
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    headers: dict[int, Headers] = field(default_factory=dict)
    removed: int = 0
    gaps: list[ingest_pb2.LogGap] = field(default_factory=list)
    """As restarts leave them; see `skip`."""
    asked: list[str] = field(default_factory=list)
    """What was asked for the start of replays, in order."""

    async def publish(
        self, batch: Sequence[Headers], retention_s: int = 0, **fields: Any
    ) -> list[int]:
        """Adds an entry; `fields` are more of its messages' fields."""
        fields = {"created_at_ms": 1_000, "received_at_ms": 2_000, "payload_bytes": 5, **fields}
        base = self.shard << 48 | self.removed
        if self.entries:
            base = self.entries[-1].messages[-1].message_id
        if self.gaps:
            base = max(base, self.gaps[-1].next_sequence - 1)
        entry = DecodedEntry(base + 1)
        for message_id, headers in enumerate(batch, base + 1):
            facts = {"visible_at_ms": 0, "retention_s": retention_s, **fields}
            entry.messages.append(MessageMetadata(message_id, headers=headers, **facts))
            self.headers[message_id] = headers
        async with self.grown:
            self.entries.append(entry)
            self.grown.notify_all()
        return [message.message_id for message in entry.messages]

    @property
    def end(self) -> int:
        last = self.entries[-1].messages[-1].message_id if self.entries else 0
        return max(self.removed, last)

    def after(self, position: int) -> list[DecodedEntry]:
        """The entries that have messages behind this one."""
        return [one for one in self.entries if one.messages[-1].message_id > position]

    def skip(self, count: int) -> None:
        """Passes over this many IDs, as a restart does."""
        after = self.end or self.shard << 48
        gap = ingest_pb2.LogGap(after_sequence=after, next_sequence=after + count + 1)
        self.gaps.append(gap)

    def remove(self, last: int) -> None:
        """Removes the entries up to this sequence, as the janitor would."""
        self.entries = self.after(last)
        self.removed = last


class _RoutersPart:
    """Answers UNIMPLEMENTED to what no router calls."""

    async def _unserved(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "for routers only")

    async def PublishStream(  # noqa: N802
        self, requests: Any, context: Any
    ) -> AsyncIterator[ingest_pb2.PublishStreamResponse]:
        await self._unserved(requests, context)
        yield ingest_pb2.PublishStreamResponse()

    Publish = BatchGetMessages = Push = _unserved
    ReplaceMessage = GetMessageMetadata = _unserved
    CreateQueue = GetQueue = ListQueues = UpdateQueue = DeleteQueue = _unserved
    PauseQueue = ResumeQueue = PurgeQueue = Backfill = _unserved
    QuarantineQueue = LiftQuarantine = _unserved
    GetShardLoad = LocateQueue = _unserved


class MemoryIngest(_RoutersPart, ingest_pb2_grpc.IngestServiceServicer):
    """Serves a log; counts its open streams."""

    def __init__(self, memory: LogMemory) -> None:
        self.memory = memory
        self.streams_count = 0
        self.free = asyncio.Event()
        """While it is clear, nothing is sent on streams from before `held_before`."""
        self.free.set()
        self.held_before = 0

    async def GetLogStatus(  # noqa: N802
        self, request: ingest_pb2.GetLogStatusRequest, context: Any
    ) -> ingest_pb2.GetLogStatusResponse:
        memory = self.memory
        return ingest_pb2.GetLogStatusResponse(
            shard=memory.shard,
            durable_sequence=memory.end,
            first_sequence=max(memory.shard << 48, memory.removed) + 1,
            gaps=memory.gaps,
        )

    async def TailLog(  # noqa: N802
        self, request: ingest_pb2.TailLogRequest, context: Any
    ) -> AsyncIterator[ingest_pb2.TailLogResponse]:
        memory, sent = self.memory, request.after_sequence
        if not 0 <= sent <= memory.end:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "after_sequence")
        self.streams_count += 1
        try:
            if sent < self.held_before:
                await self.free.wait()
            if not memory.after(sent):
                sent = memory.end
                yield ingest_pb2.TailLogResponse(durable_sequence=memory.end)
            while True:
                entries = memory.after(sent)[:50]
                if entries:
                    sent = entries[-1].messages[-1].message_id
                    yield ingest_pb2.TailLogResponse(
                        entries=[one.encoded() for one in entries], durable_sequence=memory.end
                    )
                    continue
                async with memory.grown:
                    if memory.end == sent or not memory.entries:
                        await memory.grown.wait()
        finally:
            self.streams_count -= 1

    async def RaisePurgeEpoch(  # noqa: N802
        self, request: ingest_pb2.RaisePurgeEpochRequest, context: Any
    ) -> ingest_pb2.RaisePurgeEpochResponse:
        self.memory.asked.append("raise")
        return ingest_pb2.RaisePurgeEpochResponse(purge_epoch=1)

    async def FindLogPosition(  # noqa: N802
        self, request: ingest_pb2.FindLogPositionRequest, context: Any
    ) -> ingest_pb2.FindLogPositionResponse:
        self.memory.asked.append("find")
        before = [
            entry.messages[-1].message_id
            for entry in self.memory.entries
            if entry.messages[0].received_at_ms < request.received_at_ms
        ]
        return ingest_pb2.FindLogPositionResponse(after_sequence=max(before, default=0))


@dataclass
class ShardMemory:
    """What a broker shard has stored, and what a test wants to know of its calls."""

    shard: int = 0
    revision: int = 0
    changes: dict[str, tuple[int, queue_pb2.QueueChange]] = field(default_factory=dict)
    cursors: dict[int, int] = field(default_factory=dict)
    assigned: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    revisions: dict[int, int] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    refused_count: int = 0
    outdated_count: int = 0
    calls_count: int = 0
    incarnation: int = 7
    unknown_logs: set[int] = field(default_factory=set)
    forgotten_revision: int = 0

    async def set_queue(self, queue_id: str, filter_source: str = "", priority: str = "") -> None:
        queue = queue_pb2.Queue(queue_id=queue_id, filter=filter_source, priority=priority)
        await self._change(queue_id, queue_pb2.QueueChange(queue=queue))

    async def quarantine(self, queue_id: str, reason: str) -> None:
        queue = queue_pb2.Queue()
        queue.CopyFrom(self.changes[queue_id][1].queue)
        queue.quarantine.reason = reason
        await self._change(queue_id, queue_pb2.QueueChange(queue=queue))

    async def delete_queue(self, queue_id: str) -> None:
        await self._change(queue_id, queue_pb2.QueueChange(deleted_queue_id=queue_id))

    def forget_deletions(self) -> None:
        """From now on no one learns of the queues deleted so far."""
        self.forgotten_revision = self.revision
        for queue_id, (_, change) in list(self.changes.items()):
            if not change.HasField("queue"):
                del self.changes[queue_id]

    async def _change(self, queue_id: str, change: queue_pb2.QueueChange) -> None:
        async with self.changed:
            self.revision += 1
            self.changes[queue_id] = (self.revision, change)
            self.changed.notify_all()

    def changes_after(self, revision: int) -> list[queue_pb2.QueueChange]:
        later = sorted(
            (at, name, change) for name, (at, change) in self.changes.items() if at > revision
        )
        return [change for _, _, change in later]

    def is_outdated(self, piece: assignment_pb2.LogRange) -> bool:
        """Whether queues must judge the range by what they became after its revision."""
        if piece.previous_sequence != self.cursors.get(piece.ingest_shard, 0):
            return False
        if piece.seen_by == self.incarnation and piece.seen_revision:
            assert piece.seen_revision <= piece.config_revision
            return False
        return piece.config_revision > self.revision or any(
            at > piece.config_revision and change.HasField("queue")
            for at, change in self.changes.values()
        )

    def apply(self, piece: assignment_pb2.LogRange) -> bool:
        cursor, revision = self.cursors.get(piece.ingest_shard, 0), piece.config_revision
        if piece.previous_sequence != cursor:
            self.refused_count += 1
            return False
        for assignment in piece.assignments:
            ids = list(assignment.message_ids)
            self.assigned.setdefault(assignment.queue_id, []).extend(ids)
            self.revisions.update(dict.fromkeys(ids, revision))
            columns = (
                list(assignment.priorities) or [128] * len(ids),
                list(assignment.retention_deadlines_ms) or [0] * len(ids),
                list(assignment.visible_at_ms) or [0] * len(ids),
            )
            self.rows.update(zip(ids, zip(*columns, strict=True), strict=True))
        self.cursors[piece.ingest_shard] = piece.last_sequence
        return True


class MemoryBroker(
    _RoutersPart,
    assignment_pb2_grpc.AssignmentServiceServicer,
    queue_pb2_grpc.QueueServiceServicer,
):
    """Serves a shard. While `answering` is clear, calls are worked on and not answered.

    One that `is_replaced` keeps its connections, and owns nothing any more.
    """

    def __init__(self, memory: ShardMemory) -> None:
        self.memory = memory
        self.answering = asyncio.Event()
        self.answering.set()
        self.watchable = True
        self.is_replaced = False

    async def GetRoutingState(  # noqa: N802
        self, request: assignment_pb2.GetRoutingStateRequest, context: Any
    ) -> assignment_pb2.GetRoutingStateResponse:
        await self._check_owner(context)
        await self._check_remembered(request.known_revision, context)
        memory = self.memory
        return assignment_pb2.GetRoutingStateResponse(
            config_revision=memory.revision,
            changes=memory.changes_after(request.known_revision),
            cursors=[
                assignment_pb2.LogCursor(ingest_shard=shard, sequence=sequence)
                for shard, sequence in memory.cursors.items()
            ],
            broker_shard=memory.shard,
        )

    async def Assign(  # noqa: N802
        self, request: assignment_pb2.AssignRequest, context: Any
    ) -> assignment_pb2.AssignResponse:
        await self._check_owner(context)
        memory = self.memory
        memory.calls_count += 1
        answer = assignment_pb2.AssignResponse(
            config_revision=memory.revision, broker_incarnation=memory.incarnation
        )
        for piece in request.ranges:
            is_old = memory.is_outdated(piece)
            memory.outdated_count += is_old
            retry_later = not is_old and piece.ingest_shard in memory.unknown_logs
            applied = not is_old and not retry_later and memory.apply(piece)
            answer.results.add(
                ingest_shard=piece.ingest_shard,
                applied=applied,
                cursor=memory.cursors.get(piece.ingest_shard, 0),
                outdated=is_old,
                retry_later=retry_later,
            )
        await self.answering.wait()
        return answer

    async def _check_owner(self, context: Any) -> None:
        if self.is_replaced:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "another process owns the shard now")

    async def _check_remembered(self, revision: int, context: Any) -> None:
        if 0 < revision < self.memory.forgotten_revision:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "deletions are forgotten")

    async def WatchQueues(  # noqa: N802
        self, request: queue_pb2.WatchQueuesRequest, context: Any
    ) -> AsyncIterator[queue_pb2.WatchQueuesResponse]:
        if not self.watchable:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams")
        await self._check_remembered(request.after_revision, context)
        memory, result = self.memory, request.after_revision
        while True:
            changes, result = memory.changes_after(result), memory.revision
            yield queue_pb2.WatchQueuesResponse(changes=changes, revision=result)
            async with memory.changed:
                if memory.revision == result:
                    await memory.changed.wait()


class Running:
    """One of them on a server, announced in the topology."""

    def __init__(
        self,
        directory: TopologyDirectory,
        service: MemoryIngest | MemoryBroker,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._directory = directory
        self._options = options or server_options()
        self._service = service
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> int:
        self._server = grpc.aio.server(options=self._options)
        if isinstance(self._service, MemoryIngest):
            kind = "ingest"
            ingest_pb2_grpc.add_IngestServiceServicer_to_server(self._service, self._server)
        else:
            kind = "broker"
            assignment_pb2_grpc.add_AssignmentServiceServicer_to_server(self._service, self._server)
            queue_pb2_grpc.add_QueueServiceServicer_to_server(self._service, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        address = f"127.0.0.1:{port}"
        await self._directory.announce(Peer(kind, self._service.memory.shard, address))
        return port

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
