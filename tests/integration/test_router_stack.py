"""The router between the real ingest and the real broker, all of them processes, killed at will.

Judged from outside: by what was published, and by what a consumer got.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
import pytest

from libs.serving.channels import open_channel
from slatemq.v1 import (
    assignment_pb2,
    assignment_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    ingest_pb2,
    ingest_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

WAIT_SECONDS = 40
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

R = TypeVar("R")

pytestmark = pytest.mark.slow  # Four processes start, and some of them again.


class Service:
    """One service process that can be killed and started again, at the same port."""

    def __init__(self, root: Path, name: str, *arguments: str) -> None:
        self._ready = root / f"{name}{''.join(arguments)}.ready"
        self._command = [sys.executable, "-m", f"services.{name}", *arguments]
        self._command += ["--root", (root / "data").as_uri(), "--ready-file", str(self._ready)]
        self._process: asyncio.subprocess.Process | None = None
        self.channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(*self._command)
        async with asyncio.timeout(WAIT_SECONDS):
            while not self._ready.exists():
                assert self._process.returncode is None, "ended while starting"
                await asyncio.sleep(0.01)
        address = json.loads(self._ready.read_text())["address"]
        if self.channel is None:
            self._command += ["--port", address.rpartition(":")[2]]
            self.channel = open_channel(address)

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

    async def create_queue(self, queue_id: str, source: str) -> None:
        stub = queue_pb2_grpc.QueueServiceStub(self.broker.there)
        queue = queue_pb2.Queue(queue_id=queue_id, filter=source)
        request = queue_pb2.CreateQueueRequest(queue=queue)
        try:
            await patiently(lambda: stub.CreateQueue(request))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:  # The first try made it.
                raise

    async def publish(self, *kinds: str) -> list[int]:
        stub = ingest_pb2_grpc.IngestServiceStub(self.ingest.there)
        request = ingest_pb2.PublishRequest(
            messages=[ingest_pb2.PublishMessage(headers={"kind": kind}) for kind in kinds],
            request_id=str(uuid.uuid4()),
        )
        return list((await patiently(lambda: stub.Publish(request))).message_ids)

    async def drained(self, queue_id: str) -> Counter[int]:
        """Claim and ack until the queue has been empty for a second."""
        stub = consumer_pb2_grpc.ConsumerServiceStub(self.broker.there)
        got: Counter[int] = Counter()
        while True:
            answer = await stub.Claim(
                consumer_pb2.ClaimRequest(queue_id=queue_id, max_messages=1_000, wait_ms=1_000)
            )
            if not answer.messages:
                return got
            got.update(claimed.message.message_id for claimed in answer.messages)
            await stub.Ack(
                consumer_pb2.AckRequest(
                    lease_tokens=[claimed.lease_token for claimed in answer.messages]
                )
            )

    async def routed(self) -> None:
        """Wait until the broker's cursor is at the log's end."""
        log = ingest_pb2_grpc.IngestServiceStub(self.ingest.there)
        shard = assignment_pb2_grpc.AssignmentServiceStub(self.broker.there)
        end = (await log.GetLogStatus(ingest_pb2.GetLogStatusRequest())).durable_sequence
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                state = await shard.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
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
                if error.code() not in AWAY:
                    raise
                await asyncio.sleep(0.02)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    (tmp_path / "data").mkdir()
    stack = Stack(tmp_path)
    try:
        await asyncio.gather(*(service.start() for service in stack.all))
        yield stack
    finally:
        await asyncio.gather(*(service.close() for service in stack.all))


async def test_every_queue_gets_exactly_its_messages_whoever_is_killed(stack: Stack) -> None:
    sent: dict[int, str] = {}
    after: dict[str, set[int]] = {}  # What was published once the queue had been created.
    for queue_id, source in {
        "a": 'headers["kind"] == "a"',
        "ab": 'headers["kind"] in ["a", "b"]',
        "all": "true",
    }.items():
        await stack.create_queue(queue_id, source)

    async def publish(until: asyncio.Task[None]) -> None:
        number = 0
        while not until.done():
            number += 1
            kinds = ["a", "b", "c"][: 1 + number % 3]
            created = list(after)
            ids = await stack.publish(*kinds)
            sent.update(zip(ids, kinds, strict=True))
            for queue_id in created:
                after[queue_id].update(ids)

    async def kill() -> None:
        for victim in (stack.routers[0], stack.broker, stack.routers[1], stack.ingest):
            await stack.create_queue(f"late{len(after)}", "true")
            after[f"late{len(after)}"] = set()
            await victim.kill()
            await victim.start()

    killing = asyncio.create_task(kill())
    await asyncio.gather(publish(killing), killing)
    ids = await stack.publish("a", "b", "c")
    sent.update(zip(ids, "abc", strict=True))
    await stack.routed()

    assert await stack.drained("all") == Counter(sent.keys())
    for queue_id, kinds in {"a": "a", "ab": "ab"}.items():
        expected = Counter(message_id for message_id, kind in sent.items() if kind in kinds)
        assert await stack.drained(queue_id) == expected
    for queue_id, wanted in after.items():
        got = await stack.drained(queue_id)
        assert set(got) >= wanted | set(ids)
        assert set(got.values()) <= {1}


async def test_a_forged_assign_with_a_hole_is_refused(stack: Stack) -> None:
    await stack.create_queue("all", "true")
    first = await stack.publish("a")
    await stack.routed()
    shard = assignment_pb2_grpc.AssignmentServiceStub(stack.broker.there)
    state = await shard.GetRoutingState(assignment_pb2.GetRoutingStateRequest())

    answer = await shard.Assign(
        assignment_pb2.AssignRequest(
            config_revision=state.config_revision,
            ranges=[
                assignment_pb2.LogRange(
                    previous_sequence=first[0] + 5,
                    last_sequence=first[0] + 9,
                    assignments=[
                        assignment_pb2.QueueAssignment(queue_id="all", message_ids=[first[0] + 9])
                    ],
                )
            ],
        )
    )
    second = await stack.publish("a")
    await stack.routed()

    assert (answer.results[0].applied, answer.results[0].cursor) == (False, first[0])
    assert await stack.drained("all") == Counter(first + second)


async def test_explain_agrees_with_what_routing_does(stack: Stack) -> None:
    await stack.create_queue("gold", 'headers["kind"] == "gold"')
    router = router_pb2_grpc.RouterServiceStub(stack.routers[0].there)

    told = await router.Explain(router_pb2.ExplainRequest(headers={"kind": "gold"}))
    ids = await stack.publish("gold")
    await stack.routed()

    assert [(queue.queue_id, queue.matched) for queue in told.queues] == [("gold", True)]
    assert await stack.drained("gold") == Counter(ids)
