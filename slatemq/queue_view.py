"""A queue as a store of items: tokens for items, leases on them, and what becomes of them together.

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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Generic, TypeVar
from uuid import uuid4

from slatemq.admin import Admin
from slatemq.batches import claim, claim_request
from slatemq.checks import iterable, wrong
from slatemq.claimed import Claimed, Headers
from slatemq.codecs import Codec
from slatemq.commands import (
    Command,
    CommandContext,
    CommandResult,
    Complete,
    Extend,
    Push,
    Transfer,
)
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.keeping import Lease, LeaseKeeper, seconds_from_claim
from slatemq.models import Span, Time
from slatemq.peers import Peers

T = TypeVar("T")
Execute = Callable[[Sequence[Command], str], Awaitable[list[CommandResult]]]


class RefToken(Generic[T]):
    """Stands for one claimed item of a queue; good for one use, until its lease ends.

    By itself it does not keep the item: a token that is not used leaves its lease to end, and the
    item comes again.
    """

    __slots__ = ("_claimed_at_s", "_ends_at_s", "_kept", "_payload", "_run", "_used", "queue_id")

    def __init__(self, queue_id: str, claimed: Claimed) -> None:
        """Made by the view, of the one message that was claimed."""
        self.queue_id = queue_id
        (self._run,), _, (self._payload,) = claimed
        self._claimed_at_s = time.monotonic()
        self._ends_at_s = self._claimed_at_s + self._run.lease_ms / 1000
        self._kept: Lease | None = None
        self._used = False

    @property
    def message_id(self) -> int:
        """The item's message."""
        return self._run.message_ids[0]

    @property
    def lease_token(self) -> str:
        """Proves the claim."""
        return self._run.prefix + self._run.ends[0]

    @property
    def attempts_count(self) -> int:
        """How often the item was claimed from this queue, this time included."""
        return self._run.attempts_count

    @property
    def finished(self) -> bool:
        """Whether it was used."""
        return self._used

    @property
    def ended(self) -> bool:
        """Whether its lease has ended, as far as this process knows."""
        if self._kept is not None:
            return self._kept.lost
        return time.monotonic() >= self._ends_at_s

    def extended(self, deadline_ms: int) -> None:
        """Its lease ends then, by the broker's clock."""
        self._ends_at_s = self._claimed_at_s + seconds_from_claim(self._run, deadline_ms)
        if self._kept is not None:
            self._kept.extended(self._ends_at_s)

    def check(self) -> None:
        """Raises FailedPrecondition: TOKEN_USED, or LEASE_ENDED (others may have the item)."""
        if self._used:
            raise used(f"the token of message {self.message_id}")
        if self.ended:
            raise FailedPrecondition(
                "LEASE_ENDED", f"the lease of message {self.message_id} ran out"
            )

    def settled(self) -> None:
        """A command that had the token took effect."""
        self._used = True

    def __repr__(self) -> str:
        return f"<RefToken {self.message_id} of {self.queue_id!r}>"


class ItemLease(Generic[T]):
    """A lease on an item, kept alive while this is open, for at most `hold`."""

    def __init__(
        self, token: RefToken[T], codec: Codec[T], keeper: LeaseKeeper, hold_s: float
    ) -> None:
        """Made by the RefSet."""
        self.token = token
        self._codec = codec
        self._keeper = keeper
        self._hold_s = hold_s

    @property
    def item(self) -> T:
        """The item. Raises what its codec raises."""
        return self._codec.decode(self.token._payload)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of its message."""
        return Headers(self.token._run.common.headers)

    @property
    def lost(self) -> bool:
        """Whether the lease could not be kept: somebody else may have the item."""
        return self.token.ended

    async def __aenter__(self) -> ItemLease[T]:
        self.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def begin(self) -> None:
        """Begins to keep it. Raises FailedPrecondition (TOKEN_USED, LEASE_ENDED, LEASE_OPEN)."""
        token = self.token
        token.check()
        if token._kept is not None:
            raise FailedPrecondition("LEASE_OPEN", "there is an open lease on this item")
        kept = self._keeper.hold(token.lease_token, token._run.lease_ms, self._hold_s)
        kept.buffered = False
        token._kept = kept

    def end(self) -> None:
        """Leaves the lease to end, unless its token is used before."""
        kept, self.token._kept = self.token._kept, None
        if kept is not None:
            self._keeper.drop(kept.token)
            self.token._ends_at_s = 0.0 if kept.lost else kept.ends_at_s


class RefSet(Generic[T]):
    """Turns tokens into leases on items."""

    def __init__(
        self, codec: Codec[T], keeper: LeaseKeeper, hold_s: float, execute: Execute
    ) -> None:
        """Made by the view."""
        self._codec = codec
        self._keeper = keeper
        self._hold_s = hold_s
        self._execute = execute

    def lease(self, token: RefToken[T]) -> ItemLease[T]:
        """A lease on the token's item, a context manager.

        Raises FailedPrecondition: TOKEN_USED, LEASE_ENDED.
        """
        _check_is(RefToken, token)
        token.check()
        return ItemLease(token, self._codec, self._keeper, self._hold_s)

    async def extend(self, token: RefToken[T], length: Span | None = None) -> int:
        """Sets the end of a token's lease to now + `length` (None: as at the claim); in ms.

        Raises FailedPrecondition: TOKEN_USED, LEASE_ENDED.
        """
        _check_is(RefToken, token)
        token.check()
        (result,) = await self._execute([Extend(token.lease_token, length)], "")
        token.extended(result.lease_deadline_ms)
        return result.lease_deadline_ms


class QueueView(Generic[T]):
    """The items of a queue, one by one, without waiting; see Client.queue_view."""

    def __init__(
        self,
        queue_id: str,
        peers: Peers,
        admin: Admin,
        refs: RefSet[T],
        lease: Span | None,
        consumer_id: str,
    ) -> None:
        """Made by the client."""
        self.queue_id = queue_id
        self.refs = refs
        self._peers = peers
        self._admin = admin
        self._request = claim_request(queue_id, 1, lease=lease, consumer_id=consumer_id)

    async def len(self) -> int:
        """How many items can be claimed now. Raises NotFound."""
        return (await self._admin.get_queue(self.queue_id)).counts.available_count

    async def try_next(self) -> RefToken[T] | None:
        """The token of the next item; None when there is none, or the queue is paused.

        Raises NotFound when there is no such queue.
        """
        try:
            claimed = await claim(self._peers, self._request, self._peers.call_s)
        except FailedPrecondition as error:
            if error.reason != "QUEUE_PAUSED":
                raise
            return None
        return RefToken(self.queue_id, claimed) if claimed.payloads else None


class TransferToken(Generic[T]):
    """Items that are complete, released to go elsewhere; good for one use.

    Nothing was sent yet: push it into another queue, add it to a context, or commit it alone. A
    token that is never executed leaves its leases to end.
    """

    def __init__(self, lease_tokens: Sequence[str], execute: Execute) -> None:
        """Made by QueueCommands.complete."""
        self._lease_tokens = tuple(lease_tokens)
        self._execute = execute
        self._request_id = str(uuid4())
        self._used = False

    @property
    def released(self) -> bool:
        """Whether it can still be used."""
        return not self._used

    def __len__(self) -> int:
        return len(self._lease_tokens)

    def take(self) -> tuple[str, ...]:
        """The leases, which are the caller's now. Raises FailedPrecondition (TOKEN_USED)."""
        if self._used:
            raise used("this transfer token")
        self._used = True
        return self._lease_tokens

    def commands(self) -> Sequence[Command]:
        """Uses it up for commands that complete the items."""
        return [Complete(token) for token in self.take()]

    async def commit(self) -> None:
        """Completes the items alone, all or none; returns when that is durable.

        Raises FailedPrecondition (TOKEN_USED, LEASE_ENDED), Unavailable: then it may be repeated.
        """
        commands = self.commands()
        try:
            await self._execute(commands, self._request_id)
        except BaseException:
            self._used = False
            raise


class QueueCommand:
    """Commands that wait to be executed together with others; good for one context."""

    def __init__(self, commands: Sequence[Command]) -> None:
        """Made by QueueCommands."""
        self._commands = tuple(commands)
        self._used = False

    def commands(self) -> Sequence[Command]:
        """Uses it up. Raises FailedPrecondition (TOKEN_USED)."""
        if self._used:
            raise used("this command")
        self._used = True
        return self._commands

    def execute(self, context: CommandContext) -> None:
        """Adds it to what `Client.execute(context)` does. Raises FailedPrecondition."""
        context.add(self)


class QueueCommands(Generic[T]):
    """Changes of a queue that wait to be executed together; see Client.queue_commands."""

    def __init__(self, queue_id: str, codec: Codec[T], execute: Execute) -> None:
        """Made by the client."""
        self.queue_id = queue_id
        self._codec = codec
        self._execute = execute

    def complete(self, tokens: Sequence[RefToken[T]]) -> TransferToken[T]:
        """One released token for these items of the queue; sends nothing.

        Raises FailedPrecondition (TOKEN_USED, LEASE_ENDED) and InvalidArgument; then none is used.
        """
        if not iterable("tokens", "RefTokens", tokens):
            raise InvalidArgument("tokens", "must be at least one")
        for place, token in enumerate(tokens):
            _check_is(RefToken, token, f"tokens[{place}]")
            if token.queue_id != self.queue_id:
                raise InvalidArgument(f"tokens[{place}]", f"is of the queue {token.queue_id!r}")
            token.check()
        if len({token.lease_token for token in tokens}) < len(tokens):
            raise used("a token that stands there twice")
        for token in tokens:
            token.settled()
        return TransferToken([token.lease_token for token in tokens], self._execute)

    def push(
        self, token: TransferToken[T], *, priority: int | None = None, delay: Span = 0
    ) -> QueueCommand:
        """Moves the items of a released token into this queue, without copying them.

        The queue must be on the shard of theirs (OTHER_SHARD). Raises FailedPrecondition
        (TOKEN_USED).
        """
        _check_is(TransferToken, token)
        return QueueCommand(
            [Transfer(lease, self.queue_id, priority, delay) for lease in token.take()]
        )

    def push_item(
        self,
        item: T,
        headers: Mapping[str, str] | None = None,
        *,
        retention: Span | None = None,
        delay: Span | None = None,
        visible_at: Time | None = None,
    ) -> QueueCommand:
        """Puts a new item into this queue, on any shard. Raises what its codec raises."""
        payload = self._codec.encode(item)
        return QueueCommand([Push(self.queue_id, payload, headers, retention, delay, visible_at)])


def _check_is(kind: type, token: object, field: str = "token") -> None:
    if not isinstance(token, kind):
        raise wrong(field, f"a {kind.__name__}", token)


def used(what: str) -> FailedPrecondition:
    """The error of whoever uses a token twice."""
    return FailedPrecondition("TOKEN_USED", f"{what} was used already")
