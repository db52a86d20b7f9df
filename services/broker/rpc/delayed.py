"""The part of EntryService for those who watch and edit delayed messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from libs.serving.requests.guard import encoded
from libs.storage.layout.ids import MAX_MESSAGE_ID
from services.broker.entries.conversion import checked_view
from services.broker.entries.delayed_watch import DelayedWatches
from services.broker.entries.editor import Find, MessageEditor, replacement
from services.broker.entries.handles import Handle
from services.broker.requests.queues import checked_id
from slatemq.errors import InvalidArgument
from slatemq.v1 import entry_pb2, entry_pb2_grpc


class DelayedServicer(entry_pb2_grpc.EntryServiceServicer, ABC):
    """EditMessage, ForgetMessage and WatchDelayed."""

    _editor: MessageEditor
    _watches: DelayedWatches

    def begin_delayed(self, editor: MessageEditor, watches: DelayedWatches) -> None:
        """Take over what the start has opened; no call comes earlier."""
        self._editor = editor
        self._watches = watches

    @abstractmethod
    async def find_waiting(self, handle: str) -> tuple[Handle, Find]:
        """What a handle says, and a command that finds its entry where it waits."""

    async def EditMessage(  # noqa: N802 - the RPC's name
        self, request: entry_pb2.EditMessageRequest, context: Any
    ) -> entry_pb2.EditMessageResponse:
        """See the proto."""
        wanted = replacement(request)
        handle, find = await self.find_waiting(request.handle)
        wanted.message_id, wanted.queue_id = handle.message_id, handle.queue_id
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
        async with aclosing(self._watches.watch(queue_id, request.position, view)) as answers:
            async for answer in answers:
                # As bytes alone: until they are read, they are in memory.
                encoding = answer.SerializeToString()
                del answer
                yield encoded(entry_pb2.WatchDelayedResponse, encoding)
                del encoding
