"""Executing commands together, and changes of a queue of items that wait to be executed so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable
from uuid import uuid4

from slatemq._checks import check_kind, check_text, iterable
from slatemq._commands.message_refs import (
    Execute,
    MessageRefs,
    MessageStore,
    MessageToken,
    MessageView,
)
from slatemq._commands.ref_set import used
from slatemq._consume import consumer as consuming
from slatemq._consume.commands import (
    COMMANDS_MAX,
    Command,
    CommandContext,
    CommandResult,
    Complete,
    Extend,
    HasCommands,
    Push,
    Transfer,
    execute,
    flat,
    shard_of_all,
    token_of,
)
from slatemq._consume.delivered import LeaseKeeper, Origin
from slatemq._rpc.queue_locations import Calls, QueueLocations
from slatemq.codecs import Codec
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.models import Duration, Time, seconds

if TYPE_CHECKING:
    from slatemq.encryption import KeyRing

T = TypeVar("T")


class TransferToken(Generic[T]):
    """Items that are complete, released to go elsewhere; good for one use.

    Nothing was sent yet: push it into another queue, add it to a context, or commit it alone. A
    token that is never executed leaves its leases to end.
    """

    def __init__(self, lease_tokens: Sequence[str], execute: Execute) -> None:
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
        check_kind("context", context, CommandContext)
        context.add(self)


class QueueCommands(Generic[T]):
    """Changes of a queue that wait to be executed together; see Client.queue_commands."""

    def __init__(self, queue_id: str, codec: Codec[T], execute: Execute) -> None:
        self.queue_id = queue_id
        self._codec = codec
        self._execute = execute

    def complete(self, tokens: Sequence[MessageToken[T]]) -> TransferToken[T]:
        """One released token for at most 1,000 items of the queue; sends nothing.

        They must be of one broker shard. Raises FailedPrecondition (TOKEN_USED,
        LEASE_ENDED, OTHER_SHARD) and InvalidArgument; then none is used.
        """
        if not iterable("tokens", "MessageTokens", tokens):
            raise InvalidArgument("tokens", "must be at least one")
        if len(tokens) > COMMANDS_MAX:
            raise InvalidArgument("tokens", f"must be 1 to {COMMANDS_MAX:,}, not {len(tokens):,}")
        for place, token in enumerate(tokens):
            check_kind(f"tokens[{place}]", token, MessageToken)
            if token.queue_id != self.queue_id:
                raise InvalidArgument(f"tokens[{place}]", f"belongs to queue {token.queue_id!r}")
            token.check()
        if len({token.lease_token for token in tokens}) < len(tokens):
            raise used("a token that stands there twice")
        shard_of_all([Complete(token.lease_token) for token in tokens], "tokens")
        for token in tokens:
            token.settled()
        return TransferToken([token.lease_token for token in tokens], self._execute)

    def push(
        self, token: TransferToken[T], *, priority: int | None = None, delay: Duration | None = None
    ) -> QueueCommand:
        """Moves the items of a released token into this queue, without copying them.

        None: the queue's fallback priority and default delay. The queue must be on the shard of
        theirs (OTHER_SHARD). Raises FailedPrecondition (TOKEN_USED).
        """
        check_kind("token", token, TransferToken)
        return QueueCommand(
            [Transfer(lease, self.queue_id, priority, delay) for lease in token.take()]
        )

    def push_item(
        self,
        item: T,
        headers: Mapping[str, str] | None = None,
        *,
        retention: Duration | None = None,
        delay: Duration | None = None,
        visible_at: Time | None = None,
    ) -> QueueCommand:
        """Puts a new item into this queue, on any shard. Raises what its codec raises."""
        payload = self._codec.encode(item)
        return QueueCommand([Push(self.queue_id, payload, headers, retention, delay, visible_at)])


TRY_S = 2.0
"""The time for which a view tries to take an item while the broker does not answer."""


@runtime_checkable
class Settleable(Protocol):
    """A message or token that can be finished once."""

    @property
    def finished(self) -> bool: ...

    def settled(self) -> None: ...


class CommandCalls(Calls):
    """Execute, and the calls that make views; a part of the client."""

    def __init__(
        self, locations: QueueLocations, keeper: LeaseKeeper, encryption: KeyRing | None = None
    ) -> None:
        super().__init__(locations, encryption)
        self._keeper = keeper

    async def execute(
        self,
        commands: Iterable[Command | HasCommands] | CommandContext,
        *,
        request_id: str = "",
    ) -> list[CommandResult]:
        """Executes all of these commands or none, in order, durably; one result for each.

        As in::

            await client.execute([Complete(message), Push("mail", b"..."), Fail(other, "why")])

        All leases must be of queues of one broker shard. The call is repeated while processes are
        down, under one request ID, which may be your own: for 10 minutes a repeat does nothing.
        Raises FailedPrecondition (LEASE_ENDED, OTHER_SHARD, MESSAGE_FINISHED, TOKEN_USED,
        CONTEXT_EXECUTED), NotFound, InvalidArgument, ResourceExhausted, Unavailable; where the
        server refused a command, `metadata["command"]` says which, from 0.
        """
        check_text("request_id", request_id)
        if isinstance(commands, CommandContext):
            commands.check()
            request_id = request_id or commands.request_id
        each = flat(commands)
        finishing = [one.lease for one in each if not isinstance(one, Push | Extend)]
        for lease in finishing:
            if isinstance(lease, Settleable) and lease.finished:
                raise FailedPrecondition(
                    "MESSAGE_FINISHED", "this message was acked or given back already"
                )
        results = await execute(self._locations, each, request_id, self._encryption)
        if isinstance(commands, CommandContext):
            commands.executed = True
        self._keeper.drop_all([token_of(lease) for lease in finishing])
        for lease in finishing:
            if isinstance(lease, Settleable):
                lease.settled()
        return results

    async def _execute(self, commands: Sequence[Command], request_id: str) -> list[CommandResult]:
        return await self.execute(commands, request_id=request_id)

    def queue_view(
        self,
        queue_id: str,
        codec: Codec[T],
        *,
        lease: Duration | None = None,
        consumer_id: str = "",
        hold: Duration = consuming.HOLD_S,
        timeout: Duration = TRY_S,
    ) -> MessageView[T]:
        """A queue as items that are taken one by one, without waiting.

        `view.try_next()` returns a token or None, `view.refs` turns tokens into leases on items,
        which are kept alive for at most `hold` while they are open. `timeout` limits how long
        `try_next` tries while the broker does not answer, in place of `call_timeout`.
        """
        check_text("queue_id", queue_id)
        _check_codec(codec)
        refs = MessageRefs(
            queue_id,
            codec,
            self._keeper,
            seconds(hold, "hold"),
            self._execute,
        )
        store = MessageStore(
            refs,
            self._locations,
            Origin(queue_id, self._keeper.finisher, encryption=self._encryption),
            timeout,
            lease=lease,
            consumer_id=consumer_id,
        )
        return MessageView(store, refs)

    def queue_commands(self, queue_id: str, codec: Codec[T]) -> QueueCommands[T]:
        """Changes of a queue that take effect together, in one `execute`."""
        check_text("queue_id", queue_id)
        _check_codec(codec)
        return QueueCommands(queue_id, codec, self._execute)


def _check_codec(codec: object) -> None:
    check_kind("codec", codec, Codec, "a codec, such as codecs.JSON")
