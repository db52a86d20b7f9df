"""The synchronous faces of queues as stores of items, and of the watch of delayed messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from slatemq import client as asynchronous
from slatemq._admin import watching
from slatemq._admin.entry_models import Entry
from slatemq._commands import message_refs, queue_commands
from slatemq._commands.command_calls import TRY_S
from slatemq._commands.message_refs import MessageToken
from slatemq._commands.queue_commands import QueueCommand
from slatemq._consume import consumer as consuming
from slatemq._consume.commands import Command
from slatemq._rpc.blocking import Face, Loop, StreamFace, maker_of, method_of
from slatemq.codecs import Codec
from slatemq.models import Duration, Time

T = TypeVar("T")


class ItemLease(Face[message_refs.MessageLease[T]], Generic[T]):
    """A lease on an item, as a context manager; see slatemq.MessageLease."""

    @property
    def item(self) -> T:
        """The item. Raises what its codec raises."""
        return self._inner.item

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of its message."""
        return self._inner.headers

    @property
    def lost(self) -> bool:
        """Whether the lease was lost: another consumer may have the item."""
        return self._inner.lost

    def __enter__(self) -> ItemLease[T]:
        self._loop.run(self._inner.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._inner.end()

        self._loop.run(end)


class RefSet(Face[message_refs.MessageRefs[T]], Generic[T]):
    """Turns tokens into leases on items; see slatemq.MessageRefs."""

    def lease(self, token: MessageToken[T]) -> ItemLease[T]:
        """A lease on the token's item; see slatemq.MessageRefs.lease."""
        return ItemLease(self._loop, self._inner.lease(token))

    def extend(self, token: MessageToken[T], length: Duration | None = None) -> int:
        """Sets the end of a token's lease; see slatemq.MessageRefs.extend."""
        return self._loop.run(lambda: self._inner.extend(token, length))


class QueueView(Face[message_refs.MessageView[T]], Generic[T]):
    """The items of a queue, one by one, without waiting; see slatemq.MessageView."""

    def __init__(self, loop: Loop, inner: message_refs.MessageView[T]) -> None:
        super().__init__(loop, inner)
        self.refs = RefSet(loop, inner.refs)

    @property
    def queue_id(self) -> str:
        """The queue."""
        return self._inner.queue_id

    def __len__(self) -> int:
        """How many items can be claimed now."""
        return self._loop.run(self._inner.len)

    def __bool__(self) -> bool:
        return True  # A view of an empty queue is still a view, and asking costs a call.

    def try_next(self) -> MessageToken[T] | None:
        """The token of the next item, or None; see slatemq.MessageView.try_next."""
        return self._loop.run(self._inner.try_next)


class TransferToken(Face[queue_commands.TransferToken[T]], Generic[T]):
    """Items that are complete, released to go elsewhere; see slatemq.TransferToken."""

    @property
    def released(self) -> bool:
        """Whether it can still be used."""
        return self._inner.released

    def __len__(self) -> int:
        return len(self._inner)

    def commands(self) -> Sequence[Command]:
        """Uses it up for commands that complete the items."""
        return self._inner.commands()

    def commit(self) -> None:
        """Completes the items alone; see slatemq.TransferToken.commit."""
        self._loop.run(self._inner.commit)


class QueueCommands(Face[queue_commands.QueueCommands[T]], Generic[T]):
    """Changes of a queue that wait to be executed together; see slatemq.QueueCommands."""

    def complete(self, tokens: Sequence[MessageToken[T]]) -> TransferToken[T]:
        """One released token for these items; see slatemq.QueueCommands.complete."""
        return TransferToken(self._loop, self._inner.complete(tokens))

    def push(
        self, token: TransferToken[T], *, priority: int | None = None, delay: Duration = 0
    ) -> QueueCommand:
        """Moves the items of a released token into this queue; see slatemq.QueueCommands.push."""
        inner: Any = getattr(token, "_inner", token)  # Anything else is refused by name.
        return self._inner.push(inner, priority=priority, delay=delay)

    def push_item(
        self,
        item: T,
        headers: Mapping[str, str] | None = None,
        *,
        retention: Duration | None = None,
        delay: Duration | None = None,
        visible_at: Time | None = None,
    ) -> QueueCommand:
        """Puts a new item into this queue; see slatemq.QueueCommands.push_item."""
        return self._inner.push_item(
            item, headers, retention=retention, delay=delay, visible_at=visible_at
        )


class DelayedWatch(StreamFace[watching.DelayedWatch, Entry]):
    """Delayed messages as an iterator and context manager; see slatemq.DelayedWatch."""

    close = method_of(watching.DelayedWatch.close)

    @property
    def position(self) -> str:
        """Where a later watch goes on: behind the last answer that was taken in whole."""
        return self._inner.position

    def take(self) -> Entry:
        """The next one; waits for it."""
        return self._loop.run(lambda: anext(self._inner))


class ViewCalls(Face[asynchronous.Client]):
    """The calls that make these faces; a part of the synchronous client."""

    watch_delayed = maker_of(asynchronous.Client.watch_delayed, DelayedWatch)

    def queue_view(
        self,
        queue_id: str,
        codec: Codec[T],
        *,
        lease: Duration | None = None,
        consumer_id: str = "",
        hold: Duration = consuming.HOLD_S,
        timeout: Duration = TRY_S,
    ) -> QueueView[T]:
        """See slatemq.Client.queue_view."""
        inner = self._inner.queue_view(
            queue_id, codec, lease=lease, consumer_id=consumer_id, hold=hold, timeout=timeout
        )
        return QueueView(self._loop, inner)

    def queue_commands(self, queue_id: str, codec: Codec[T]) -> QueueCommands[T]:
        """See slatemq.Client.queue_commands."""
        return QueueCommands(self._loop, self._inner.queue_commands(queue_id, codec))
