"""Executing commands together, and queues as stores of items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from slatemq._checks import check_text
from slatemq._commands.message_refs import MessageRefs, MessageStore, MessageView
from slatemq._commands.queue_commands import QueueCommands
from slatemq._consume import consumer as consuming
from slatemq._consume.commands import (
    Command,
    CommandContext,
    CommandResult,
    Extend,
    HasCommands,
    Push,
    execute,
    flat,
    token_of,
)
from slatemq._consume.delivered import LeaseKeeper
from slatemq._rpc.queue_locations import Calls, QueueLocations
from slatemq.codecs import Codec
from slatemq.errors import FailedPrecondition
from slatemq.models import Duration, seconds

T = TypeVar("T")

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

    def __init__(self, locations: QueueLocations, keeper: LeaseKeeper) -> None:
        super().__init__(locations)
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
        results = await execute(self._locations, each, request_id)
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
        refs = MessageRefs(queue_id, codec, self._keeper, seconds(hold, "hold"), self._execute)
        store = MessageStore(refs, self._locations, timeout, lease=lease, consumer_id=consumer_id)
        return MessageView(store, refs)

    def queue_commands(self, queue_id: str, codec: Codec[T]) -> QueueCommands[T]:
        """Changes of a queue that take effect together, in one `execute`."""
        return QueueCommands(queue_id, codec, self._execute)
