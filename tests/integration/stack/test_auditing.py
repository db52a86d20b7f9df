"""The auditor of a delayed queue sees every message before it can be claimed, and repairs it.

Ingest, routers and broker are processes of their own; the broker and the ingest get killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import pytest

from slatemq.v1 import (
    consumer_pb2,
    consumer_pb2_grpc,
    entry_pb2,
    ingest_pb2,
    ingest_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
)
from tests.claimed_runs import messages_of
from tests.entry_stubs import EntryStubs
from tests.integration.stack.processes import DOWN, WAIT_SECONDS, Stack, patiently, running

pytestmark = pytest.mark.slow  # Four processes start, and some of them again.

QUEUE = "audited"
MESSAGES = 60


class Auditor:
    """Watches the queue, and writes what it saw into each message."""

    def __init__(self, stack: Stack) -> None:
        self._entries = EntryStubs(stack.broker.there)
        self.position = ""
        self.seen: dict[int, entry_pb2.Entry] = {}

    async def run(self) -> None:
        """Goes on where it was whenever the stream breaks; until cancelled."""
        while True:
            try:
                await self._watch()
            except grpc.aio.AioRpcError as error:
                if error.code() not in DOWN:
                    raise
                await asyncio.sleep(0.02)

    async def _watch(self) -> None:
        request = entry_pb2.WatchDelayedRequest(
            queue_id=QUEUE, position=self.position, view=entry_pb2.ENTRY_VIEW_FULL
        )
        call = self._entries.WatchDelayed(request)
        try:
            async for answer in call:
                for entry in answer.entries:
                    await self._mend(entry)
                self.position = answer.position
        finally:
            call.cancel()

    async def _mend(self, entry: entry_pb2.Entry) -> None:
        if entry.message.headers.get("audited"):
            return  # before the stream broke
        request = entry_pb2.EditMessageRequest(
            handle=entry.handle,
            payload=entry.message.payload.upper(),
            headers={**entry.message.headers, "audited": "yes"},
            replace_headers=True,
        )
        await patiently(lambda: self._entries.EditMessage(request))
        self.seen[entry.message_id] = entry


async def publish(stack: Stack, text: str) -> None:
    stub = ingest_pb2_grpc.IngestServiceStub(stack.ingest.there)
    message = ingest_pb2.PublishRun(payloads=[text.encode()], headers={"queue": QUEUE})
    request = ingest_pb2.PublishRequest(runs=[message], request_id=text)
    await patiently(lambda: stub.Publish(request))


async def until(condition: Callable[[], bool], task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(3 * WAIT_SECONDS):
        while not condition():
            assert not task.done(), task.result()
            await asyncio.sleep(0.01)


async def test_an_auditor_sees_and_repairs_every_message_before_it_is_delivered(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as stack:
        queues = queue_pb2_grpc.QueueServiceStub(stack.broker.there)
        queue = queue_pb2.Queue(queue_id=QUEUE, default_delay_ms=900_000)
        await queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue))
        auditor = Auditor(stack)
        auditing = asyncio.create_task(auditor.run())

        async def produce() -> None:
            for number in range(MESSAGES):
                await publish(stack, f"text {number}")

        producing = asyncio.create_task(produce())
        for victim, at in ((stack.broker, 10), (stack.ingest, 25), (stack.broker, 40)):
            await until(lambda at=at: len(auditor.seen) >= at, auditing)  # type: ignore[misc]
            await victim.kill()
            await victim.start()
        await producing
        await until(lambda: len(auditor.seen) == MESSAGES, auditing)
        auditing.cancel()

        # No one got one yet; then their time comes, at once.
        consumers = consumer_pb2_grpc.ConsumerServiceStub(stack.broker.there)
        claim = consumer_pb2.ClaimRequest(queue_id=QUEUE, max_messages=1000)
        assert not (await patiently(lambda: consumers.Claim(claim))).runs
        entries = EntryStubs(stack.broker.there)
        for entry in auditor.seen.values():
            await entries.RescheduleEntry(
                entry_pb2.RescheduleEntryRequest(handle=entry.handle, visible_at_ms=1)
            )
        got: dict[bytes, dict[str, str]] = {}
        while len(got) < MESSAGES:
            claim = consumer_pb2.ClaimRequest(queue_id=QUEUE, max_messages=1000, wait_ms=30_000)
            claimed = messages_of(await patiently(lambda: consumers.Claim(claim)))  # noqa: B023
            assert claimed, f"{len(got)} of {MESSAGES}"
            got |= {one.message.payload: dict(one.message.headers) for one in claimed}
        assert got.keys() == {f"TEXT {number}".encode() for number in range(MESSAGES)}
        assert all(headers == {"queue": QUEUE, "audited": "yes"} for headers in got.values())
