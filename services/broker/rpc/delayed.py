"""DelayedService: delayed messages, watched and edited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
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

FindWaiting = Callable[[str], Awaitable[tuple[Handle, Find]]]
"""What a handle says, and a command that finds its entry where it waits."""


class DelayedServicer(entry_pb2_grpc.DelayedServiceServicer):
    """Turns requests into edits and watches."""

    def __init__(
        self, editor: MessageEditor, watches: DelayedWatches, find_waiting: FindWaiting
    ) -> None:
        self._editor = editor
        self._watches = watches
        self._find_waiting = find_waiting

    async def EditMessage(  # noqa: N802 - the RPC's name
        self, request: entry_pb2.EditMessageRequest, context: Any
    ) -> entry_pb2.EditMessageResponse:
        wanted = replacement(request)
        handle, find = await self._find_waiting(request.handle)
        wanted.message_id, wanted.queue_id = handle.message_id, handle.queue_id
        return entry_pb2.EditMessageResponse(etag=await self._editor.edit(wanted, find))

    async def ForgetMessage(  # noqa: N802 - the RPC's name
        self, request: entry_pb2.ForgetMessageRequest, context: Any
    ) -> entry_pb2.ForgetMessageResponse:
        if not 1 <= request.message_id <= MAX_MESSAGE_ID:
            raise InvalidArgument("message_id", "must be a message ID")
        await self._editor.forget(request.message_id)
        return entry_pb2.ForgetMessageResponse()

    async def WatchDelayed(  # noqa: N802 - the RPC's name
        self, request: entry_pb2.WatchDelayedRequest, context: Any
    ) -> AsyncIterator[entry_pb2.WatchDelayedResponse]:
        queue_id, view = checked_id(request.queue_id, "queue_id"), checked_view(request.view)
        async with aclosing(self._watches.watch(queue_id, request.position, view)) as answers:
            async for answer in answers:
                # As bytes alone: until they are read, they are in memory.
                encoding = answer.SerializeToString()
                del answer
                yield encoded(entry_pb2.WatchDelayedResponse, encoding)
                del encoding
