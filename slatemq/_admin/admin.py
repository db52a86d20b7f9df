"""Queues, explanations and the state of the instance: the calls of people and tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any, Literal

from slatemq._admin.entry_models import EntryState, state_wire
from slatemq._admin.queue_models import Backoff, DeletedQueue, Queue, backoff_of, queue_of
from slatemq._checks import check_field, iterable, message_of, wrong
from slatemq._rpc.peers import NOT_TAKEN, errors_translated
from slatemq._rpc.queue_locations import ANSWER_S, QueueLocations
from slatemq.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from slatemq.models import (
    Duration,
    Explanation,
    Time,
    milliseconds,
    span_ms,
    time_ms,
    whole_seconds,
)
from slatemq.v1 import queue_pb2, queue_pb2_grpc, router_pb2, router_pb2_grpc


class Unchanged:
    """Stands for a setting that an update leaves as it is."""


UNCHANGED = Unchanged()


class Admin:
    """Calls on QueueService and RouterService."""

    def __init__(self, locations: QueueLocations) -> None:
        """Call the brokers that have the queues."""
        self._locations = locations
        self._peers = locations.peers

    async def create_queue(
        self, queue_id: str, with_queue: str, start_from: Start, **settings: Any
    ) -> Queue:
        """See Client.create_queue."""
        wire = message_of(queue_pb2.Queue, queue_id=queue_id)
        _fill(wire, {name: value for name, value in settings.items() if value is not None})
        request = message_of(queue_pb2.CreateQueueRequest, queue=wire, with_queue_id=with_queue)
        _set_start(request, start_from)
        tries = 0

        chosen: int | None = None

        async def attempt(timeout: float) -> Queue:
            nonlocal chosen, tries
            if chosen is None:
                chosen = await self._shard_for(queue_id, with_queue)
            stub = await self._stub(chosen)
            tries += 1
            try:
                with errors_translated():
                    return queue_of((await stub.CreateQueue(request, timeout=timeout)).queue)
            except Unavailable as error:
                if error.reason in NOT_TAKEN:
                    chosen = None  # Nothing was created: another broker will do.
                raise

        try:
            return await self._peers.call(attempt)
        except AlreadyExists:
            # The first try may have made it, and its answer got lost.
            if tries > 1 and _is_as_asked(found := await self.get_queue(queue_id), wire):
                return found
            raise

    async def _shard_for(self, queue_id: str, with_queue: str) -> int:
        """The shard of a new queue: the lowest that answers, until queues are spread.

        Raises AlreadyExists when a broker has a queue of this name.
        """
        if with_queue:
            return await self._locations.shard_of(with_queue)
        shards = await self._peers.broker_shards()
        if len(shards) < 2:
            return shards[0] if shards else 0
        request = queue_pb2.ListQueuesRequest(page_size=1, prefix=queue_id)
        stub_of = queue_pb2_grpc.QueueServiceStub
        answers = await self._locations.ask_all(stub_of, "ListQueues", request)
        for page in answers.by_shard.values():
            if any(queue.queue_id == queue_id for queue in page.queues):
                raise AlreadyExists("queue", queue_id)
        return min(answers.by_shard)

    async def get_queue(self, queue_id: str) -> Queue:
        """See Client.get_queue."""
        request = message_of(queue_pb2.GetQueueRequest, queue_id=queue_id)
        return queue_of((await self._about("GetQueue", queue_id, request)).queue)

    async def list_queues(
        self, prefix: str = "", answer_s: float = ANSWER_S
    ) -> AsyncIterator[Queue]:
        """See Client.list_queues; brokers are waited for as in `QueueLocations.ask_all`."""
        request = message_of(queue_pb2.ListQueuesRequest, page_size=1000, prefix=prefix)
        stub_of = queue_pb2_grpc.QueueServiceStub
        first = await self._locations.ask_all(stub_of, "ListQueues", request, answer_s)
        queues = {shard: self._pages(shard, request, p) for shard, p in first.by_shard.items()}
        heads: list[tuple[str, int, queue_pb2.Queue]] = []

        async def take(shard: int) -> None:
            try:
                queue = await anext(queues[shard], None)
            except (Unavailable, DeadlineExceeded) as error:
                first.problems[shard] = error
            else:
                if queue is not None:
                    heappush(heads, (queue.queue_id, shard, queue))

        for shard in queues:
            await take(shard)
        while heads:
            _, shard, queue = heappop(heads)
            yield queue_of(queue)
            await take(shard)
        first.check_complete()

    async def _pages(
        self,
        shard: int,
        request: queue_pb2.ListQueuesRequest,
        page: queue_pb2.ListQueuesResponse,
    ) -> AsyncIterator[queue_pb2.Queue]:
        """The queues of this page of one broker, and of all after it."""
        while True:
            for queue in page.queues:
                yield queue
            if not page.next_page_token:
                return
            following = queue_pb2.ListQueuesRequest()
            following.CopyFrom(request)
            following.page_token = page.next_page_token
            page = await self._peers.ask_broker(
                shard, queue_pb2_grpc.QueueServiceStub, "ListQueues", following
            )

    async def update_queue(self, queue_id: str, etag: str, **settings: Any) -> Queue:
        """See Client.update_queue."""
        wire = message_of(queue_pb2.Queue, queue_id=queue_id, etag=etag)
        changes = {
            name: value for name, value in settings.items() if not isinstance(value, Unchanged)
        }
        if not changes:
            raise InvalidArgument("update_mask", "name at least one setting to change")
        _fill(wire, {name: value for name, value in changes.items() if value is not None})
        request = queue_pb2.UpdateQueueRequest(queue=wire)
        request.update_mask.paths.extend(_FIELDS.get(name, name) for name in changes)
        # With an etag a repeat would be refused for the change that the first try made.
        about = await self._about("UpdateQueue", queue_id, request, repeat_unknown=not etag)
        return queue_of(about.queue)

    async def pause_queue(self, queue_id: str) -> Queue:
        """See Client.pause_queue."""
        request = message_of(queue_pb2.PauseQueueRequest, queue_id=queue_id)
        return queue_of((await self._about("PauseQueue", queue_id, request)).queue)

    async def resume_queue(self, queue_id: str) -> Queue:
        """See Client.resume_queue."""
        request = message_of(queue_pb2.ResumeQueueRequest, queue_id=queue_id)
        return queue_of((await self._about("ResumeQueue", queue_id, request)).queue)

    async def lift_quarantine(self, queue_id: str) -> Queue:
        """See Client.lift_quarantine."""
        request = message_of(queue_pb2.LiftQuarantineRequest, queue_id=queue_id)
        return queue_of((await self._about("LiftQuarantine", queue_id, request)).queue)

    async def purge_queue(self, queue_id: str, states: Iterable[EntryState | str]) -> int:
        """See Client.purge_queue."""
        named = iterable("states", "states", states)
        request = message_of(
            queue_pb2.PurgeQueueRequest,
            queue_id=queue_id,
            states=[state_wire(state, "states") for state in named],
        )
        return int((await self._about("PurgeQueue", queue_id, request)).purged_count)

    async def delete_queue(self, queue_id: str, etag: str) -> None:
        """See Client.delete_queue."""
        request = message_of(queue_pb2.DeleteQueueRequest, queue_id=queue_id, etag=etag)
        tries = 0

        async def attempt(shard: int, timeout: float) -> None:
            nonlocal tries
            stub = await self._stub(shard)
            tries += 1
            await stub.DeleteQueue(request, timeout=timeout)

        try:
            await self._locations.call(queue_id, attempt)
        except NotFound:
            if tries < 2:
                raise
            # The first try deleted it, and its answer got lost.
        finally:
            self._locations.forget(queue_id)

    async def watch_queues(self, shard: int) -> AsyncIterator[Queue | DeletedQueue]:
        """See Client.watch_queues."""
        stub = await self._stub(shard)
        call = stub.WatchQueues(queue_pb2.WatchQueuesRequest())
        try:
            with errors_translated():
                async for answer in call:
                    for change in answer.changes:
                        if change.HasField("queue"):
                            yield queue_of(change.queue)
                        else:
                            yield DeletedQueue(change.deleted_queue_id)
        finally:
            call.cancel()

    async def _about(
        self, method: str, queue_id: str, request: Any, *, repeat_unknown: bool = True
    ) -> Any:
        """One call to the broker that has the queue."""

        async def attempt(shard: int, timeout: float) -> Any:
            stub = await self._stub(shard)
            return await getattr(stub, method)(request, timeout=timeout)

        return await self._locations.call(queue_id, attempt, repeat_unknown=repeat_unknown)

    async def _stub(self, shard: int) -> Any:
        return queue_pb2_grpc.QueueServiceStub(await self._peers.broker(shard))

    async def explain(
        self,
        headers: Mapping[str, str],
        created_at: Time | None,
        received_at: Time | None,
        payload_bytes: int,
        queue_ids: Iterable[str],
        *,
        delay: Duration | None,
        visible_at: Time | None,
        retention: Duration,
        message_id: int,
    ) -> list[Explanation]:
        """See Client.explain."""
        request = message_of(
            router_pb2.ExplainRequest,
            headers=headers,
            payload_bytes=payload_bytes,
            queue_ids=queue_ids,
            created_at_ms=None if created_at is None else time_ms(created_at, "created_at"),
            received_at_ms=None if received_at is None else time_ms(received_at, "received_at"),
            delay_ms=None if delay is None else milliseconds(delay, "delay"),
            visible_at_ms=None if visible_at is None else time_ms(visible_at, "visible_at"),
            retention_s=whole_seconds("retention", retention),
            message_id=message_id,
        )

        async def attempt(timeout: float) -> list[Explanation]:
            stub: Any = router_pb2_grpc.RouterServiceStub(await self._peers.router())
            answer = await stub.Explain(request, timeout=timeout)
            return [
                Explanation(queue.queue_id, queue.matched, queue.priority, queue.reason)
                for queue in answer.queues
            ]

        return await self._peers.call(attempt)


Start = Time | Literal["now", "beginning"]
"""From when on a new queue gets messages."""

_FIELDS = {
    "lease": "lease_ms",
    "max_lease": "max_lease_ms",
    "done_retention": "done_retention_s",
    "default_delay": "default_delay_ms",
    "max_total_lease": "max_total_lease_ms",
    "failed_retention": "failed_retention_s",
}


def _set_start(request: queue_pb2.CreateQueueRequest, start_from: Start | str) -> None:
    if start_from == "beginning":
        request.start_from_beginning = True
    elif start_from != "now":
        if isinstance(start_from, str):
            raise InvalidArgument("start_from", f"must be now, beginning or a time: {start_from!r}")
        request.start_from_ms = time_ms(start_from, "start_from")


def _fill(wire: queue_pb2.Queue, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        field = _FIELDS.get(name, name)
        if field.endswith("_ms"):
            value = span_ms(name, value)
        elif field.endswith("_s"):
            value = whole_seconds(name, value)
        if name == "backoff":
            if not isinstance(value, Backoff):
                raise wrong("backoff", "a Backoff, such as Backoff.fixed(10)", value)
            value = value.wire()
        check_field(queue_pb2.Queue, field, value, name)
        wire.MergeFrom(queue_pb2.Queue(**{field: value}))


def _is_as_asked(queue: Queue, wire: queue_pb2.Queue) -> bool:
    """Whether a queue has every setting that was asked for."""
    return all(
        getattr(queue, field.name)
        == (backoff_of(wire.backoff) if field.name == "backoff" else value)
        for field, value in wire.ListFields()
    )
