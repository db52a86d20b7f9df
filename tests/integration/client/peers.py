"""An ingest and a broker of a few lines each that misbehave on demand, for tests of the client.

Their memory outlives their server, as durable memory would. They keep the contract where a test
does not tell them to break it, and write down what they were asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from slatemq._rpc.rpc_status import to_status
from slatemq.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.v1 import (
    consumer_pb2,
    consumer_pb2_grpc,
    entry_pb2_grpc,
    ingest_pb2_grpc,
    message_pb2,
    queue_pb2,
    queue_pb2_grpc,
    topology_pb2,
    topology_pb2_grpc,
)
from tests.claimed_runs import ClaimedMessage
from tests.integration.client.ingest import RECEIVED_AT_MS, Ingest, refuse

__all__ = ["RECEIVED_AT_MS", "Broker", "Directory", "Ingest", "Instance", "refuse"]

T = TypeVar("T")


@dataclass
class Directory(topology_pb2_grpc.TopologyServiceServicer):
    """The addresses of all services, which every server returns."""

    response: topology_pb2.GetTopologyResponse = field(
        default_factory=topology_pb2.GetTopologyResponse
    )

    def put(self, service: str, shard: int, address: str) -> None:
        peers = getattr(self.response, service)
        for peer in peers:
            if peer.shard == shard:
                peer.address = address
                return
        peers.add(shard=shard, address=address)

    async def GetTopology(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.response


@dataclass
class Broker(consumer_pb2_grpc.ConsumerServiceServicer, queue_pb2_grpc.QueueServiceServicer):
    """One queue, `q`, whose messages are handed out in order.

    Attributes:
        available: Payloads with how often they were claimed.
        leases: What is in flight, by token.
        break_after: Streams break when they have sent this many messages.
        ended: Tokens whose lease is over.
        lose: How many acks and nacks are carried out, and lose their answers.
        acks: The requests to ack.
        answers_acks: Answers to acks wait for it.
        answers_nacks: Answers to nacks wait for it.
        answers_extensions: Answers to extensions wait for it.
        claims: The requests to claim.
        full: Streams are refused since a limit is reached.
        shard: Its own, in its lease tokens.
        queue_shard: The shard that it says every queue is on.
        partition_shards: Those of the partitions of every queue, where they have some.
        claims_max: The queue is deleted with the response to the last of these claims.
        partitions_count: What each claim says.
        awaited: Ingest shards that other messages wait for, in each answer.
        is_ingest_down: Whether every claim ends, with its wait, for want of an ingest.
    """

    lease_ms: int = 30_000
    available: deque[tuple[bytes, int]] = field(default_factory=deque)
    leases: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    acked: list[bytes] = field(default_factory=list)
    nacked: list[tuple[bytes, str, bool]] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    extended: list[str] = field(default_factory=list)
    break_after: int = 1 << 30
    lose: int = 0
    prefetch_max: int = 1 << 30
    streams: int = 0
    starts: int = 0
    stops: int = 0
    exists: bool = True
    shard: int = 0
    queue_shard: int = 0
    partition_shards: list[int] = field(default_factory=list)
    paused: bool = False
    full: bool = False
    refused_count: int = 0
    executed: list[Any] = field(default_factory=list)
    request_ids: set[str] = field(default_factory=set)
    silent: bool = False
    may_not_extend: bool = False
    acks: list[consumer_pb2.AckRequest] = field(default_factory=list)
    answers_acks: asyncio.Event = field(default_factory=asyncio.Event)
    answers_nacks: asyncio.Event = field(default_factory=asyncio.Event)
    answers_extensions: asyncio.Event = field(default_factory=asyncio.Event)
    claims: list[consumer_pb2.ClaimRequest] = field(default_factory=list)
    claims_max: int = 1 << 30
    partitions_count: int = 0
    awaited: list[int] = field(default_factory=list)
    is_ingest_down: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.answers_acks.set()
        self.answers_nacks.set()
        self.answers_extensions.set()

    async def until(self, come_about: Callable[[], object]) -> None:
        async with self.changed, asyncio.timeout(60):
            await self.changed.wait_for(come_about)

    async def report(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _claim(self, count: int, size_bytes: int | None = None) -> list[ClaimedMessage]:
        """Up to `count` messages, the last of them beyond `size_bytes`."""
        claimed: list[ClaimedMessage] = []
        while self.available and len(claimed) < count and (size_bytes is None or size_bytes > 0):
            payload, attempts = self.available.popleft()
            if size_bytes is not None:
                size_bytes -= len(payload)
            token = f"{self.shard:x}-{len(self.leases) + len(self.finished):016x}"
            self.leases[token] = payload, attempts + 1
            message_id = len(self.leases) + len(self.finished)
            message = message_pb2.Message(payload=payload, message_id=message_id)
            claimed.append(
                ClaimedMessage(message, token, attempts_count=attempts + 1, lease_ms=self.lease_ms)
            )
        return claimed

    async def Claim(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.claims.append(request)
        if self.is_ingest_down:
            await asyncio.sleep(request.wait_ms / 1000)
            away = "ingest 3 is down, or still reading payloads"
            await refuse(context, Unavailable(away, reason="INGEST_DOWN"))
        if self.paused:
            self.refused_count += 1
            await self.report()
            await refuse(context, FailedPrecondition("QUEUE_PAUSED", "it is paused"))
        if not self.exists:
            await refuse(context, NotFound("queue", request.queue_id))
        if not self.available and request.wait_ms:
            await self.until(lambda: self.available or not self.exists)
        if not self.exists:
            await refuse(context, NotFound("queue", request.queue_id))
        claimed = self._claim(request.max_messages)
        answer = consumer_pb2.ClaimResponse(
            runs=runs_of(claimed),
            awaited_ingest_shards=self.awaited,
            partitions_count=self.partitions_count,
        )
        self.exists = len(self.claims) < self.claims_max
        await self.report()
        return answer

    async def Consume(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.streams += 1
        await self.report()
        first = await anext(aiter(requests))
        if self.full:
            await refuse(context, ResourceExhausted("no place for a stream", retry_after_ms=1))
        if self.paused:
            await refuse(context, FailedPrecondition("QUEUE_PAUSED", "it is paused"))
        if not self.exists:
            await refuse(context, NotFound("queue", first.start.queue_id))
        self.starts += 1
        credit = [first.start.credit.messages_count]
        bytes_left = first.start.credit.payload_bytes or None  # None: never limited
        stopped = [False]
        yield consumer_pb2.ConsumeResponse(consumer_id="made-up")

        async def read() -> None:
            nonlocal bytes_left
            async for request in requests:
                credit[0] += request.credit.messages_count
                if request.credit.payload_bytes:
                    bytes_left = (bytes_left or 0) + request.credit.payload_bytes
                stopped[0] |= request.HasField("stop")
                await self.report()

        def goes_on() -> bool:
            has_room = credit[0] > 0 and (bytes_left is None or bytes_left > 0)
            return (bool(self.available) and has_room) or not self.exists or stopped[0]

        reading = asyncio.create_task(read())
        sent = 0
        try:
            while True:
                await self.until(goes_on)
                if stopped[0]:
                    self.stops += 1
                    return
                if not self.exists:
                    await refuse(context, NotFound("queue", "q"))
                assert credit[0] <= self.prefetch_max, "more credit than the consumer has room"
                messages = self._claim(min(credit[0], 7, self.break_after - sent), bytes_left)
                credit[0] -= len(messages)
                if bytes_left is not None:
                    bytes_left -= sum(len(one.message.payload) for one in messages)
                sent += len(messages)
                await self.report()
                yield consumer_pb2.ConsumeResponse(
                    consumer_id="made-up",
                    runs=runs_of(messages),
                    awaited_ingest_shards=self.awaited,
                )
                if sent >= self.break_after:
                    await refuse(context, Unavailable("draining", retry_after_ms=1))
        finally:
            reading.cancel()

    def _finish(self, token: str) -> tuple[bytes, int] | SlateMQError | None:
        if token in self.ended:
            return FailedPrecondition("LEASE_ENDED", "the lease ran out")
        if token in self.finished:
            return None
        self.finished.add(token)
        return self.leases.pop(token)

    async def _answer(self, context: Any) -> None:
        await self.report()
        if self.silent:
            await asyncio.Event().wait()
        if self.lose:
            self.lose -= 1
            await refuse(context, Unavailable("the answer is lost", retry_after_ms=1))

    async def Ack(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.acks.append(request)
        answer = consumer_pb2.AckResponse()
        tokens = list(request.lease_tokens)
        tokens += [token for run in request.runs for token in tokens_of(run)]
        if not tokens:
            await refuse(context, InvalidArgument("lease_tokens", "must not be empty"))
        for token in tokens:
            done = self._finish(token)
            if isinstance(done, tuple):
                self.acked.append(done[0])
            answer.results.append(to_status(done) if isinstance(done, SlateMQError) else _OK)
        await self.answers_acks.wait()
        await self._answer(context)
        return answer

    async def Nack(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = consumer_pb2.NackResponse()
        for item in request.items:
            done = self._finish(item.lease_token)
            if isinstance(done, tuple):
                self.nacked.append((done[0], item.reason, item.release))
            answer.results.append(to_status(done) if isinstance(done, SlateMQError) else _OK)
        await self.answers_nacks.wait()
        await self._answer(context)
        return answer

    async def ExtendLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = consumer_pb2.ExtendLeaseResponse()
        for token in request.lease_tokens:
            self.extended.append(token)
            result = answer.results.add()
            if self.may_not_extend:
                result.status.CopyFrom(to_status(PermissionDenied("it may not consume")))
            elif token in self.ended:
                error = FailedPrecondition("LEASE_ENDED", "the lease ran out")
                result.status.CopyFrom(to_status(error))
        await self.report()
        await self.answers_extensions.wait()
        return answer

    async def Execute(self, request: Any, context: Any) -> Any:  # noqa: N802
        """All or nothing, once for each request ID; leases are only looked at."""
        if request.request_id not in self.request_ids:
            for place, command in enumerate(request.commands):
                action = getattr(command, command.WhichOneof("action"))
                token = getattr(action, "lease_token", None)
                if token is not None and token not in self.leases:
                    about = {"command": str(place)}
                    await refuse(
                        context, FailedPrecondition("LEASE_ENDED", "it ran out", metadata=about)
                    )
            self.request_ids.add(request.request_id)
            self.executed.append(request)
            for command in request.commands:
                if command.HasField("complete"):
                    self._finish(command.complete.lease_token)
        await self._answer(context)
        results = [consumer_pb2.CommandResult() for _ in request.commands]
        return consumer_pb2.ExecuteResponse(results=results)

    async def GetQueue(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not self.exists:
            await refuse(context, NotFound("queue", request.queue_id))
        queue = queue_pb2.Queue(queue_id=request.queue_id, paused=self.paused)
        queue.counts.available_count = len(self.available)
        return queue_pb2.GetQueueResponse(queue=queue)

    async def LocateQueue(self, request: Any, context: Any) -> Any:  # noqa: N802
        if len(self.claims) >= self.claims_max:
            await refuse(context, NotFound("queue", request.queue_id))
        shards = self.partition_shards or [self.queue_shard]
        return queue_pb2.LocateQueueResponse(broker_shards=shards)

    async def WatchQueues(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        change = queue_pb2.QueueChange(deleted_queue_id="gone")
        yield queue_pb2.WatchQueuesResponse(changes=[change])
        await asyncio.Event().wait()

    async def CreateQueue(self, request: Any, context: Any) -> Any:  # noqa: N802
        return queue_pb2.CreateQueueResponse(queue=request.queue)


def runs_of(claimed: list[ClaimedMessage]) -> list[consumer_pb2.ClaimedRun]:
    """The same messages in runs; they share their headers, if they have any."""
    runs: list[consumer_pb2.ClaimedRun] = []
    tokens: list[str] = []
    for one in claimed:
        if one.lease_token not in tokens or one.attempts_count != runs[-1].attempts_count:
            run = consumer_pb2.ClaimedRun(
                lease_token=one.lease_token,
                attempts_count=one.attempts_count,
                lease_ms=one.lease_ms,
            )
            run.common.headers.update(one.message.headers)
            runs.append(run)
        runs[-1].message_ids.append(one.message.message_id)
        runs[-1].payloads.append(one.message.payload)
        following = consumer_pb2.LeaseRun(lease_token=one.lease_token, count=2)
        tokens = tokens_of(following)[1:] if not one.lease_token.endswith("ff") else []
    return runs


def tokens_of(run: consumer_pb2.LeaseRun) -> list[str]:
    """Tokens that count up."""
    first = int(run.lease_token[-2:], 16)
    assert 0 < run.count <= 256 - first
    return [f"{run.lease_token[:-2]}{first + at:02x}" for at in range(run.count)]


_OK = to_status(InvalidArgument("", ""))
_OK.Clear()


@dataclass
class Instance:
    """Servers on ports of their own, and what they remember."""

    directory: Directory = field(default_factory=Directory)
    ingest: Ingest = field(default_factory=Ingest)
    broker: Broker = field(default_factory=Broker)
    endpoint: str = ""
    servers: list[grpc.aio.Server] = field(default_factory=list)
    interceptors: list[grpc.aio.ServerInterceptor] = field(default_factory=list)

    async def __aenter__(self) -> Instance:
        self.endpoint, _ = await self.serve()  # Somebody who only knows where the others are.
        await self.serve(ingest=self.ingest)
        await self.serve(broker=self.broker)
        return self

    async def serve(
        self,
        ingest: Ingest | None = None,
        broker: Broker | None = None,
        options: list[tuple[str, int]] | None = None,
        entries: Any = None,
        broker_shard: int = 0,
    ) -> tuple[str, grpc.aio.Server]:
        """Starts a server, and adds it to the directory."""
        server = grpc.aio.server(options=options or [], interceptors=self.interceptors)
        port = server.add_insecure_port("127.0.0.1:0")
        address = f"127.0.0.1:{port}"
        topology_pb2_grpc.add_TopologyServiceServicer_to_server(self.directory, server)
        if ingest is not None:
            ingest_pb2_grpc.add_IngestServiceServicer_to_server(ingest, server)
            self.directory.put("ingests", ingest.shard, address)
        if broker is not None:
            consumer_pb2_grpc.add_ConsumerServiceServicer_to_server(broker, server)
            queue_pb2_grpc.add_QueueServiceServicer_to_server(broker, server)
            self.directory.put("brokers", broker_shard, address)
        if entries is not None:
            entry_pb2_grpc.add_EntryServiceServicer_to_server(entries, server)
            entry_pb2_grpc.add_DelayedServiceServicer_to_server(entries, server)
            entry_pb2_grpc.add_DeadLetterServiceServicer_to_server(entries, server)
            self.directory.put("brokers", broker_shard, address)
        await server.start()
        self.servers.append(server)
        return address, server

    async def __aexit__(self, *_: object) -> None:
        for server in self.servers:
            await server.stop(None)
