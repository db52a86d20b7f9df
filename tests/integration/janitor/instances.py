"""A real instance whose windows are so short that a test can see them end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import slatemq
from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import QueueNames
from libs.storage.records.metadata import decode_log_entry
from services.janitor.jobs.contract import JobOptions
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc, ingest_pb2, ingest_pb2_grpc
from tests.integration.stack.processes import Service, patiently

SHORT = ("--replay-window-s", "1", "--purge-grace-s", "0")

LONG_S = 30 * 86_400
"""A retention that is not over in any test; 0 would keep messages for ever."""

OPTIONS = JobOptions(grace_s=0, replay_window_s=1, older_than_s=0)
"""What fits such an instance."""

WAIT_S = 120


class Instance:
    """An ingest, brokers and a router, each a process, and a client of theirs."""

    client: slatemq.Client

    def __init__(self, folder: Path, brokers_count: int, settings: Sequence[str]) -> None:
        self.data = folder / "data"
        self.url = self.data.as_uri()
        self.ingest = Service(folder, "ingest", *settings)
        self.router = Service(folder, "router", *settings)
        self.brokers = [
            Service(folder, "broker", "--shard", str(shard), *settings)
            for shard in range(brokers_count)
        ]

    @property
    def all(self) -> list[Service]:
        return [self.ingest, *self.brokers, self.router]

    @property
    def objects(self) -> set[str]:
        """The payloads that are objects of their own, by their paths."""
        return {str(path.relative_to(self.data)) for path in self.data.glob("blobs/*/*")}

    def age_objects(self, by_s: int = 2 * 24 * 3600) -> None:
        """Let the store date them so far back."""
        self.age((self.data / path for path in self.objects), by_s)

    @staticmethod
    def age(paths: Iterable[Path], by_s: int = 2 * 24 * 3600) -> None:
        for path in paths:
            os.utime(path, (time.time() - by_s,) * 2)

    async def names(self) -> set[str]:
        """The queues whose names are claimed."""
        names = QueueNames(open_root(self.url).objects)
        found = [one async for _, _, one in names.valid()]
        return {one[0] for one in found if isinstance(one, tuple) and one[1].broker_shards}

    async def stored(self, ids: Iterable[int]) -> set[int]:
        """Those of the messages whose payloads the ingest has."""
        stub: Any = ingest_pb2_grpc.IngestServiceStub(self.ingest.there)
        left, found = sorted(ids), set()
        while left:
            request = ingest_pb2.BatchGetMessagesRequest(message_ids=left[:500])
            response = await stub.BatchGetMessages(request, timeout=WAIT_S)
            there = {one for run in response.runs for one in run.message_ids}
            found |= there
            left = [one for one in left if one not in there | set(response.missing_ids)]
        return found

    async def logged(self) -> set[int]:
        """The messages that the log has up to where it ends now."""
        stub: Any = ingest_pb2_grpc.IngestServiceStub(self.ingest.there)
        end = (await stub.GetLogStatus(ingest_pb2.GetLogStatusRequest())).durable_sequence
        found: list[int] = []
        call = stub.TailLog(ingest_pb2.TailLogRequest(), timeout=WAIT_S)
        async for update in call:
            for entry in update.entries:
                found += [one.message_id for one in decode_log_entry(entry.value)]
            # Where the last messages are removed, a heartbeat says that there are no more.
            if not update.entries or found[-1] >= end:
                break
        call.cancel()
        return set(found)

    async def listed(self, queue: str, state: Any) -> set[int]:
        """The messages that a queue lists in this state."""
        return {entry.message_id async for entry in self.client.list_entries(queue, state)}

    async def publish(
        self, queue: str, count: int, retention_s: int = LONG_S, payload: bytes = b"payload"
    ) -> set[int]:
        """Messages into a queue; `routed` waits until it has them."""
        message = slatemq.OutgoingMessage(payload, {"queue": queue}, retention_s=retention_s)
        publish_many = await self.client.publish_many([message] * count)
        return {int(one) for one in publish_many}

    async def routed(self) -> None:
        """Wait until the cursors of all brokers are where the log's end is now."""
        log: Any = ingest_pb2_grpc.IngestServiceStub(self.ingest.there)
        end = (await log.GetLogStatus(ingest_pb2.GetLogStatusRequest())).durable_sequence
        async with asyncio.timeout(WAIT_S):
            for broker in self.brokers:
                while await self._cursor(broker) < end:
                    await asyncio.sleep(0.02)

    async def _cursor(self, broker: Service) -> int:
        shard: Any = assignment_pb2_grpc.AssignmentServiceStub(broker.there)
        request = assignment_pb2.GetRoutingStateRequest()
        state = await patiently(lambda: shard.GetRoutingState(request))
        return max((cursor.sequence for cursor in state.cursors), default=0)

    async def claim(self, queue: str, ids: set[int], lease: float = 600) -> list[slatemq.Received]:
        """These messages, claimed; they are at the head of the queue."""
        found: list[slatemq.Received] = []
        async with asyncio.timeout(WAIT_S):
            while len(found) < len(ids):
                most = len(ids) - len(found)
                found += await self.client.claim(queue, most, lease=lease, wait=30)
        assert {one.message_id for one in found} == ids
        return found


@asynccontextmanager
async def instance(
    folder: Path,
    brokers_count: int = 1,
    settings: Sequence[str] = SHORT,
    call_timeout: float = 30,
) -> AsyncIterator[Instance]:
    """All of them, over what `folder`/data holds, if anything; killed at the end.

    `call_timeout`: how long the client repeats a call while processes are down.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    made = Instance(folder, brokers_count, settings)
    try:
        await asyncio.gather(*(service.start() for service in made.all))
        async with slatemq.connect(made.brokers[0].address, call_timeout=call_timeout) as client:
            made.client = client
            while len((await client._peers.fresh_topology()).brokers) < brokers_count:
                await asyncio.sleep(0.05)
            yield made
    finally:
        await asyncio.gather(*(service.close() for service in made.all))
