"""A queue of messages as a store of items: tokens for items, and leases on them.

As in::

    batches = client.queue_view("batches", codecs.JSON)
    blocks = client.queue_commands("blocks", codecs.JSON)
    token = await batches.try_next()
    async with batches.refs.lease(token) as lease:
        verify(lease.item)
    verified = client.queue_commands("batches", codecs.JSON).complete([token])
    context = CommandContext()
    blocks.push(verified).execute(context)
    await client.execute(context)

The names are those of Splinter's abstract queue.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Generic, TypeVar, cast

from slatemq._admin.queue_calls import QueueCalls
from slatemq._checks import check_kind, wrong
from slatemq._commands.ref_set import ItemLease, QueueView, RefSet, RefToken, Slot, used
from slatemq._consume.batches import claim_request
from slatemq._consume.commands import Command, CommandResult, Extend
from slatemq._consume.delivered import Lease, LeaseKeeper, Origin, Received, seconds_from_claim
from slatemq._consume.gathering import claim_from_all
from slatemq._consume.handles import shard_of
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.codecs import Codec
from slatemq.errors import FailedPrecondition
from slatemq.models import Duration, milliseconds, seconds

T = TypeVar("T")
Execute = Callable[[Sequence[Command], str], Awaitable[list[CommandResult]]]


class ClaimedItem(Slot[T]):
    """A message that was claimed, whose payload is decoded when it is wanted."""

    def __init__(self, message: Received, codec: Codec[T]) -> None:
        super().__init__(message.message_id, lambda: codec.decode(message.payload))
        self.message = message
        self.claimed_at_s = time.monotonic()
        self.ends_at_s = self.claimed_at_s + message.lease_ms / 1000
        self.kept: Lease | None = None
        self.used = False

    @property
    def ended(self) -> bool:
        """Whether its lease has ended, as far as this process knows."""
        if self.kept is not None:
            return self.kept.lost
        return time.monotonic() >= self.ends_at_s

    def extended(self, deadline_ms: int) -> None:
        """Its lease ends then, by the broker's clock."""
        self.ends_at_s = self.claimed_at_s + seconds_from_claim(self.message, deadline_ms)
        if self.kept is not None:
            self.kept.extended(self.ends_at_s)


class MessageToken(RefToken[T]):
    """A reference to a claimed message of a queue; good for one use, until its lease ends.

    By itself it does not keep the message: a token that is not used leaves its lease to end, and
    the item comes again.
    """

    __slots__ = ("_claimed", "queue_id")

    def __init__(self, refs: MessageRefs[T], claimed: ClaimedItem[T]) -> None:
        super().__init__(refs, claimed)
        self.queue_id = refs.queue_id
        self._claimed = claimed

    @property
    def message_id(self) -> int:
        """The item's message."""
        return self._claimed.message.message_id

    @property
    def lease_token(self) -> str:
        """Proves the claim."""
        return self._claimed.message.lease_token

    @property
    def shard(self) -> int:
        """The broker shard of its claim; items of one shard can be completed together."""
        return shard_of(self.lease_token)

    @property
    def attempts_count(self) -> int:
        """How often the item was claimed from this queue, this time included."""
        return self._claimed.message.attempts_count

    @property
    def ended(self) -> bool:
        """Whether its lease has ended, as far as this process knows."""
        return self._claimed.ended

    def check(self) -> None:
        """Raises FailedPrecondition: TOKEN_USED, or LEASE_ENDED (others may have the item)."""
        super().check()
        if self._claimed.used:
            raise used(f"another token of message {self.message_id}")
        if self.ended:
            raise FailedPrecondition(
                "LEASE_ENDED", f"the lease of message {self.message_id} ran out"
            )

    def settled(self) -> None:
        """A command that had the token took effect; so it has for all tokens of the message."""
        self._claimed.used = True
        super().settled()

    def __repr__(self) -> str:
        return f"<MessageToken {self.message_id} of {self.queue_id!r}>"


class MessageLease(ItemLease[T]):
    """A lease on an item, kept alive while this is open, for at most `hold`.

    Its `item` raises what the codec raises.
    """

    def __init__(self, token: MessageToken[T], keeper: LeaseKeeper, hold_s: float) -> None:
        super().__init__(token._slot)
        self.token = token
        self._claimed = token._claimed
        self._keeper = keeper
        self._hold_s = hold_s

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of its message."""
        return dict(self._claimed.message.headers)

    @property
    def lost(self) -> bool:
        """Whether the lease was lost: another consumer may have the item."""
        return self._claimed.ended

    def begin(self) -> None:
        """Begins to keep it. Raises FailedPrecondition (TOKEN_USED, LEASE_ENDED, LEASE_OPEN)."""
        self.token.check()
        if self._claimed.kept is not None:
            raise FailedPrecondition("LEASE_OPEN", "there is an open lease on this item")
        kept = self._keeper.hold(
            self.token.lease_token, self._claimed.message.lease_ms, self._hold_s
        )
        kept.buffered = False
        self._claimed.kept = kept

    def end(self) -> None:
        """Leaves the lease to end, unless its token is used before."""
        kept, self._claimed.kept = self._claimed.kept, None
        if kept is not None:
            self._keeper.drop(kept.token)
            self._claimed.ends_at_s = 0.0 if kept.lost else kept.ends_at_s


class MessageRefs(RefSet[T]):
    """The messages that a view has claimed, by their IDs: items with leases."""

    def __init__(
        self,
        queue_id: str,
        codec: Codec[T],
        keeper: LeaseKeeper,
        hold_s: float,
        execute: Execute,
    ) -> None:
        super().__init__()
        self.queue_id = queue_id
        self._codec = codec
        self._keeper = keeper
        self._hold_s = hold_s
        self._execute = execute

    def add_claimed(self, message: Received) -> int:
        """Puts a claimed message in, in place of an earlier claim of it; returns its ID."""
        self._slots[message.message_id] = ClaimedItem(message, self._codec)
        return message.message_id

    def upgrade(self, item_id: Hashable) -> MessageToken[T] | None:
        """One more reference to a claimed message; None when it is not in the set any more."""
        check_kind("item_id", item_id, Hashable, "hashable")
        item = self._slots.get(item_id)
        return MessageToken(self, item) if isinstance(item, ClaimedItem) else None

    def lease(self, token: RefToken[T]) -> MessageLease[T]:
        """A lease on the token's item, a context manager.

        Raises FailedPrecondition: TOKEN_USED, LEASE_ENDED.
        """
        return MessageLease(_checked(token), self._keeper, self._hold_s)

    async def extend(self, token: RefToken[T], length: Duration | None = None) -> int:
        """Sets the end of a token's lease to now + `length` (None: as at the claim); in ms.

        Raises FailedPrecondition: TOKEN_USED, LEASE_ENDED.
        """
        checked = _checked(token)
        if length is not None:
            milliseconds(length, "length")
        kept = checked._claimed.kept
        async with nullcontext() if kept is None else kept.extending():
            (result,) = await self._execute([Extend(checked.lease_token, length)], "")
            checked._claimed.extended(result.lease_deadline_ms)
        return result.lease_deadline_ms


class MessageStore(Generic[T]):
    """A queue on a server: what is popped is claimed, and put into the set."""

    def __init__(
        self,
        refs: MessageRefs[T],
        locations: QueueLocations,
        origin: Origin,
        timeout: Duration,
        *,
        lease: Duration | None,
        consumer_id: str,
    ) -> None:
        self.queue_id = refs.queue_id
        self._refs = refs
        self._locations = locations
        self._origin = origin
        self._timeout_s = seconds(timeout, "timeout")
        self._request = claim_request(self.queue_id, 1, lease=lease, consumer_id=consumer_id)

    async def len(self) -> int:
        """How many messages can be claimed now. Raises NotFound, Unavailable."""
        return (await QueueCalls(self._locations).get_queue(self.queue_id)).counts.available_count

    async def pop(self) -> int | None:
        """Claims the next message; None when there is none, or the queue is paused.

        Raises NotFound; Unavailable or DeadlineExceeded after the view's `timeout`, and at once
        where all messages left wait for an ingest that is down.
        """
        try:
            messages = await claim_from_all(
                self._locations, self._request, self._origin, self._timeout_s
            )
        except FailedPrecondition as error:
            if error.reason != "QUEUE_PAUSED":
                raise
            return None
        return self._refs.add_claimed(messages[0]) if messages else None


class MessageView(QueueView[T]):
    """The items of a queue on a server; see Client.queue_view."""

    refs: MessageRefs[T]

    def __init__(self, store: MessageStore[T], refs: MessageRefs[T]) -> None:
        super().__init__(store, refs)
        self.queue_id = refs.queue_id

    async def try_next(self) -> MessageToken[T] | None:
        """The token of the next item; None when there is none, or the queue is paused.

        Does not wait for one, and for a broker that is down only as long as the view's `timeout`:
        then raises Unavailable or DeadlineExceeded. Raises NotFound when there is no such queue.
        """
        return cast("MessageToken[T] | None", await super().try_next())


def _checked(token: RefToken[T]) -> MessageToken[T]:
    if not isinstance(token, MessageToken):
        raise wrong("token", "a MessageToken", token)
    token.check()
    return token
