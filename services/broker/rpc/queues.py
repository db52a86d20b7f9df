"""QueueService and QueueNameService: queues, their settings, and who uses their names."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from libs.access.current import (
    ALL_QUEUES,
    caller_name,
    caller_quota,
    current_caller,
    hold_to,
    may,
    require,
    require_some,
)
from libs.filters import DEFAULT_FILTER, check, values_of
from libs.serving.requests.paging import bad_page_token, checked_page_size
from libs.serving.requests.shares import Shares
from services.broker.config import BrokerConfig
from services.broker.core.commands import Purge
from services.broker.core.lists.replays import ranges_from
from services.broker.core.moves import moving
from services.broker.core.queue import Queue
from services.broker.core.settings import QueueSettings
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.waiters import paused
from services.broker.requests.limits import inspectable, within
from services.broker.requests.queues import (
    BEING_CREATED,
    SETTINGS,
    changed,
    changes_of,
    checked_id,
    etag_of,
    pages_of,
    partition_of,
    public,
    purges_of,
    with_counts,
)
from services.broker.shard.change_pace import ChangePace
from services.broker.shard.drain import Drain
from services.broker.shard.load import ShardLoad
from services.broker.shard.locations import SEEING, Locations
from services.broker.shard.owner import ShardOwner
from services.broker.shard.replay_starts import ReplayStarts
from services.broker.shard.sweeper import Sweeper
from services.broker.shard.unique_names import UniqueNames
from slatemq.errors import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from slatemq.v1 import queue_name_pb2, queue_name_pb2_grpc, queue_pb2, queue_pb2_grpc

LISTED_PARTS = 1000
"""Parts of queues (priorities, ranges of replays) listed in one step, and those of one queue more:
under 10 ms, in which nothing else runs."""
QUEUE_PARTS = 10
"""What a queue costs without these, in parts."""
WATCHERS_MAX = 1000
"""Open WatchQueues streams at most: each change costs a message to each."""


class Placement(NamedTuple):
    """Where queues are, and whether this shard should get more."""

    locations: Locations
    load: ShardLoad
    drain: Drain


class QueueServicer(queue_pb2_grpc.QueueServiceServicer):
    def __init__(
        self,
        config: BrokerConfig,
        owner: ShardOwner,
        delivery: Dispatcher,
        sweeper: Sweeper,
        starts: ReplayStarts,
        names: UniqueNames,
        placement: Placement,
    ) -> None:
        self._locations, self._load, self._drain = placement
        self._shard = config.shard
        self._max_delay_ms = config.instance.max_message_delay_ms
        self._pace = ChangePace(config.queue_changes_per_s)
        self._watchers: dict[asyncio.Event, None] = {}
        self._watches = Shares(
            "queue_watches",
            WATCHERS_MAX,
            "watches of queues open",
            ("TOO_MANY_STREAMS", "too many open streams"),
            for_services=True,
        )
        self.draining = False
        self._owner = owner
        self._names = names
        self._delivery = delivery
        self._sweeper = sweeper
        self._starts = starts
        owner.on_revision.append(self._wake_watchers)

    async def CreateQueue(
        self, request: queue_pb2.CreateQueueRequest, context: Any
    ) -> queue_pb2.CreateQueueResponse:
        queue_id = checked_id(request.queue.queue_id, "queue.queue_id")
        changes = await self._changes(request.queue, SETTINGS)
        await _require_addressees(queue_id, changes)
        base = QueueSettings(DEFAULT_FILTER(queue_id))
        partition, shards = partition_of(request, self._shard)
        wanted = changed(base, changes).changed(owner=caller_name(), partition=partition)
        beside = checked_id(request.with_queue_id, "with_queue_id") if request.with_queue_id else ""
        if beside:
            require("inspect", beside)
        self._owner.admit()
        self._check_limits(wanted)
        await self._pace.turn(caller_name())
        with self._starts.creating():
            return await self._create(request, queue_id, wanted, beside, shards)

    async def _create(
        self,
        request: queue_pb2.CreateQueueRequest,
        queue_id: str,
        wanted: QueueSettings,
        beside: str,
        shards: tuple[int, ...],
    ) -> queue_pb2.CreateQueueResponse:
        now_ms = self._owner.clock.now_ms()
        starts = await self._starts.find(request, now_ms)

        def check(_: int) -> None:
            moves = self._owner.shard.moves
            if queue_id in self._owner.shard.queues or moves.is_leaving(queue_id):
                raise AlreadyExists("queue", queue_id)
            self._drain.check_open()
            if queue_id in moves.arrivals:
                raise moving(queue_id)
            self._check_limits(wanted)
            if beside:
                self._owner.queue(beside)
            if not self._sweeper.ready_for(queue_id):
                raise Unavailable(
                    f"the last queue of the name {queue_id!r} is still being removed",
                    reason="QUEUE_BEING_REMOVED",
                )

        def create(now_ms: int) -> Queue:
            check(now_ms)
            settings = wanted.changed(created_at_ms=now_ms, updated_at_ms=now_ms)
            replay = ranges_from(starts, self._owner.shard.cursors)
            queue = self._owner.shard.create_queue(queue_id, settings, replay)
            if settings.partition is not None:
                self._owner.shard.quarantine(queue, BEING_CREATED, now_ms)
            self._owner.shard.events.created(queue, now_ms)
            return queue

        await self._owner.run(check)  # A claim that would be for nothing is not made.
        async with self._names.claimed(queue_id, shards):
            queue = await self._owner.run(create, request.ByteSize())
            replay = self._owner.shard.replays.of(queue_id)
            # Before the wait: what others change meanwhile may not be durable at the answer.
            answer = public(queue_id, queue.settings, self._shard, replay)
            await self._owner.durable()
        return queue_pb2.CreateQueueResponse(queue=answer)

    async def GetQueue(
        self, request: queue_pb2.GetQueueRequest, context: Any
    ) -> queue_pb2.GetQueueResponse:
        queue = await self._owner.find(checked_id(request.queue_id, "queue_id"))
        return queue_pb2.GetQueueResponse(queue=await self._durable(queue))

    async def ListQueues(
        self, request: queue_pb2.ListQueuesRequest, context: Any
    ) -> queue_pb2.ListQueuesResponse:
        size = checked_page_size(request.page_size)
        after = _after(request.page_token)
        departing = self._owner.shard.moves.departing(self._owner.clock.now_ms())
        following = sorted(
            queue_id
            for queue_id in self._owner.shard.queues.keys() | departing.keys()
            if queue_id > after and queue_id.startswith(request.prefix)
        )
        # Only these cost an expression of the policy each.
        ids = await inspectable(following, size + 1)
        page = ids[:size]
        answer = queue_pb2.ListQueuesResponse(
            next_page_token=_page_token(page[-1]) if len(ids) > size else ""
        )
        made = 0
        for queue_id in page:
            if made >= LISTED_PARTS:
                await asyncio.sleep(0)
                made = 0
            queue, target = self._owner.shard.queues.get(queue_id), None
            if queue is None and queue_id in departing:
                queue, target = departing[queue_id]
            if queue is not None:  # Others have had turns: it may be deleted.
                one = self._with_counts(queue)
                if target is not None:
                    one.moving_to_broker_shard = target
                made += QUEUE_PARTS + len(one.counts.by_priority) + len(one.replay.ranges)
                answer.queues.append(one)
        await self._owner.durable()
        return answer

    async def UpdateQueue(
        self, request: queue_pb2.UpdateQueueRequest, context: Any
    ) -> queue_pb2.UpdateQueueResponse:
        queue_id = checked_id(request.queue.queue_id, "queue.queue_id")
        paths = list(request.update_mask.paths)
        if not paths:
            raise InvalidArgument("update_mask", "must name at least one setting")
        for index, path in enumerate(paths):
            if path not in SETTINGS:
                known = ", ".join(SETTINGS)
                raise InvalidArgument(
                    f"update_mask.paths[{index}]",
                    f"unknown setting {path!r} (expected one of {known})",
                )
        changes = await self._changes(request.queue, paths)
        await _require_addressees(queue_id, changes)
        if not changes.keys().isdisjoint({"filter", "priority"}):
            changes["owner"] = caller_name()
        self._owner.admit()
        queue = await self._owner.find(queue_id)
        self._check_limits(changed(queue.settings, changes), queue.settings)
        await self._pace.turn(caller_name())

        def update(now_ms: int) -> Queue:
            current = self._current(queue_id, request.queue.etag)
            before = current.settings
            settings = changed(before, changes).changed(updated_at_ms=now_ms)
            self._check_limits(settings, before)
            is_other = (settings.filter, settings.priority) != (before.filter, before.priority)
            # Others than the creator do not know whether all partitions exist.
            if is_other and before.quarantine not in ("", BEING_CREATED):
                self._owner.shard.lift_quarantine(current, settings)
            else:
                self._owner.shard.update_queue(current, settings)
            current.touch()
            self._owner.shard.events.updated(current, now_ms)
            return current

        queue = await self._owner.run(update, request.ByteSize())
        return queue_pb2.UpdateQueueResponse(queue=await self._durable(queue))

    async def DeleteQueue(
        self, request: queue_pb2.DeleteQueueRequest, context: Any
    ) -> queue_pb2.DeleteQueueResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        await self._pace.turn(caller_name())

        def delete(now_ms: int) -> Queue:
            queue = self._current(queue_id, request.etag)
            self._owner.shard.delete_queue(queue)
            self._owner.shard.events.deleted(queue, now_ms)
            return queue

        queue = await self._owner.run(delete)
        self._delivery.refuse_waiters(queue, NotFound("queue", queue.queue_id))
        self._sweeper.deleted(queue_id)
        await self._owner.durable()
        await self._names.free(queue_id)
        return queue_pb2.DeleteQueueResponse()

    async def PauseQueue(
        self, request: queue_pb2.PauseQueueRequest, context: Any
    ) -> queue_pb2.PauseQueueResponse:
        queue = await self._set_paused(request.queue_id, paused=True)
        self._delivery.refuse_waiters(queue, paused(queue))
        return queue_pb2.PauseQueueResponse(queue=await self._durable(queue))

    async def ResumeQueue(
        self, request: queue_pb2.ResumeQueueRequest, context: Any
    ) -> queue_pb2.ResumeQueueResponse:
        queue = await self._set_paused(request.queue_id, paused=False)
        return queue_pb2.ResumeQueueResponse(queue=await self._durable(queue))

    async def _set_paused(self, asked_id: str, *, paused: bool) -> Queue:
        queue_id = checked_id(asked_id, "queue_id")

        def change(now_ms: int) -> Queue:
            queue = self._owner.queue(queue_id)
            if queue.settings.paused != paused:
                settings = queue.settings.changed(paused=paused, updated_at_ms=now_ms)
                self._owner.shard.update_queue(queue, settings)
                self._owner.shard.events.paused(queue, now_ms)
            return queue

        return await self._owner.run(change)

    async def LiftQuarantine(
        self, request: queue_pb2.LiftQuarantineRequest, context: Any
    ) -> queue_pb2.LiftQuarantineResponse:
        queue_id = checked_id(request.queue_id, "queue_id")

        def lift(now_ms: int) -> Queue:
            queue = self._owner.queue(queue_id)
            if queue.settings.quarantine == BEING_CREATED and not request.all_created:
                raise FailedPrecondition(
                    "BEING_CREATED",
                    f"the partitions of queue {queue_id!r} are being created: repeat a creation "
                    "that broke off",
                    subject=queue_id,
                )
            if queue.settings.quarantine:
                settings = queue.settings.changed(updated_at_ms=now_ms)
                self._owner.shard.lift_quarantine(queue, settings)
            return queue

        queue = await self._owner.run(lift)
        return queue_pb2.LiftQuarantineResponse(queue=await self._durable(queue))

    async def PurgeQueue(
        self, request: queue_pb2.PurgeQueueRequest, context: Any
    ) -> queue_pb2.PurgeQueueResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        kinds = purges_of(request.states)

        def purge(now_ms: int) -> int:
            queue = self._owner.staying(queue_id)
            if Purge.AVAILABLE in kinds and not queue.can_purge_available:
                raise Unavailable(
                    f"rows of an earlier purge of queue {queue_id!r} are still being deleted",
                    reason="QUEUE_BEING_REMOVED",
                )
            self._owner.shard.events.collect((queue,))
            count = self._owner.shard.purge(queue, kinds)
            self._owner.shard.events.purged(queue, kinds, count, now_ms)
            return count

        count = await self._owner.run(purge)
        self._sweeper.purged(queue_id)
        await self._owner.durable()
        return queue_pb2.PurgeQueueResponse(purged_count=count)

    async def LocateQueue(
        self, request: queue_pb2.LocateQueueRequest, context: Any
    ) -> queue_pb2.LocateQueueResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        require_some(SEEING, queue_id)
        shards = await self._locations.of(queue_id, fresh=request.fresh)
        if not shards:
            raise NotFound("queue", queue_id)
        return queue_pb2.LocateQueueResponse(broker_shards=shards)

    async def GetShardLoad(
        self, request: queue_pb2.GetShardLoadRequest, context: Any
    ) -> queue_pb2.GetShardLoadResponse:
        return queue_pb2.GetShardLoadResponse(
            broker_shard=self._shard, load=self._load.load(), draining=self._drain.is_draining
        )

    async def WatchQueues(
        self, request: queue_pb2.WatchQueuesRequest, context: Any
    ) -> AsyncIterator[queue_pb2.WatchQueuesResponse]:
        durable = self._owner.durable_revision
        after = within("after_revision", request.after_revision, 0, durable)
        wake = asyncio.Event()
        with self._watches.place(caller_quota()):
            self._watchers[wake] = None
            try:
                first = True
                while True:
                    wake.clear()
                    until = self._owner.durable_revision
                    if first or until > after:
                        # Also behind a caller who was too slow with what came before.
                        self._owner.durable_configs.check_remembered(after, "after_revision")
                        for page in self._pages(after):
                            yield page
                        first, after = False, until
                    if self.draining:
                        raise Unavailable("the broker is stopping", reason="DRAINING")
                    await wake.wait()
            finally:
                self._watchers.pop(wake, None)

    def _pages(self, after: int) -> Iterator[queue_pb2.WatchQueuesResponse]:
        """What changed after a revision and the caller may see, in answers that can be sent."""
        until, owner = self._owner.durable_revision, self._owner
        changes = [
            change
            for change in owner.durable_configs.after(after)
            if may("inspect", change.queue_id)
        ]
        left = len(changes)
        for page in pages_of(changes, owner.durable_replays, self._shard):
            left -= len(page)
            yield queue_pb2.WatchQueuesResponse(changes=page, revision=until, more=left > 0)

    def drain(self) -> None:
        self.draining = True
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for wake in self._watchers:
            wake.set()

    async def _changes(self, queue: queue_pb2.Queue, names: Iterable[str]) -> dict[str, Any]:
        if queue.HasField("filter"):
            return await asyncio.to_thread(changes_of, queue, names, self._max_delay_ms)
        return changes_of(queue, names, self._max_delay_ms)

    def _check_limits(self, settings: QueueSettings, before: QueueSettings | None = None) -> None:
        """Raises ResourceExhausted where a queue with these settings exceeds the caller's limits.

        Who was the last to set the filter or the priority owns the queue. So no caller can get more
        by queues that others create, nor by filters that they set.
        """
        owner = caller_name()
        if settings.owner != owner:
            return  # The caller changes other settings of a queue that is not its own.
        is_own = before is not None and before.owner == owner
        cost = before.cost if before is not None and is_own else 0
        count, sum_ = self._owner.shard.owned.totals(owner)
        hold_to("filter_cost", settings.cost, cost)
        hold_to("filter_cost_sum", sum_ + settings.cost - cost, sum_)
        hold_to("queues", count if is_own else count + 1, count)

    def _current(self, queue_id: str, etag: str) -> Queue:
        queue = self._owner.queue(queue_id)
        now = etag_of(queue.settings)
        if etag and etag != now:
            raise Aborted(f"queue {queue_id!r} was changed since", etag=now)
        return queue

    async def _durable(self, queue: Queue) -> queue_pb2.Queue:
        """The queue as it is now, once that is durable."""
        # Before the wait: what others change meanwhile may not be durable at the answer.
        answer = self._with_counts(queue)
        await self._owner.durable()
        return answer

    def _with_counts(self, queue: Queue) -> queue_pb2.Queue:
        replay = self._owner.shard.replays.of(queue.queue_id)
        return with_counts(queue, self._shard, self._owner.clock.now_ms(), replay)


async def _require_addressees(queue_id: str, changes: Mapping[str, Any]) -> None:
    """Raise PermissionDenied for a filter by which the caller would read other queues' messages."""
    source = changes.get("filter")
    if source is None or current_caller.get() is None:
        return
    checked = await asyncio.to_thread(check, source)
    addressees = values_of(checked.equalities, "queue")
    for other in [ALL_QUEUES] if addressees is None else sorted(addressees):
        if other != queue_id and not may("inspect", other):
            whose = f"queue {other!r}" if other else "other queues"
            raise PermissionDenied(
                f"queue.filter may take messages of {whose}, which no rule permits to inspect: "
                f'let it begin with headers.queue == "{queue_id}" &&',
                metadata={"verb": "inspect", "queue": other},
            )


def _page_token(last_id: str) -> str:
    data = last_id.encode()
    return base64.urlsafe_b64encode(_digest(data) + data).decode()


def _digest(data: bytes) -> bytes:
    # Not a secret: it detects tokens that were mistyped or cut short.
    return hashlib.blake2s(data, digest_size=6, person=b"ListPage").digest()


def _after(token: str) -> str:
    if not token:
        return ""
    try:
        data = base64.b64decode(token, altchars=b"-_", validate=True)
        last_id = data[6:]
        if data[:6] != _digest(last_id) or _page_token(last_id.decode()) != token:
            raise ValueError("not a page token of this service")
        return last_id.decode()
    except ValueError:
        raise bad_page_token() from None


@dataclass(eq=False)
class QueueNameServicer(queue_name_pb2_grpc.QueueNameServiceServicer):
    """Answers other brokers: whether this shard needs a queue's name."""

    _names: UniqueNames

    async def GetNameUse(
        self, request: queue_name_pb2.GetNameUseRequest, context: Any
    ) -> queue_name_pb2.GetNameUseResponse:
        return await self._names.use(checked_id(request.queue_id, "queue_id"))
