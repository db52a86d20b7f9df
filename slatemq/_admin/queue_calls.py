"""Creating, reading, changing and repairing queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, TypeVar, Unpack

import grpc.aio

from slatemq._admin.entry_models import EntryState, StateName, state_wire
from slatemq._admin.merging import merged
from slatemq._admin.placement import SHARD_DRAINING, least_loaded, least_loaded_of_all
from slatemq._admin.queue_models import (
    ETAGS_BETWEEN,
    Backoff,
    DeletedQueue,
    Queue,
    QueueDraft,
    QueueSettings,
    backoff_of,
    joined,
    queue_of,
)
from slatemq._checks import check_kind, check_text, check_whole, iterable, moved
from slatemq._requests import check_field, fields_of, message_of
from slatemq._rpc.peers import (
    NOT_TAKEN,
    PEER_UNKNOWN,
    Method,
    errors_translated,
    raise_unknown,
)
from slatemq._rpc.queue_locations import ANSWER_S, Answers, Calls, check_all_changed, is_absent
from slatemq.errors import (
    INCOMPLETE,
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SlateMQError,
    Unavailable,
)
from slatemq.models import (
    Duration,
    Explanation,
    Time,
    milliseconds,
    optional_ms,
    seconds,
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

CHOOSE_AGAIN = NOT_TAKEN | {PEER_UNKNOWN}
"""Reasons for which a new queue goes to another shard than the one that was asked."""

CLOCKS_DIFFER_MS = 60_000
"""By how much the clock of a broker, which dates a queue's creation, may be ahead of those of
ingests, which date messages."""

PARTITIONS_MAX = (1 << 31) - 1
"""What a request can name; the brokers that there are allow fewer."""


class QueueCalls(Calls):
    """Creating, reading, changing and repairing queues; a part of the client."""

    async def create_queue(
        self,
        queue_id: str,
        *,
        with_queue: str = "",
        shard: int | None = None,
        partitions: int | None = None,
        ordering_header: str = "",
        start_from: Start = "now",
        **settings: Unpack[QueueSettings],
    ) -> Queue:
        """Creates a queue with these settings; None means the default.

        It goes to a broker shard that has little to do. `with_queue`: another queue whose shard it
        must share, so that commands on both can be executed together; `shard`: that broker shard.
        `partitions`: spreads the queue over as many broker shards, by the value of the
        `ordering_header` where messages have it, else evenly; repeat a creation that broke off.
        `start_from`: a time, or "beginning": older messages are brought in, back to the beginning
        of the instance's replay window; `Queue.replay` shows the progress. Raises AlreadyExists,
        InvalidArgument, NotFound (`with_queue`, or no such `shard`), Unavailable.
        """
        check_text("with_queue", with_queue)
        check_text("ordering_header", ordering_header)
        if shard is not None:
            check_whole("shard", shard, 0)
        if with_queue and shard is not None:
            raise InvalidArgument("shard", "contradicts with_queue: leave one out")
        wire = message_of(queue_pb2.Queue, queue_id=queue_id)
        _fill(wire, settings)
        request = message_of(queue_pb2.CreateQueueRequest, queue=wire, with_queue_id=with_queue)
        _set_start(request, start_from)
        if partitions is None:
            if ordering_header:
                raise InvalidArgument("ordering_header", "is for partitions: say how many")
            return await self._create(request, with_queue, shard)
        if shard is not None:
            raise InvalidArgument("shard", "contradicts partitions, each of which has its own")
        check_whole("partitions", partitions, 1, PARTITIONS_MAX)
        request.queue.partition.MergeFrom(
            message_of(queue_pb2.Partition, count=partitions, ordering_header=ordering_header)
        )
        return await self._create_partitions(request, with_queue)

    async def _create(
        self, request: queue_pb2.CreateQueueRequest, with_queue: str, shard: int | None
    ) -> Queue:
        """Creates a queue that is not partitioned."""
        queue_id = request.queue.queue_id
        tries = 0
        chosen: int | None = None

        async def attempt(timeout: float) -> Queue:
            nonlocal chosen, tries
            if chosen is None:
                chosen = await self._shard_for(with_queue, shard)
            try:
                with errors_translated(self._peers.process("broker", chosen)):
                    stub = QueueServiceStub(await self._peers.broker(chosen))
                    tries += 1
                    response = await stub.CreateQueue(request, timeout=timeout)
            except Unavailable as error:
                if error.reason in CHOOSE_AGAIN:
                    chosen = None  # Nothing was created: try another broker.
                raise
            self._locations.note(queue_id, (chosen,))
            return queue_of(response.queue)

        while True:
            try:
                return await self._peers.call(attempt)
            except AlreadyExists:
                # The first try may have created it, and its response got lost.
                if tries > 1:
                    found = await self.get_queue(queue_id)
                    if _is_as_asked(found, request.queue):
                        return found
                raise
            except (FailedPrecondition, NotFound) as error:
                refused = chosen
                if refused is None or not _is_misplaced(error, with_queue):
                    raise
                tries -= 1  # That one has created nothing.
                chosen = await self._peers.call(lambda _: self._shard_for(with_queue, shard))
                if chosen == refused:
                    raise

    async def _create_partitions(
        self, request: queue_pb2.CreateQueueRequest, with_queue: str
    ) -> Queue:
        """Creates what is missing of a partitioned queue, then lets all partitions get messages.

        A repeat after any step goes on with what was begun.
        """
        shards = await self._begin(request, with_queue)
        others = range(1, len(shards))
        problems = await asyncio.gather(*(self._try_partition(request, shards, n) for n in others))
        for index, problem in zip(others, problems, strict=True):
            if problem is not None:
                shards = await self._create_elsewhere(request, shards, index, problem)
        self._locations.note(request.queue.queue_id, shards)
        opened = await asyncio.gather(*(self._open(request, one) for one in others))
        return joined([await self._open(request, 0), *opened])

    async def _begin(
        self, request: queue_pb2.CreateQueueRequest, with_queue: str
    ) -> tuple[int, ...]:
        """Creates partition 0, unless a creation that broke off has; returns the shards of all."""
        count = request.queue.partition.count
        refused: int | None = None
        while True:
            shards: tuple[int, ...] = ()
            try:
                shards = await self._peers.call(lambda _: self._shards_for(count, with_queue))
                await self._create_partition(request, shards, 0)
            except SlateMQError as error:
                is_misplaced = _is_misplaced(error, with_queue)
                if not is_misplaced and not isinstance(error, AlreadyExists):
                    raise
                # It may be begun, before or by a try whose response got lost.
                if begun := await self._begun(request):
                    return begun
                if not is_misplaced or not shards or shards[0] == refused:
                    raise
                refused = shards[0]
            else:
                return shards

    async def _try_partition(
        self, request: queue_pb2.CreateQueueRequest, shards: Sequence[int], index: int
    ) -> SlateMQError | None:
        """As `_create_partition`; returns the error where another shard may take the partition."""
        try:
            await self._create_partition(request, shards, index)
        except SlateMQError as error:
            if not _is_misplaced(error, request.with_queue_id):
                raise
            return error
        return None

    async def _create_elsewhere(
        self,
        request: queue_pb2.CreateQueueRequest,
        shards: tuple[int, ...],
        index: int,
        problem: SlateMQError,
    ) -> tuple[int, ...]:
        """Creates a partition on another shard than the claim has for it; returns those of all.

        Raises `problem`, for which the claim's shard does not take it, where there is no other.
        """
        found: SlateMQError | None = problem
        while found is not None:
            choose = partial(self._other_shard, request.with_queue_id, shards, index)
            chosen = await self._peers.call(choose)
            if chosen in shards:
                raise found
            shards = (*shards[:index], chosen, *shards[index + 1 :])
            found = await self._try_partition(request, shards, index)
        return shards

    async def _other_shard(
        self, with_queue: str, shards: Sequence[int], index: int, _: float
    ) -> int:
        """The shard for a partition that that of the claim does not take."""
        if with_queue:
            return (await self._shards_beside(with_queue, len(shards)))[index]
        return await least_loaded(self._peers, shards)

    async def _begun(self, request: queue_pb2.CreateQueueRequest) -> tuple[int, ...] | None:
        """The shards of such a queue, of which partition 0 exists, and which is not open yet.

        From then on it is wanted in full: so the partitions that follow begin there, too.
        """
        wanted = request.queue
        try:
            shards = await self._locations.shards_of(wanted.queue_id, fresh=True)
            first = await self._get_part(wanted.queue_id, shards[0])
        except NotFound:
            return None  # There is none, or a deletion broke off.
        if not first.quarantine.being_created or not _is_as_asked(joined([first]), wanted):
            return None
        if request.WhichOneof("start") is None:
            request.start_from_ms = max(0, first.created_at_ms - CLOCKS_DIFFER_MS)
        return shards

    async def _create_partition(
        self, request: queue_pb2.CreateQueueRequest, shards: Sequence[int], index: int
    ) -> None:
        """Creates a partition, unless it is there, as asked; partition 0 must not be there."""
        mine = queue_pb2.CreateQueueRequest()
        mine.CopyFrom(request)
        mine.queue.partition.index = index
        mine.broker_shards.extend(shards)
        try:
            await self._peers.ask_broker(
                shards[index],
                lambda channel: QueueServiceStub(channel).CreateQueue,
                mine,
                on_failure=raise_unknown,
            )
        except AlreadyExists:
            if not index:
                raise
            found = await self._get_part(request.queue.queue_id, shards[index])
            # It may be open: a creation may break off while it opens one after the other.
            is_other = found.partition != mine.queue.partition
            if is_other or not _is_as_asked(joined([found]), mine.queue):
                raise

    async def _get_part(self, queue_id: str, shard: int) -> queue_pb2.Queue:
        request = queue_pb2.GetQueueRequest(queue_id=queue_id)
        return (await self._peers.ask_broker(shard, _get_queue, request)).queue

    async def _open(self, request: queue_pb2.CreateQueueRequest, index: int) -> queue_pb2.Queue:
        """Ends the quarantine in which a partition begins, wherever it has moved meanwhile."""
        queue_id = request.queue.queue_id
        response = await self._locations.ask(
            queue_id,
            lambda channel: QueueServiceStub(channel).LiftQuarantine,
            queue_pb2.LiftQuarantineRequest(queue_id=queue_id, all_created=True),
            index,
        )
        return response.queue

    async def _shards_for(self, count: int, with_queue: str) -> tuple[int, ...]:
        """The shards for the partitions of a new queue."""
        if with_queue:
            return await self._shards_beside(with_queue, count)
        return await least_loaded_of_all(self._peers, count)

    async def _shards_beside(self, with_queue: str, count: int) -> tuple[int, ...]:
        shards = await self._locations.shards_of(with_queue, fresh=True)
        if len(shards) != count:
            raise InvalidArgument(
                "partitions", f"must be {len(shards)}, as many as queue {with_queue!r} has"
            )
        return shards

    async def _shard_for(self, with_queue: str, shard: int | None) -> int:
        """The shard for a new queue. Raises NotFound for a shard or queue that does not exist."""
        if shard is not None:
            if shard not in (await self._peers.fresh_topology()).brokers:
                raise NotFound("broker shard", str(shard))
            return shard
        if with_queue:
            return (await self._shards_beside(with_queue, 1))[0]
        return await least_loaded(self._peers)

    async def get_queue(self, queue_id: str) -> Queue:
        """Reads a queue, with the counts of its messages. Raises NotFound.

        Of a partitioned queue those partitions are left out whose brokers do not answer:
        `missing_partitions` has them.
        """
        parts = await self._get_parts(queue_id)
        if self._locations.note_count(queue_id, parts[0].partition.count):
            parts = await self._get_parts(queue_id)
        return joined(parts)

    async def _get_parts(self, queue_id: str) -> list[queue_pb2.Queue]:
        request = message_of(queue_pb2.GetQueueRequest, queue_id=queue_id)
        attempt = self._locations.asking(queue_id, _get_queue, request)
        outcomes = await self._locations.outcomes_there(queue_id, attempt)
        found = [one.queue for one in outcomes if isinstance(one, queue_pb2.GetQueueResponse)]
        for one in outcomes:
            may_miss = isinstance(one, Unavailable | DeadlineExceeded) or is_absent(one, queue_id)
            if isinstance(one, SlateMQError) and not (found and may_miss):
                raise one
        return found

    def list_queues(self, prefix: str = "") -> AsyncIterator[Queue]:
        """All queues whose ID begins with `prefix`, by ID.

        Raises Unavailable (INCOMPLETE) at the end when brokers did not answer: their queues are
        missing, `metadata["broker_shards"]` names them.
        """
        return self.list_answering(prefix)

    async def list_answering(
        self, prefix: str = "", timeout: Duration = ANSWER_S
    ) -> AsyncIterator[Queue]:
        """Like `list_queues`; waits for brokers as `QueueLocations.ask_all` does."""
        answer_s = seconds(timeout, "timeout")
        request = message_of(queue_pb2.ListQueuesRequest, page_size=PAGE_SIZE, prefix=prefix)
        first = await self._locations.ask_all(_list_queues, request, answer_s)
        listed = [self._queues_of(shard, request, first) for shard in sorted(first.by_shard)]
        parts: list[queue_pb2.Queue] = []
        async for queue in merged(listed, lambda queue: queue.queue_id):
            if parts and queue.queue_id != parts[0].queue_id:
                yield joined(parts)
                parts = []
            parts.append(queue)
        if parts:
            yield joined(parts)
        first.check_complete()

    async def _queues_of(
        self,
        shard: int,
        request: queue_pb2.ListQueuesRequest,
        first: Answers[queue_pb2.ListQueuesResponse],
    ) -> AsyncIterator[queue_pb2.Queue]:
        async for page in self._locations.pages(shard, _list_queues, request, first):
            for queue in page.queues:
                yield queue

    async def update_queue(
        self, queue_id: str, *, etag: str = "", **settings: Unpack[QueueSettings]
    ) -> Queue:
        """Changes the settings given; None resets one to its default.

        With the etag of a queue that was read before, no other change is overwritten: raises
        Aborted instead, and Unavailable (INCOMPLETE) while a partition is missing.
        """
        if not settings:
            raise InvalidArgument("update_mask", "name at least one setting to change")
        wire = message_of(queue_pb2.Queue, queue_id=queue_id, etag=etag)
        _fill(wire, settings)
        etags = await self._etags(queue_id, etag)
        paths = [_FIELDS[name] for name in settings]

        async def attempt(index: int, shard: int, timeout: float) -> queue_pb2.Queue:
            request = queue_pb2.UpdateQueueRequest(queue=wire)
            request.queue.etag = etags[index] if etags else ""
            request.update_mask.paths.extend(paths)
            stub = QueueServiceStub(await self._peers.broker(shard))
            metadata = self._locations.naming(queue_id, index)
            return (await stub.UpdateQueue(request, timeout=timeout, metadata=metadata)).queue

        # With an etag a repeat would be refused for the change that the first try made.
        updated = await self._locations.each(queue_id, attempt, repeat_unknown=not etag)
        return joined(updated)

    async def _etags(self, queue_id: str, etag: str) -> Sequence[str]:
        """The etags of a queue's partitions, of which that of the queue is made; none of none.

        Of several, all are compared before any partition changes.

        Raises:
            Aborted: The queue was changed since.
            Unavailable: A partition is missing, so that its etag is not known (INCOMPLETE).
        """
        etags = etag.split(ETAGS_BETWEEN) if etag else []
        shards = await self._locations.located(queue_id, fresh=True) if etag else ()
        if len(shards) > 1 or len(etags) > 1:
            current = await self.get_queue(queue_id)
            if current.missing_partitions:
                missing = ", ".join(map(str, current.missing_partitions))
                raise Unavailable(
                    f"queue {queue_id!r} misses partitions ({missing}), so its etag cannot be "
                    "compared",
                    reason=INCOMPLETE,
                )
            if current.etag != etag:
                raise Aborted(f"queue {queue_id!r} was changed since", etag=current.etag)
        return etags

    async def _ask_queue(self, queue_id: str, method: Method[Q, Any], request: Q) -> Queue:
        """The queue that a method of its brokers responds with."""
        responses = await self._locations.ask_each(queue_id, method, request)
        return joined([response.queue for response in responses])

    async def delete_queue(self, queue_id: str, *, etag: str = "") -> None:
        """Deletes a queue with everything in it. Raises NotFound, Aborted.

        Repeat a deletion of a partitioned queue that broke off: Unavailable (INCOMPLETE).
        """
        request = message_of(queue_pb2.DeleteQueueRequest, queue_id=queue_id, etag=etag)
        etags = await self._etags(queue_id, etag)
        shards = await self._locations.located(queue_id, fresh=True)
        tries = 0

        async def attempt(index: int, shard: int, timeout: float) -> None:
            nonlocal tries
            stub = QueueServiceStub(await self._peers.broker(shard))
            tries += 1
            metadata = self._locations.naming(queue_id, index)
            await stub.DeleteQueue(request, timeout=timeout, metadata=metadata)

        try:
            request.etag = etags[0] if etags else ""
            first = await self._locations.outcome(queue_id, attempt, 0, on_failure=raise_unknown)
            is_unknown = first is not None and first.reason == PEER_UNKNOWN
            if first is not None and not is_unknown and not is_absent(first, queue_id):
                raise first
            # Without partition 0 the queue is given up: the others follow, however they changed.
            request.etag = ""
            deleted = [first, *await self._delete_others(queue_id, attempt)]
            if is_unknown:  # If its shard was removed, the last of the others has freed the name.
                request.etag = etags[0] if etags else ""
                deleted[0] = await self._locations.outcome(queue_id, attempt, 0)
            left = [None if is_absent(one, queue_id) else one for one in deleted]
            check_all_changed(queue_id, shards, left, changed="deleted")
            # A try whose response got lost may have deleted it.
            if tries <= len(deleted) and all(deleted):
                raise NotFound("queue", queue_id)
        finally:
            self._locations.forget(queue_id)

    async def _delete_others(
        self, queue_id: str, attempt: Callable[[int, int, float], Awaitable[None]]
    ) -> list[SlateMQError | None]:
        try:
            shards = await self._locations.shards_of(queue_id)
        except NotFound:
            return []  # It had no partitions, or all of them are gone.
        return await asyncio.gather(
            *(self._locations.outcome(queue_id, attempt, index) for index in range(1, len(shards)))
        )

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
        quarantine, too. Raises NotFound, and FailedPrecondition for a queue whose partitions are
        being created.
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

        def purged_count(responses: list[queue_pb2.PurgeQueueResponse]) -> int:
            return sum(response.purged_count for response in responses)

        return purged_count(
            await self._locations.ask_each(
                queue_id,
                lambda channel: QueueServiceStub(channel).PurgeQueue,
                request,
                lambda responses: {"purged_count": str(purged_count(responses))},
            )
        )

    async def watch_queues(self, broker_shard: int = 0) -> AsyncIterator[Queue | DeletedQueue]:
        """The queues of a broker shard, then every change, without end."""
        check_whole("broker_shard", broker_shard, 0)
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
            visible_at_ms=optional_ms(visible_at, "visible_at") or 0,
            retention_s=whole_seconds("retention", retention),
            message_id=message_id,
            draft=None if draft is None else _wire_of(draft),
        )
        response = await self._peers.ask(
            self._peers.router, lambda channel: RouterServiceStub(channel).Explain, request
        )
        return [Explanation(**fields_of(queue, Explanation)) for queue in response.queues]


def _is_misplaced(error: SlateMQError, with_queue: str) -> bool:
    """Whether a shard takes no new queue that another may take.

    It is drained or was removed, or the queue beside which the new one is to be is elsewhere.
    """
    return error.reason in (SHARD_DRAINING, PEER_UNKNOWN) or is_absent(error, with_queue)


def _get_queue(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[queue_pb2.GetQueueRequest, queue_pb2.GetQueueResponse]:
    return QueueServiceStub(channel).GetQueue


def _list_queues(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[queue_pb2.ListQueuesRequest, queue_pb2.ListQueuesResponse]:
    return QueueServiceStub(channel).ListQueues


def _wire_of(draft: QueueDraft) -> queue_pb2.Queue:
    check_kind("draft", draft, QueueDraft)
    given = {name: value for name, value in asdict(draft).items() if value is not None}
    try:
        check_text("queue_id", draft.queue_id)
        return message_of(queue_pb2.Queue, **given)
    except InvalidArgument as error:
        raise moved(error, f"draft.{error.field}") from None


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
            check_kind("backoff", value, Backoff, "a Backoff, such as Backoff.fixed(10)")
            value = value.wire()
        check_field(queue_pb2.Queue, field, value, name)
        wire.MergeFrom(queue_pb2.Queue(**{field: value}))


def _is_as_asked(queue: Queue, wire: queue_pb2.Queue) -> bool:
    """Whether a queue has every setting that was asked for."""
    for field, value in wire.ListFields():
        if field.name == "partition":
            found: object = (queue.partitions_count, queue.ordering_header)
            value = (value.count, value.ordering_header)
        else:
            found = getattr(queue, field.name)
            value = backoff_of(value) if field.name == "backoff" else value
        if found != value:
            return False
    return True
