"""A real broker, server and database, with a clock, an ingest and a disk to play with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from libs.serving.peers.channels import Channels, open_channel
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.exits import ExitCause
from libs.serving.server import RunningService, Signals
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root, open_root
from libs.storage.objects.durability import NoSync
from services.broker.config import BrokerConfig
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.message_cache import (
    DAMAGED,
    FETCH_BYTES,
    GONE,
    IngestMessages,
    Ingests,
    ReadResult,
    size_of,
)
from services.broker.outbox.targets import OutboxTarget
from services.broker.service import Broker, BrokerService
from services.broker.shard.owner import ShardOwner
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import Aborted, InvalidArgument, Unavailable
from slatemq.v1 import (
    assignment_pb2,
    assignment_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    ingest_pb2,
    message_pb2,
    queue_pb2,
    queue_pb2_grpc,
)
from tests.claimed_runs import ClaimedMessage, messages_of
from tests.configs import config_of
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.waiting import WAIT_SECONDS
from tests.manual_clock import ManualClock
from tests.stored_messages import cached

NO_BACKOFF = queue_pb2.Backoff(kind=queue_pb2.Backoff.KIND_NONE)

MakeTarget = Callable[[Channels, TopologyDirectory, int], OutboxTarget]


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str, str]:
    """Code, reason and field (or message) with which a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    error = from_rpc_error(refused.value)
    field = error.field if isinstance(error, InvalidArgument) else error.message
    return refused.value.code(), error.reason, field


class Disk(NoSync):
    """A disk whose syncs can be held up."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()

        self.broken = False

    async def sync(self) -> None:
        await self.free.wait()
        if self.broken:
            raise OSError("the disk is broken")


class Ingest(Ingests):
    """Stands for the ingests: has every message, of 10 bytes, unless set otherwise."""

    def __init__(self) -> None:
        self.down = False
        self.gone: set[int] = set()
        self.damaged: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.header_bytes = 0
        self.reads: list[list[int]] = []
        self.raised: list[int] = []
        self.replaced: dict[int, message_pb2.Message] = {}
        self.edits: list[ingest_pb2.ReplaceMessageRequest] = []
        self.frozen: dict[int, asyncio.Event] = {}
        """Shards that read nothing before their event."""
        self.is_up = False
        """Whether these answer at least a check."""
        self.read_gate, self.edit_gate = asyncio.Event(), asyncio.Event()
        self.read_gate.set()
        self.edit_gate.set()

    def __call__(self, _: Channels) -> Ingest:
        return self

    async def _thaw(self, shard: int) -> None:
        if shard in self.frozen:
            await self.frozen[shard].wait()

    async def check(self, shard: int) -> None:
        if not self.is_up:
            await self._thaw(shard)
        if self.down:
            raise Unavailable("ingest is down")

    async def find_again(self) -> None:
        """There is one process of each shard."""

    async def raise_purge_epoch(self, shard: int) -> None:
        if self.down:
            raise Unavailable("ingest is down")
        self.raised.append(shard)

    async def read(
        self, shard: int, ids: Sequence[int], max_bytes: int = FETCH_BYTES, *, etags: bool = False
    ) -> ReadResult:
        self.reads.append(list(ids))
        await self._thaw(shard)
        if self.down:
            raise Unavailable("ingest is down")
        missing = self.gone | self.damaged
        there = [i for i in ids if i not in missing]
        headers = {"big": "x" * self.header_bytes} if self.header_bytes else {}
        messages: list[message_pb2.Message] = []
        free_bytes = max_bytes
        for i in there:
            payload = b"%010d" % i * (self.sizes.get(i, 10) // 10)
            message = message_pb2.Message(message_id=i, payload=payload, headers=headers)
            message = self.replaced.get(i, message)
            free_bytes -= len(message.payload)
            if messages and free_bytes < 0:
                break
            messages.append(message)
        await self.read_gate.wait()
        tags = [f"e{message.message_id}" for message in messages] if etags else []
        return ReadResult(messages, tags, [i for i in ids if i in missing])

    async def fetch(self, shard: int, ids: Sequence[int], max_bytes: int) -> IngestMessages:
        messages, _, gone = await self.read(shard, ids, max_bytes)
        held = {one.message_id: cached(one) for one in messages}
        reasons = {one: DAMAGED if one in self.damaged else GONE for one in gone}
        return IngestMessages(held, size_of(held), reasons)

    async def metadata(self, message_id: int) -> ingest_pb2.GetMessageMetadataResponse:
        (message,) = (await self.read(0, [message_id])).messages
        return ingest_pb2.GetMessageMetadataResponse(
            headers=message.headers, headers_etag=_headers_etag(message)
        )

    async def replace(self, request: ingest_pb2.ReplaceMessageRequest) -> str:
        self.edits.append(request)
        await self.edit_gate.wait()
        if self.down:
            raise Unavailable("ingest is down")
        if request.etag not in ("", f"e{request.message_id}"):
            raise Aborted("changed since", etag=f"e{request.message_id}")
        if request.headers_etag:
            (message,) = (await self.read(0, [request.message_id])).messages
            if request.headers_etag != _headers_etag(message):
                raise Aborted("headers changed since", etag=f"e{request.message_id}")
        self.replaced[request.message_id] = message_pb2.Message(
            message_id=request.message_id, payload=request.payload, headers=request.headers
        )
        return "edited"


def _headers_etag(message: message_pb2.Message) -> str:
    return repr(sorted(message.headers.items()))


class Rig:
    """One broker and the stubs to talk to it."""

    def __init__(
        self,
        root: Root,
        clock: ManualClock,
        ingest: Ingest,
        disk: Disk,
        wall: Callable[[], float] = time.time,
        pushes: MakeTarget | None = None,
        shard: int = 0,
        settings: Mapping[str, Any] | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        telemetry = telemetry or Telemetry()
        self.root = root
        self.clock = clock
        self.ingest = ingest
        self.disk = disk
        self.signals = Signals()
        config = config_of(
            BrokerConfig,
            root="memory:///",
            port=0,
            shard=shard,
            **{"drain_ms": 2000, "queue_changes_per_s": 1_000_000, **(settings or {})},
        )
        self.service = BrokerService(
            config,
            telemetry,
            root,
            make_clock=self._clock,
            make_ingests=ingest,
            make_target=pushes or Pushes(),
            wall=wall,
        )
        self.running = RunningService(self.service, config, telemetry)
        self.exit: ExitCause | None = None
        self.ended: asyncio.Task[ExitCause]

    def _clock(self, last_ms: int) -> ManualClock:
        assert self.clock.now_ms() >= last_ms
        return self.clock

    @property
    def broker(self) -> Broker:
        assert self.service.broker is not None
        return self.service.broker

    @property
    def owner(self) -> ShardOwner:
        return self.broker.owner

    @property
    def delivery(self) -> Dispatcher:
        return self.broker.delivery

    def connect(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.queues = queue_pb2_grpc.QueueServiceStub(channel)
        self.consumers = consumer_pb2_grpc.ConsumerServiceStub(channel)
        self.assignments = assignment_pb2_grpc.AssignmentServiceStub(channel)

    async def create(self, queue_id: str = "q", **settings: object) -> queue_pb2.Queue:
        settings.setdefault("backoff", NO_BACKOFF)  # what fails is to come again at once
        queue = queue_pb2.Queue(queue_id=queue_id, **settings)  # type: ignore[arg-type]
        return (await self.queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue))).queue

    async def counts(self, queue_id: str = "q") -> dict[str, int]:
        answer = await self.queues.GetQueue(queue_pb2.GetQueueRequest(queue_id=queue_id))
        return {
            field.name.removesuffix("_count"): n
            for field, n in answer.queue.counts.ListFields()
            if field.name.endswith("_count")
        }

    async def assign(
        self, ids: Sequence[int], queue_id: str = "q", **columns: Sequence[int]
    ) -> assignment_pb2.AssignResponse:
        state = await self.assignments.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
        cursor = next((c.sequence for c in state.cursors if c.ingest_shard == 0), 0)
        assignment = assignment_pb2.QueueAssignment(
            queue_id=queue_id,
            message_ids=ids,
            **columns,
        )
        piece = assignment_pb2.LogRange(
            previous_sequence=cursor,
            last_sequence=cursor + 1,
            assignments=[assignment],
            config_revision=state.config_revision,
        )
        return await self.assignments.Assign(assignment_pb2.AssignRequest(ranges=[piece]))

    async def claim(self, queue_id: str = "q", **options: object) -> list[ClaimedMessage]:
        request = consumer_pb2.ClaimRequest(queue_id=queue_id, **options)  # type: ignore[arg-type]
        return messages_of(await self.consumers.Claim(request))

    async def ack(self, *tokens: str) -> list[int]:
        answer = await self.consumers.Ack(consumer_pb2.AckRequest(lease_tokens=tokens))
        return [status.code for status in answer.results]

    async def nack(self, *tokens: str, reason: str = "", delay_ms: int | None = None) -> list[int]:
        items = [
            consumer_pb2.NackItem(lease_token=token, reason=reason, delay_ms=delay_ms)
            for token in tokens
        ]
        answer = await self.consumers.Nack(consumer_pb2.NackRequest(items=items))
        return [status.code for status in answer.results]

    async def pass_time(self, by_ms: int) -> None:
        """Lets the broker's clock go on, and the leases end whose time has come."""
        self.clock.advance(by_ms)
        await self.owner.end_leases_once()
        await self.owner.durable()


async def introduce(*rigs: Rig) -> None:
    """Has brokers know of each other, whichever was started first."""
    for rig in rigs:
        await rig.service.directory.read(max_age_ms=0)


async def close_channel(channels: Channels, service: str, shard: int) -> None:
    """Ends the calls to a process, as when that has moved."""
    await channels._peers.pop((service, shard)).channel.close()


def memory_root(disk: Disk) -> Root:
    """A root in memory, with this disk beneath."""
    root = open_root("memory:///")
    root.durability = disk
    return root


@asynccontextmanager
async def running(
    root: Root | Path | None = None,
    clock: ManualClock | None = None,
    ingest: Ingest | None = None,
    disk: Disk | None = None,
    pushes: MakeTarget | None = None,
    shard: int = 0,
    settings: Mapping[str, Any] | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[Rig]:
    """A broker that serves; ends as by SIGTERM, unless it has ended already."""
    disk = disk or Disk()
    if root is None:
        root = memory_root(disk)
    elif isinstance(root, Path):
        root = open_root(root.as_uri())
    clock, ingest = clock or ManualClock(), ingest or Ingest()
    rig = Rig(
        root,
        clock,
        ingest,
        disk,
        pushes=pushes,
        shard=shard,
        settings=settings,
        telemetry=telemetry,
    )
    rig.ended = ended = asyncio.create_task(rig.running.run(rig.signals))
    while rig.running.gate._closed is not None:
        assert not ended.done(), ended.result()
        await asyncio.sleep(0.005)
    try:
        address = rig.running.peer_address
        async with open_channel(address, deadline_seconds=WAIT_SECONDS) as channel:
            rig.connect(channel)
            yield rig
    finally:
        disk.free.set()
        rig.signals.first.set()
        rig.exit = await ended
