"""Changes of a queue of items that wait to be executed together, and tokens of completed items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar
from uuid import uuid4

from slatemq._checks import iterable, wrong
from slatemq._commands.message_refs import Execute, MessageToken
from slatemq._commands.ref_set import used
from slatemq._consume.commands import Command, CommandContext, Complete, Push, Transfer
from slatemq.codecs import Codec
from slatemq.errors import InvalidArgument
from slatemq.models import Duration, Time

__all__ = ["QueueCommand", "QueueCommands", "TransferToken"]

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
        context.add(self)


class QueueCommands(Generic[T]):
    """Changes of a queue that wait to be executed together; see Client.queue_commands."""

    def __init__(self, queue_id: str, codec: Codec[T], execute: Execute) -> None:
        self.queue_id = queue_id
        self._codec = codec
        self._execute = execute

    def complete(self, tokens: Sequence[MessageToken[T]]) -> TransferToken[T]:
        """One released token for these items of the queue; sends nothing.

        Raises FailedPrecondition (TOKEN_USED, LEASE_ENDED) and InvalidArgument; then none is used.
        """
        if not iterable("tokens", "MessageTokens", tokens):
            raise InvalidArgument("tokens", "must be at least one")
        for place, token in enumerate(tokens):
            _check_is(MessageToken, token, f"tokens[{place}]")
            if token.queue_id != self.queue_id:
                raise InvalidArgument(f"tokens[{place}]", f"is of the queue {token.queue_id!r}")
            token.check()
        if len({token.lease_token for token in tokens}) < len(tokens):
            raise used("a token that stands there twice")
        for token in tokens:
            token.settled()
        return TransferToken([token.lease_token for token in tokens], self._execute)

    def push(
        self, token: TransferToken[T], *, priority: int | None = None, delay: Duration = 0
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
        retention: Duration | None = None,
        delay: Duration | None = None,
        visible_at: Time | None = None,
    ) -> QueueCommand:
        """Puts a new item into this queue, on any shard. Raises what its codec raises."""
        payload = self._codec.encode(item)
        return QueueCommand([Push(self.queue_id, payload, headers, retention, delay, visible_at)])


def _check_is(kind: type, token: object, field: str = "token") -> None:
    if not isinstance(token, kind):
        raise wrong(field, f"a {kind.__name__}", token)
