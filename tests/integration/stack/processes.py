"""The real ingest, broker and routers, each a process that may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from libs.serving.peers.channels import open_channel
from slatemq.v1 import (
    assignment_pb2,
    assignment_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    ingest_pb2,
    ingest_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
)
from tests.claimed_runs import messages_of
from tests.ports import free_ports
from tests.ready_process import create_subprocess

WAIT_SECONDS = 120
"""For what comes about within seconds, on a machine that has other things to do."""
DOWN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

R = TypeVar("R")


class Service:
    """One service process that can be killed and started again, at the same port."""

    def __init__(self, root: Path, name: str, *arguments: str, ready: bool = True) -> None:
        """`ready` starts it as tests.ready_process does: faster, but not as small."""
        self._begin: Any = create_subprocess if ready else asyncio.create_subprocess_exec
        self._ready = root / f"{name}{''.join(arguments).replace('/', '-')}.ready"
        self._command = [sys.executable, "-m", f"services.{name}", *arguments]
        self._command += ["--root", (root / "data").as_uri(), "--ready-file", str(self._ready)]
        self._command += ["--parent-pid", str(os.getpid())]  # killed tests leave no one behind
        self._process: Any = None
        self.channel: grpc.aio.Channel | None = None
        self.address = self.peer_address = self.http_address = ""
        self._has_ports = False

    async def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        if not self._has_ports:
            self._has_ports = True
            port, peer_port = free_ports(2)
            self._command += ["--port", str(port), "--peer-port", str(peer_port)]
        self._process = await self._begin(*self._command)
        async with asyncio.timeout(WAIT_SECONDS):
            while not self._ready.exists():
                assert self._process.returncode is None, "ended while starting"
                await asyncio.sleep(0.01)
        addresses = json.loads(self._ready.read_text())
        self.address = str(addresses["address"])
        self.peer_address = str(addresses["peer_address"])
        self.http_address = str(addresses.get("http_address", ""))
        if self.channel is None:
            self.channel = open_channel(self.peer_address)

    @property
    def process(self) -> Any:
        assert self._process is not None, "never started"
        return self._process

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()

    async def close(self) -> None:
        await self.kill()
        if self.channel is not None:
            await self.channel.close()

    @property
    def there(self) -> grpc.aio.Channel:
        assert self.channel is not None, "never started"
        return self.channel


class Stack:
    """An ingest, a broker and two routers."""

    def __init__(self, root: Path) -> None:
        self.ingest = Service(root, "ingest")
        self.broker = Service(root, "broker")
        self.routers = [Service(root, "router", "--shard", str(n)) for n in range(2)]
        self.all = [self.ingest, self.broker, *self.routers]

    async def create_queue(self, queue_id: str, source: str, **start: int) -> None:
        """Creates a queue; `start` is where its replay begins, if it is to have one."""
        stub = queue_pb2_grpc.QueueServiceStub(self.broker.there)
        queue = queue_pb2.Queue(queue_id=queue_id, filter=source)
        queue.backoff.kind = queue_pb2.Backoff.KIND_NONE  # what fails comes again at once
        request = queue_pb2.CreateQueueRequest(queue=queue, **start)  # type: ignore[arg-type]
        try:
            await patiently(lambda: stub.CreateQueue(request))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:  # The first try made it.
                raise

    async def replay(self, queue_id: str) -> queue_pb2.Replay:
        """How far a queue's replay is."""
        stub = queue_pb2_grpc.QueueServiceStub(self.broker.there)
        request = queue_pb2.GetQueueRequest(queue_id=queue_id)
        return (await patiently(lambda: stub.GetQueue(request))).queue.replay

    async def replayed(self, queue_id: str) -> queue_pb2.Replay:
        """Waits until a queue's replay is done."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                replay = await self.replay(queue_id)
                if replay.done or not replay.ranges:
                    return replay
                await asyncio.sleep(0.02)

    async def publish(self, *kinds: str) -> list[int]:
        """Publishes a message of each kind; gives their IDs."""
        return list((await self.publish_answer(*kinds)).message_ids)

    async def publish_answer(self, *kinds: str) -> ingest_pb2.PublishResponse:
        stub = ingest_pb2_grpc.IngestServiceStub(self.ingest.there)
        request = ingest_pb2.PublishRequest(
            runs=[ingest_pb2.PublishRun(payloads=[b""], headers={"kind": kind}) for kind in kinds],
            request_id=str(uuid.uuid4()),
        )
        return await patiently(lambda: stub.Publish(request))

    async def drained(self, queue_id: str) -> Counter[int]:
        """Claim and ack until nothing is available; what was published is routed by then."""
        stub = consumer_pb2_grpc.ConsumerServiceStub(self.broker.there)
        queues = queue_pb2_grpc.QueueServiceStub(self.broker.there)
        asked = queue_pb2.GetQueueRequest(queue_id=queue_id)
        got: Counter[int] = Counter()
        while (await queues.GetQueue(asked)).queue.counts.available_count:
            answer = await stub.Claim(
                consumer_pb2.ClaimRequest(queue_id=queue_id, max_messages=1_000, wait_ms=1_000)
            )
            messages = messages_of(answer)
            got.update(claimed.message.message_id for claimed in messages)
            await stub.Ack(
                consumer_pb2.AckRequest(lease_tokens=[claimed.lease_token for claimed in messages])
            )
        return got

    async def routed(self) -> None:
        """Wait until the broker's cursor is at the log's end."""
        log = ingest_pb2_grpc.IngestServiceStub(self.ingest.there)
        shard = assignment_pb2_grpc.AssignmentServiceStub(self.broker.there)
        end = (await log.GetLogStatus(ingest_pb2.GetLogStatusRequest())).durable_sequence
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                request = assignment_pb2.GetRoutingStateRequest()
                state = await shard.GetRoutingState(request, timeout=WAIT_SECONDS)
                if [cursor.sequence for cursor in state.cursors] == [end]:
                    return
                await asyncio.sleep(0.01)


async def patiently(call: Callable[[], Awaitable[R]]) -> R:
    """Repeat a call until whom it is for is there."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() not in DOWN:
                    raise
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(root: Path) -> AsyncIterator[Stack]:
    """All of them, below this folder; killed at the end."""
    (root / "data").mkdir()
    stack = Stack(root)
    try:
        await asyncio.gather(*(service.start() for service in stack.all))
        yield stack
    finally:
        await asyncio.gather(*(service.close() for service in stack.all))
