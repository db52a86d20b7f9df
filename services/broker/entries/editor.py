"""Edits a delayed message: while ingest replaces its content, it is not claimed here.

Brokers cache messages that are about to be delivered, and queues of other brokers may have the same
message. So all of them forget it before the edit is answered, and those to which it is not assigned
yet, once it is: a copy of what it was may be on its way with the assignment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from libs.serving.peers.calls import PeerFailed, peer_failures
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.errors import StorageError
from libs.storage.layout.ids import shard_of
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.message_cache import Ingests, Payloads
from services.broker.shard.owner import ShardOwner
from slatemq.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from slatemq.v1.entry_pb2 import EditMessageRequest, ForgetMessageRequest
from slatemq.v1.entry_pb2_grpc import DelayedServiceStub
from slatemq.v1.ingest_pb2 import ReplaceMessageRequest

if TYPE_CHECKING:
    from libs.access.callers import Caller

WRONG_STATE: Final = "WRONG_STATE"

RUNNING_BYTES_MAX: Final = 128 << 20
"""Bytes of the edits that run, unless one alone has more; they go on without their callers."""

INVALIDATE_DEADLINE_S: Final = 5.0
"""A broker that has not answered by then counts as down."""

JUDGED_MAX: Final = 10
"""How often an edit is judged whose message gets other headers meanwhile, each time."""

LOOK_S: Final = 0.02
LOOKS: Final = 200
"""How often a broker looks whether a message is assigned, to forget it; routers hold back less."""

Find = Callable[[int], int]
"""A command that finds an available or delayed entry, given the time: when it is visible (0 = at
once). Raises the errors of the handle, and Needs."""


def replacement(request: EditMessageRequest) -> ReplaceMessageRequest:
    """The request to ingest, without message and queue; InvalidArgument where nothing changes."""
    keeps_payload = not request.HasField("payload")
    if keeps_payload and not request.replace_headers:
        raise InvalidArgument("payload", "give a payload, or headers with replace_headers")
    if request.headers and not request.replace_headers:
        raise InvalidArgument("headers", "are given without replace_headers")
    return ReplaceMessageRequest(
        etag=request.etag,
        payload=request.payload,
        headers=request.headers,
        keep_payload=keeps_payload,
        keep_headers=not request.replace_headers,
    )


@dataclass(eq=False)
class MessageEditor:
    _owner: ShardOwner
    _delivery: Dispatcher
    _payloads: Payloads
    _ingests: Ingests
    _others: Invalidator
    _running: dict[asyncio.Task[str], int] = field(default_factory=dict, init=False)

    async def edit(self, wanted: ReplaceMessageRequest, find: Find, caller: Caller | None) -> str:
        """Replaces the message of an entry that is delayed; returns its new etag.

        `caller` is None where everything is permitted. Raises what `find` does, FailedPrecondition
        (WRONG_STATE) where it is not delayed, PermissionDenied where the caller may not edit it in
        all queues, what ingest refuses, ResourceExhausted, and Unavailable.
        """
        size_bytes = wanted.ByteSize()
        if self._running and sum(self._running.values()) + size_bytes > RUNNING_BYTES_MAX:
            raise ResourceExhausted("too much is being edited", reason="TOO_MANY_EDITS")
        task = asyncio.create_task(self._edit(wanted, find, caller))
        self._running[task] = size_bytes
        task.add_done_callback(self._ended)
        # A caller that gives up ends nothing: ingest may still replace the message.
        return await asyncio.shield(task)

    async def _edit(self, wanted: ReplaceMessageRequest, find: Find, caller: Caller | None) -> str:
        def check(now_ms: int) -> None:
            if find(now_ms) <= now_ms:
                raise FailedPrecondition(
                    WRONG_STATE,
                    f"message {wanted.message_id} is not delayed",
                    subject=str(wanted.message_id),
                )

        # First kept back, then looked at, so that it cannot be claimed in between.
        with self._delivery.keeping_back(wanted.queue_id, wanted.message_id):
            await self._owner.run(check)
            try:
                etag = await self._replace(wanted, caller)
            finally:
                self._payloads.forget(wanted.message_id)
        # A queue that has moved here may have it before it is assigned.
        await self.forget(wanted.message_id)
        await self._others.invalidate(wanted.message_id)
        return etag

    async def _replace(self, wanted: ReplaceMessageRequest, caller: Caller | None) -> str:
        """Replaces the message, if it has the headers yet by which that is permitted."""
        judged_count = 0
        while True:
            if caller is not None:
                stored = await self._ingests.metadata(wanted.message_id)
                caller.require_edit(stored.headers, stored.direct_queue_id)
                wanted.headers_etag = stored.headers_etag
                judged_count += 1
            try:
                return await self._ingests.replace(wanted)
            except Aborted as error:
                is_outdated = wanted.headers_etag and wanted.etag in ("", error.etag)
                if not is_outdated or judged_count >= JUDGED_MAX:
                    raise

    async def forget(self, message_id: int) -> None:
        """Drops what is cached of a message that was edited, perhaps by another broker.

        Waits until all up to it is assigned here: from then on no copy of it is taken that comes
        with an assignment. Raises Unavailable where that takes long. A shard without queues, which
        may read a log of days, takes none from now on. Nor is it read any more from a process that
        no longer owns its shard, and may not know that yet.
        """
        try:
            await self._ingests.find_again()
        except StorageError as error:
            raise Unavailable(
                f"message {message_id} is replaced, and may be delivered as it was, retry: {error}",
                reason="BROKER_DOWN",
            ) from error
        self._payloads.forget(message_id)
        if self._owner.shard.queues:
            await self._assigned(message_id)
        else:  # One may come before the message is assigned.
            self._payloads.take_no_copy_until(message_id)
        self._payloads.forget(message_id)
        self._delivery.look_again()
        await self._owner.durable()  # responses that hold the former content are sent after this

    async def _assigned(self, message_id: int) -> None:
        """Waits until all up to a message is assigned."""
        owner, log = self._owner, shard_of(message_id)
        for _ in range(LOOKS):
            if owner.durable_cursors.get(log, 0) >= message_id:
                return
            await asyncio.sleep(LOOK_S)
        raise Unavailable(
            f"message {message_id} is not assigned yet, so what it was may be delivered: retry",
            reason="BROKER_DOWN",
        )

    def _ended(self, task: asyncio.Task[str]) -> None:
        del self._running[task]
        if not task.cancelled():
            task.exception()  # its caller may have gone


@dataclass(eq=False)
class Invalidator:
    """Has the other brokers drop what they cached of a message that was replaced."""

    _channels: Channels
    _directory: TopologyDirectory
    _shard: int

    async def invalidate(self, message_id: int) -> None:
        """Calls every other broker; raises Unavailable where one does not answer."""
        try:
            # The latest topology: a broker that started since may have cached the message.
            brokers = (await self._directory.read_now()).brokers
        except StorageError as error:
            raise Unavailable(f"the topology cannot be read: {error}") from error
        others = [shard for shard in brokers if shard != self._shard]
        await asyncio.gather(*(self._invalidate_at(shard, message_id) for shard in others))

    async def _invalidate_at(self, shard: int, message_id: int) -> None:
        request = ForgetMessageRequest(message_id=message_id)
        try:
            with peer_failures():
                stub = DelayedServiceStub(await self._channels.to("broker", shard))
                await stub.ForgetMessage(request, timeout=INVALIDATE_DEADLINE_S)
        except PeerFailed as failed:
            raise Unavailable(
                f"message {message_id} is replaced, but broker {shard} may deliver what it was, "
                f"retry: {failed}",
                reason="BROKER_DOWN",
            ) from failed
