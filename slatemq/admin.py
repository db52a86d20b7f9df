"""Queues, explanations and the state of the instance: the calls of people and tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Literal

import grpc

from slatemq.checks import check_field, iterable, message_of, wrong
from slatemq.entry_models import EntryState, state_wire
from slatemq.errors import AlreadyExists, InvalidArgument, NotFound, SlateMQError, Unavailable
from slatemq.models import (
    Explanation,
    RouteStatus,
    ServiceStatus,
    Status,
    Time,
    span_ms,
    time_ms,
    whole_seconds,
)
from slatemq.peers import ATTEMPT_S, Peers, errors_translated
from slatemq.queue_models import Backoff, DeletedQueue, Queue, backoff_of, queue_of
from slatemq.rpc_status import from_rpc_error
from slatemq.v1 import queue_pb2, queue_pb2_grpc, router_pb2, router_pb2_grpc

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""HealthCheckResponse with status SERVING, whole: no package is needed for one byte."""

STATUS_S = 3.0
"""How long `status` waits for a process."""


class Unchanged:
    """Stands for a setting that an update leaves as it is."""


UNCHANGED = Unchanged()


class Admin:
    """Calls on QueueService and RouterService."""

    def __init__(self, peers: Peers) -> None:
        """Call through these peers."""
        self._peers = peers

    async def create_queue(
        self, queue_id: str, with_queue: str, start_from: Start, **settings: Any
    ) -> Queue:
        """See Client.create_queue."""
        wire = message_of(queue_pb2.Queue, queue_id=queue_id)
        _fill(wire, {name: value for name, value in settings.items() if value is not None})
        request = message_of(queue_pb2.CreateQueueRequest, queue=wire, with_queue_id=with_queue)
        _set_start(request, start_from)
        tries = 0

        async def attempt(timeout: float) -> Queue:
            nonlocal tries
            # The lowest shard, until queues are spread by more than chance.
            shards = await self._peers.broker_shards()
            shard = shards[0] if shards else 0
            if with_queue:
                shard = await self._peers.broker_of(with_queue)
            stub = await self._stub(shard)
            tries += 1
            return queue_of((await stub.CreateQueue(request, timeout=timeout)).queue)

        try:
            return await self._peers.call(attempt)
        except AlreadyExists:
            # The first try may have made it, and its answer got lost.
            if tries > 1 and _is_as_asked(found := await self.get_queue(queue_id), wire):
                return found
            raise

    async def get_queue(self, queue_id: str) -> Queue:
        """See Client.get_queue."""
        request = message_of(queue_pb2.GetQueueRequest, queue_id=queue_id)
        return queue_of((await self._about("GetQueue", queue_id, request)).queue)

    async def list_queues(self, prefix: str = "") -> AsyncIterator[Queue]:
        """See Client.list_queues."""
        for shard in await self._peers.broker_shards():
            token = ""
            while True:
                page = await self._page(shard, prefix, token)
                for queue in page.queues:
                    yield queue_of(queue)
                token = page.next_page_token
                if not token:
                    break

    async def _page(self, shard: int, prefix: str, token: str) -> queue_pb2.ListQueuesResponse:
        request = message_of(
            queue_pb2.ListQueuesRequest, page_size=1000, page_token=token, prefix=prefix
        )

        async def attempt(timeout: float) -> queue_pb2.ListQueuesResponse:
            stub = await self._stub(shard)
            answer: queue_pb2.ListQueuesResponse = await stub.ListQueues(request, timeout=timeout)
            return answer

        return await self._peers.call(attempt)

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
        told = await self._about("UpdateQueue", queue_id, request, repeat_unknown=not etag)
        return queue_of(told.queue)

    async def pause_queue(self, queue_id: str) -> Queue:
        """See Client.pause_queue."""
        request = message_of(queue_pb2.PauseQueueRequest, queue_id=queue_id)
        return queue_of((await self._about("PauseQueue", queue_id, request)).queue)

    async def resume_queue(self, queue_id: str) -> Queue:
        """See Client.resume_queue."""
        request = message_of(queue_pb2.ResumeQueueRequest, queue_id=queue_id)
        return queue_of((await self._about("ResumeQueue", queue_id, request)).queue)

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

        async def attempt(timeout: float) -> None:
            nonlocal tries
            stub = await self._stub(await self._peers.broker_of(queue_id))
            tries += 1
            await stub.DeleteQueue(request, timeout=timeout)

        try:
            await self._peers.call(attempt)
        except NotFound:
            if tries < 2:
                raise
            # The first try deleted it, and its answer got lost.
        finally:
            self._peers.moved(queue_id)

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

        async def attempt(timeout: float) -> Any:
            stub = await self._stub(await self._peers.broker_of(queue_id))
            return await getattr(stub, method)(request, timeout=timeout)

        return await self._peers.call(attempt, repeat_unknown=repeat_unknown)

    async def _stub(self, shard: int) -> Any:
        return queue_pb2_grpc.QueueServiceStub(await self._peers.broker(shard))

    async def explain(
        self,
        headers: Mapping[str, str],
        created_at: Time | None,
        received_at: Time | None,
        payload_bytes: int,
        queue_ids: Iterable[str],
    ) -> list[Explanation]:
        """See Client.explain."""
        request = message_of(
            router_pb2.ExplainRequest,
            headers=headers,
            payload_bytes=payload_bytes,
            queue_ids=queue_ids,
            created_at_ms=None if created_at is None else time_ms(created_at, "created_at"),
            received_at_ms=None if received_at is None else time_ms(received_at, "received_at"),
        )

        async def attempt(timeout: float) -> list[Explanation]:
            stub: Any = router_pb2_grpc.RouterServiceStub(await self._peers.router())
            answer = await stub.Explain(request, timeout=timeout)
            return [
                Explanation(told.queue_id, told.matched, told.priority, told.reason)
                for told in answer.queues
            ]

        return await self._peers.call(attempt)

    async def status(self) -> Status:
        """See Client.status."""
        self._peers.forget()
        topology = await self._peers.topology()
        asked = [
            (service, shard, address)
            for service, addresses in (
                ("ingest", topology.ingests),
                ("router", topology.routers),
                ("broker", topology.brokers),
                ("janitor", topology.janitors),
            )
            for shard, address in sorted(addresses.items())
        ]
        services = await asyncio.gather(*(self._health(*one) for one in asked))
        routes = await self._routes() if any(s.serving for s in services) else []
        queues: list[Queue] = []
        if any(s.serving and s.service == "broker" for s in services):
            try:
                async with asyncio.timeout(STATUS_S):
                    queues = [queue async for queue in self.list_queues()]
            except (SlateMQError, TimeoutError):
                queues = []  # The list of services says who is away.
        return Status(list(services), routes, queues)

    async def _health(self, service: str, shard: int, address: str) -> ServiceStatus:
        check: Any = self._peers.at(address).unary_unary(HEALTH_METHOD)
        try:
            answer = await check(b"", timeout=STATUS_S)
        except grpc.RpcError as error:
            problem = from_rpc_error(error)
            return ServiceStatus(service, shard, address, False, problem.message)
        serving = answer == SERVING
        return ServiceStatus(service, shard, address, serving, "" if serving else "NOT_SERVING")

    async def _routes(self) -> list[RouteStatus]:
        try:
            stub: Any = router_pb2_grpc.RouterServiceStub(await self._peers.router())
            answer = await stub.GetRoutingStatus(
                router_pb2.GetRoutingStatusRequest(), timeout=min(STATUS_S, ATTEMPT_S)
            )
        except (grpc.RpcError, Unavailable):
            return []  # As above.
        return [
            RouteStatus(
                route.ingest_shard,
                route.broker_shard,
                route.cursor,
                route.durable_sequence,
                route.pending_count,
            )
            for route in answer.routes
        ]


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
