"""Creating, reading, changing and repairing queues."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict
from heapq import heappop, heappush
from typing import Any, Literal, TypeVar, Unpack

import grpc.aio

from slatemq._admin.entry_models import EntryState, StateName, state_wire
from slatemq._admin.placement import least_loaded
from slatemq._admin.queue_models import (
    Backoff,
    DeletedQueue,
    Queue,
    QueueDraft,
    QueueSettings,
    backoff_of,
    queue_of,
)
from slatemq._checks import check_field, fields_of, iterable, message_of, wrong
from slatemq._rpc.peers import NOT_TAKEN, CallOptions, Method, errors_translated
from slatemq._rpc.queue_locations import ANSWER_S, Calls
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
    optional_ms,
    time_ms,
    whole_seconds,
)
from slatemq.v1 import queue_pb2, router_pb2
from slatemq.v1.queue_pb2_grpc import QueueServiceStub
from slatemq.v1.router_pb2_grpc import RouterServiceStub

Q = TypeVar("Q")

Start = Time | Literal["now", "beginning"]
"""The time from which a new queue gets messages."""

PAGE_SIZE = 1000


class QueueCalls(Calls):
    """Creating, reading, changing and repairing queues; a part of the client."""

    async def create_queue(
        self,
        queue_id: str,
        *,
        with_queue: str = "",
        shard: int | None = None,
        start_from: Start = "now",
        **settings: Unpack[QueueSettings],
    ) -> Queue:
        """Creates a queue with these settings; None means the default.

        It goes to a broker shard that has little to do. `with_queue`: another queue whose shard it
        must share, so that commands on both can be executed together; `shard`: that broker shard.
        `start_from`: a time, or "beginning": older messages are brought in, back to the beginning
        of the instance's replay window; `Queue.replay` shows the progress. Raises AlreadyExists,
        InvalidArgument, NotFound (`with_queue`, or no such `shard`), Unavailable.
        """
        if with_queue and shard is not None:
            raise InvalidArgument("shard", "contradicts with_queue: leave one out")
        wire = message_of(queue_pb2.Queue, queue_id=queue_id)
        _fill(wire, settings)
        request = message_of(queue_pb2.CreateQueueRequest, queue=wire, with_queue_id=with_queue)
        _set_start(request, start_from)
        tries = 0
        chosen: int | None = None

        async def attempt(timeout: float) -> Queue:
            nonlocal chosen, tries
            if chosen is None:
                chosen = await self._shard_for(with_queue, shard)
            stub = QueueServiceStub(await self._peers.broker(chosen))
            tries += 1
            try:
                with errors_translated():
                    return queue_of((await stub.CreateQueue(request, timeout=timeout)).queue)
            except Unavailable as error:
                if error.reason in NOT_TAKEN:
                    chosen = None  # Nothing was created: try another broker.
                raise

        try:
            return await self._peers.call(attempt)
        except AlreadyExists:
            # The first try may have created it, and its response got lost.
            if tries > 1 and _is_as_asked(found := await self.get_queue(queue_id), wire):
                return found
            raise

    async def _shard_for(self, with_queue: str, shard: int | None) -> int:
        """The shard for a new queue. Raises NotFound for a shard or queue that does not exist."""
        if shard is not None:
            if shard not in (await self._peers.fresh_topology()).brokers:
                raise NotFound("broker shard", str(shard))
            return shard
        if with_queue:
            return await self._locations.shard_of(with_queue)
        return await least_loaded(self._peers)

    async def get_queue(self, queue_id: str) -> Queue:
        """Reads a queue, with the counts of its messages. Raises NotFound."""
        request = message_of(queue_pb2.GetQueueRequest, queue_id=queue_id)
        return await self._ask_queue(
            queue_id, lambda channel: QueueServiceStub(channel).GetQueue, request
        )

    def list_queues(self, prefix: str = "") -> AsyncIterator[Queue]:
        """All queues whose ID begins with `prefix`, by ID.

        Raises Unavailable (INCOMPLETE) at the end when brokers did not answer: their queues are
        missing, `metadata["broker_shards"]` names them.
        """
        return self.list_answering(prefix)

    async def list_answering(
        self, prefix: str = "", answer_s: float = ANSWER_S
    ) -> AsyncIterator[Queue]:
        """Like `list_queues`; waits for brokers as `QueueLocations.ask_all` does."""
        request = message_of(queue_pb2.ListQueuesRequest, page_size=PAGE_SIZE, prefix=prefix)
        first = await self._locations.ask_all(_list_queues, request, answer_s)
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
        """The queues of this page of one broker, and of all pages after it."""
        while True:
            for queue in page.queues:
                yield queue
            if not page.next_page_token:
                return
            following = queue_pb2.ListQueuesRequest()
            following.CopyFrom(request)
            following.page_token = page.next_page_token
            page = await self._peers.ask_broker(shard, _list_queues, following)

    async def update_queue(
        self, queue_id: str, *, etag: str = "", **settings: Unpack[QueueSettings]
    ) -> Queue:
        """Changes the settings given; None resets one to its default.

        With the etag of a queue that was read before, no other change is overwritten: raises
        Aborted instead.
        """
        if not settings:
            raise InvalidArgument("update_mask", "name at least one setting to change")
        wire = message_of(queue_pb2.Queue, queue_id=queue_id, etag=etag)
        _fill(wire, settings)
        request = queue_pb2.UpdateQueueRequest(queue=wire)
        request.update_mask.paths.extend(_FIELDS[name] for name in settings)
        return await self._ask_queue(
            queue_id,
            lambda channel: QueueServiceStub(channel).UpdateQueue,
            request,
            # With an etag a repeat would be refused for the change that the first try made.
            repeat_unknown=not etag,
        )

    async def _ask_queue(
        self, queue_id: str, method: Method[Q, Any], request: Q, **options: Unpack[CallOptions]
    ) -> Queue:
        """The queue that a method of its broker responds with."""
        return queue_of((await self._locations.ask(queue_id, method, request, **options)).queue)

    async def delete_queue(self, queue_id: str, *, etag: str = "") -> None:
        """Deletes a queue with everything in it. Raises NotFound, Aborted."""
        request = message_of(queue_pb2.DeleteQueueRequest, queue_id=queue_id, etag=etag)
        tries = 0

        async def attempt(shard: int, timeout: float) -> None:
            nonlocal tries
            stub = QueueServiceStub(await self._peers.broker(shard))
            tries += 1
            await stub.DeleteQueue(request, timeout=timeout)

        try:
            await self._locations.call(queue_id, attempt)
        except NotFound:
            if tries < 2:
                raise
            # The first try deleted it, and its response got lost.
        finally:
            self._locations.forget(queue_id)

    async def pause_queue(self, queue_id: str) -> Queue:
        """Stops deliveries: consumers wait. Does nothing to a paused queue. Raises NotFound."""
        request = message_of(queue_pb2.PauseQueueRequest, queue_id=queue_id)
        return await self._ask_queue(
            queue_id, lambda channel: QueueServiceStub(channel).PauseQueue, request
        )

    async def resume_queue(self, queue_id: str) -> Queue:
        """Ends a pause; does nothing without one. Raises NotFound."""
        request = message_of(queue_pb2.ResumeQueueRequest, queue_id=queue_id)
        return await self._ask_queue(
            queue_id, lambda channel: QueueServiceStub(channel).ResumeQueue, request
        )

    async def lift_quarantine(self, queue_id: str) -> Queue:
        """Routes a queue again whose filter took too long; does nothing to others.

        The messages that waited are judged once. A change of the filter or priority ends a
        quarantine, too. Raises NotFound.
        """
        request = message_of(queue_pb2.LiftQuarantineRequest, queue_id=queue_id)
        return await self._ask_queue(
            queue_id, lambda channel: QueueServiceStub(channel).LiftQuarantine, request
        )

    async def purge_queue(
        self, queue_id: str, states: Iterable[EntryState | StateName] = ()
    ) -> int:
        """Removes all messages of a queue in these states; returns how many.

        No states: available and delayed, which always go together; `in_flight` ends the leases.
        When the call is repeated after a failure, messages that arrived meanwhile may go, too.
        Raises NotFound, InvalidArgument.
        """
        given = iterable("states", "states", states)
        request = message_of(
            queue_pb2.PurgeQueueRequest,
            queue_id=queue_id,
            states=[state_wire(state, "states") for state in given],
        )
        response = await self._locations.ask(
            queue_id, lambda channel: QueueServiceStub(channel).PurgeQueue, request
        )
        return response.purged_count

    async def watch_queues(self, broker_shard: int = 0) -> AsyncIterator[Queue | DeletedQueue]:
        """The queues of a broker shard, then every change, without end."""
        stub = QueueServiceStub(await self._peers.broker(broker_shard))
        call = stub.WatchQueues(queue_pb2.WatchQueuesRequest())
        async with self._peers.answers(call) as answers:
            async for answer in answers:
                for change in answer.changes:
                    if change.HasField("queue"):
                        yield queue_of(change.queue)
                    else:
                        yield DeletedQueue(change.deleted_queue_id)

    async def explain(
        self,
        headers: Mapping[str, str],
        *,
        created_at: Time | None = None,
        received_at: Time | None = None,
        payload_bytes: int = 0,
        queue_ids: Iterable[str] = (),
        delay: Duration | None = None,
        visible_at: Time | None = None,
        retention: Duration = 0,
        message_id: int = 0,
        draft: QueueDraft | None = None,
    ) -> list[Explanation]:
        """Finds which queues such a message would reach, and why; stores nothing.

        With a `draft` it alone is asked, and no queue has to exist: `queue_ids` is left out. Raises
        InvalidArgument for a filter or priority that cannot be read, or takes too long.
        """
        request = message_of(
            router_pb2.ExplainRequest,
            headers=headers,
            payload_bytes=payload_bytes,
            queue_ids=queue_ids,
            created_at_ms=optional_ms(created_at, "created_at"),
            received_at_ms=optional_ms(received_at, "received_at"),
            delay_ms=None if delay is None else milliseconds(delay, "delay"),
            visible_at_ms=optional_ms(visible_at, "visible_at"),
            retention_s=whole_seconds("retention", retention),
            message_id=message_id,
            draft=None if draft is None else message_of(queue_pb2.Queue, **asdict(draft)),
        )
        response = await self._peers.ask(
            self._peers.router, lambda channel: RouterServiceStub(channel).Explain, request
        )
        return [Explanation(**fields_of(queue, Explanation)) for queue in response.queues]


def _list_queues(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[queue_pb2.ListQueuesRequest, queue_pb2.ListQueuesResponse]:
    return QueueServiceStub(channel).ListQueues


def _set_start(request: queue_pb2.CreateQueueRequest, start_from: Start | str) -> None:
    if start_from == "beginning":
        request.start_from_beginning = True
    elif start_from != "now":
        if isinstance(start_from, str):
            raise InvalidArgument("start_from", f"must be now, beginning or a time: {start_from!r}")
        request.start_from_ms = time_ms(start_from, "start_from")


def _field_of(setting: str) -> str:
    known = queue_pb2.Queue.DESCRIPTOR.fields_by_name
    return next(name for name in (setting, f"{setting}_ms", f"{setting}_s") if name in known)


_FIELDS = {setting: _field_of(setting) for setting in QueueSettings.__annotations__}
"""The field of each setting: its name, with the unit of a duration."""


def _fill(wire: queue_pb2.Queue, settings: QueueSettings) -> None:
    """Sets what is not None. Raises TypeError for an unknown name, InvalidArgument."""
    value: Any
    for name, value in settings.items():
        field = _FIELDS.get(name)
        if field is None:
            raise TypeError(f"{name!r} is not a setting of a queue: {', '.join(_FIELDS)}")
        if value is None:
            continue
        if field.endswith("_ms"):
            value = milliseconds(value, name)
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
