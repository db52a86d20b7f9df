"""IngestService where publishes are tasks: they are answered when the queue backend has them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from libs.events.slatemq.headers import BACKEND_HEADERS
from libs.serving.peers.topology import CACHE_MS, Topology, TopologyDirectory
from libs.serving.telemetry import Telemetry
from libs.storage.errors import StorageError
from libs.storage.records.task_records import AppliedTask, FailedTaskRecord
from services.ingest.batches import Accepted
from services.ingest.config import IngestConfig
from services.ingest.rpc.ingest import IngestServicer, published
from services.ingest.shard import Shard
from services.ingest.tasks.queued import Tasks
from services.ingest.tasks.servicer import seconds_to_wait, wait_within
from services.ingest.write.request_ids import Answered, answered_of
from slatemq._counts import counted
from slatemq.errors import FailedPrecondition, ResourceExhausted
from slatemq.v1 import ingest_pb2

TASK_ID_METADATA: Final = "slatemq-task-id"

STREAM_WAIT_S: Final = 20.0
"""The longest wait of a `sync` publish on a stream: its producer may not say how long it waits."""

REPEATED_S: Final = 1.0
"""How long a publish waits to know whether it is a repeat."""

RETRY_MS: Final = 200
"""When a publish that was refused since others wait for the backend may come again."""


class _Unanswered:
    """Publishes without an answer that wait for one thing, which may be slow or down.

    Attributes:
        size_bytes: What they hold.
    """

    def __init__(self, waits_for: str, bytes_max: int) -> None:
        self.size_bytes = 0
        self._waits_for = waits_for
        self._bytes_max = bytes_max

    @contextmanager
    def counted(self, size_bytes: int) -> Iterator[None]:
        """Count one until it is answered. Raises ResourceExhausted as a direct one does."""
        if self.size_bytes and self.size_bytes + size_bytes > self._bytes_max:
            raise ResourceExhausted(
                f"too much waits for {self._waits_for}",
                reason="UNCOMMITTED_BYTES",
                retry_after_ms=RETRY_MS,
            )
        self.size_bytes += size_bytes
        try:
            yield
        finally:
            self.size_bytes -= size_bytes


class QueuedServicer(IngestServicer):
    """Enqueues publishes as tasks; all else is as in IngestServicer."""

    def __init__(
        self,
        config: IngestConfig,
        shard: Shard,
        directory: TopologyDirectory,
        telemetry: Telemetry,
        tasks: Tasks,
    ) -> None:
        super().__init__(config, shard, directory, telemetry)
        self._tasks = tasks
        self._waits = tasks.consistency == "sync"
        # What tasks are storing has no part in these: publishes are taken while the store is down,
        # and those whose bodies wait for it must not keep the others from being taken.
        bytes_max = config.uncommitted_bytes_max
        self._small = _Unanswered(tasks.backend_name, bytes_max)
        self._large = _Unanswered(f"the store, before {tasks.backend_name} gets it", bytes_max)
        # Where that is this very instance, what it publishes is stored directly.
        self._direct_headers = BACKEND_HEADERS if tasks.backend_name == "slatemq" else ()
        self._publishes_all = True

    @property
    def held_bytes(self) -> int:
        """Also what waits for the backend or, with `sync`, for its outcome, and running tasks.

        A task that is being stored has its body twice: as it came, and in the commit.
        """
        unanswered_bytes = self._small.size_bytes + self._large.size_bytes
        return super().held_bytes + unanswered_bytes + self._tasks.held_bytes

    async def Publish(
        self, request: ingest_pb2.PublishRequest, context: Any
    ) -> ingest_pb2.PublishResponse:
        accepted = await self._accept(request)
        answer = await self._publish_within(accepted, lambda: seconds_to_wait(context))
        if answer.task_id:
            await context.send_initial_metadata(((TASK_ID_METADATA, answer.task_id),))
        return answer

    async def _accept(self, request: ingest_pb2.PublishRequest) -> Accepted:
        accepted = await super()._accept(request)
        accepted.request = request
        return accepted

    async def _publish_streamed(
        self, accepted: Accepted, timeout_ms: int
    ) -> ingest_pb2.PublishResponse:
        now_s = asyncio.get_running_loop().time
        until = now_s() + (timeout_ms / 1000 or math.inf)
        return await self._publish_within(
            accepted, lambda: min(STREAM_WAIT_S, wait_within(until - now_s()))
        )

    async def _publish_within(
        self, accepted: Accepted, wait_s: Callable[[], float | None]
    ) -> ingest_pb2.PublishResponse:
        """Enqueue; where publishes are `sync`, wait at most `wait_s` for the outcome."""
        if all(map(self._is_of_backend, accepted.columns.headers)):
            return await self._publish(accepted)
        count = len(accepted.payloads)
        body = accepted.request.SerializeToString()
        unanswered = self._small if self._tasks.travels_in_task(body) else self._large
        with unanswered.counted(accepted.size_bytes), self._publish_span(count, accepted):
            answer = await self._publish_task(accepted, body, wait_s)
        self._count_sent(count)
        return answer

    async def _publish_task(
        self, accepted: Accepted, body: bytes, wait_s: Callable[[], float | None]
    ) -> ingest_pb2.PublishResponse:
        first = await self._first_answer(accepted)
        if first is not None:
            return published(first)
        if accepted.dedupe_keys:
            await self._check_shards(accepted)
        if not self._waits:
            task_id = await self._tasks.enqueue(accepted, body)
        else:
            task_id, outcome = await self._tasks.apply(accepted, body, wait_s)
            if isinstance(outcome, AppliedTask):
                return published(answered_of(outcome))
            if outcome is not None:
                raise _failed(task_id, outcome)
        return ingest_pb2.PublishResponse(message_ids=[0] * len(accepted.payloads), task_id=task_id)

    async def _topology(self, max_age_ms: int = CACHE_MS) -> Topology:
        # What is published needs no store; this must not wait for one that hangs, either.
        return await self._directory.read_soon(max_age_ms)

    async def _first_answer(self, accepted: Accepted) -> Answered | None:
        """The first answer, when the request is a repeat that was applied already."""
        publisher = self._shard.publisher
        if not accepted.request_id:
            return None
        try:
            async with asyncio.timeout(REPEATED_S):
                return await publisher.repeated(accepted)
        except (TimeoutError, StorageError):
            # The first one, or the store, takes long. A second task gets the first one's IDs, too.
            return None

    def _is_of_backend(self, headers: dict[str, str]) -> bool:
        return any(name in headers for name in self._direct_headers)


def _failed(task_id: str, outcome: FailedTaskRecord) -> FailedPrecondition:
    return FailedPrecondition(
        "TASK_FAILED",
        f"task {task_id} failed after {counted(outcome.attempts, 'attempt')}: {outcome.error}",
        subject=task_id,
        metadata={"task_id": task_id},
    )
