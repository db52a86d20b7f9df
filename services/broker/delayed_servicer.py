"""The part of EntryService for those who watch and edit delayed messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from libs.storage.buckets import BucketKind, lane_order
from libs.storage.ids import MAX_MESSAGE_ID
from services.broker.delayed_watch import DelayedWatches, Watched
from services.broker.editing import Find, MessageEditor, replacement
from services.broker.entry_conversion import WITH_MESSAGE, checked_view
from services.broker.entry_handles import waiting_handle
from services.broker.queue_conversion import checked_id
from services.broker.waiting_buckets import Place
from slatemq.errors import InvalidArgument
from slatemq.v1 import entry_pb2, entry_pb2_grpc, queue_pb2
from slatemq.v1.message_pb2 import Message


class DelayedServicer(entry_pb2_grpc.EntryServiceServicer, ABC):
    """EditMessage, ForgetMessage and WatchDelayed."""

    _editor: MessageEditor
    _watches: DelayedWatches

    def begin_delayed(self, editor: MessageEditor, watches: DelayedWatches) -> None:
        """Take over what the start has opened; no call comes earlier."""
        self._editor = editor
        self._watches = watches

    @abstractmethod
    async def find_waiting(self, handle: str) -> tuple[int, Find]:
        """The message of a handle, and a command that finds its entry where it waits."""

    async def EditMessage(  # noqa: N802 - the RPC's name
        self, request: entry_pb2.EditMessageRequest, context: Any
    ) -> entry_pb2.EditMessageResponse:
        """See the proto."""
        wanted = replacement(request)
        wanted.message_id, find = await self.find_waiting(request.handle)
        return entry_pb2.EditMessageResponse(etag=await self._editor.edit(wanted, find))

    async def ForgetMessage(  # noqa: N802 - the RPC's name
        self, request: entry_pb2.ForgetMessageRequest, context: Any
    ) -> entry_pb2.ForgetMessageResponse:
        """See the proto."""
        if not 1 <= request.message_id <= MAX_MESSAGE_ID:
            raise InvalidArgument("message_id", "must be a message ID")
        await self._editor.forget(request.message_id)
        return entry_pb2.ForgetMessageResponse()

    async def WatchDelayed(  # noqa: N802 - the RPC's name
        self, request: entry_pb2.WatchDelayedRequest, context: Any
    ) -> AsyncIterator[entry_pb2.WatchDelayedResponse]:
        """See the proto."""
        queue_id, view = checked_id(request.queue_id, "queue_id"), checked_view(request.view)
        updates = self._watches.watch(
            queue_id, request.position, with_messages=view in WITH_MESSAGE
        )
        with_payload = view == entry_pb2.ENTRY_VIEW_FULL
        async with aclosing(updates):
            async for update in updates:
                yield entry_pb2.WatchDelayedResponse(
                    entries=[_entry(queue_id, one, with_payload) for one in update.messages],
                    position=update.position,
                )


def _entry(queue_id: str, watched: Watched, with_payload: bool) -> entry_pb2.Entry:
    told = watched.told
    order = lane_order(BucketKind.TIMED, told.bucket_order, told.bucket_number)
    place = Place(told.priority, BucketKind.TIMED, order)
    return entry_pb2.Entry(
        handle=waiting_handle(queue_id, told.message_id, place),
        queue_id=queue_id,
        message_id=told.message_id,
        state=queue_pb2.ENTRY_STATE_DELAYED,
        priority=told.priority,
        visible_at_ms=told.visible_at_ms,
        retention_deadline_ms=told.retention_deadline_ms,
        message=_shown(watched.message, with_payload),
        etag=watched.etag,
    )


def _shown(message: Message | None, with_payload: bool) -> Message | None:
    if message is None or with_payload:
        return message
    shown = Message()
    shown.CopyFrom(message)
    shown.ClearField("payload")
    return shown
