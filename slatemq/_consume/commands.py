"""Commands that take effect together: what `Client.execute` takes, and how it is sent.

All leases of one execution are of one broker shard; queues that are worked on together are created
with one another (`create_queue(…, with_queue=…)`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from uuid import uuid4

from slatemq._checks import check_text, iterable, moved, wrong
from slatemq._consume.handles import shard_of
from slatemq._requests import message_of
from slatemq._rpc.peers import errors_translated
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.models import (
    Duration,
    Payload,
    Time,
    bounded_delay_ms,
    cut_reason,
    milliseconds,
    outgoing,
    sealed,
    sealer_of,
)
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc

if TYPE_CHECKING:
    from slatemq.encryption import DataKey, KeyRing

COMMANDS_MAX = 1000
"""Commands that the server takes in one execution."""


class Leased(Protocol):
    """A message under a lease, such as a Received."""

    @property
    def lease_token(self) -> str:
        """Proves the claim."""


@dataclass(frozen=True, slots=True)
class Complete:
    """The message was processed: it moves to done."""

    lease: str | Leased


@dataclass(frozen=True, slots=True)
class Fail:
    """The message becomes a dead letter, with attempts left or not."""

    lease: str | Leased
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """The message is available again after `delay`, at most 12 h; its attempt is not counted."""

    lease: str | Leased
    delay: Duration = 0


@dataclass(frozen=True, slots=True)
class Extend:
    """The lease ends at now + `length`; None: as long as at the claim."""

    lease: str | Leased
    length: Duration | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """The message moves to another queue of the same shard, without its payload being copied.

    It has attempts of its own there; here it is done. `priority` None: the target's fallback;
    `delay` None: its default.
    """

    lease: str | Leased
    queue_id: str
    priority: int | None = None
    delay: Duration | None = None


@dataclass(frozen=True, slots=True)
class Push:
    """A new message for one queue, of any shard: no filter is judged. The rest as in `publish`."""

    queue_id: str
    payload: Payload
    headers: Mapping[str, str] | None = None
    retention: Duration | None = None
    delay: Duration | None = None
    visible_at: Time | None = None


Command = Complete | Fail | Release | Extend | Transfer | Push
"""One command of an execution."""


class CommandResult(NamedTuple):
    """The result of a command: of an Extend the lease's new end, in ms since the Unix epoch."""

    lease_deadline_ms: int = 0


@runtime_checkable
class HasCommands(Protocol):
    """An object that stands for commands, such as a QueueCommand."""

    def commands(self) -> Sequence[Command]:
        """The commands that it stands for."""


class CommandContext:
    """Gathers commands for one `Client.execute`; used up by one that succeeds.

    It has a request ID of its own: executing it again after Unavailable does nothing twice, for
    10 minutes.
    """

    def __init__(self) -> None:
        self.request_id = str(uuid4())
        self.executed = False
        self._commands: list[Command] = []

    def add(self, *commands: Command | HasCommands) -> None:
        """Adds commands. Raises FailedPrecondition (CONTEXT_EXECUTED)."""
        self.check()
        self._commands += flat(commands)

    def check(self) -> None:
        """Raises FailedPrecondition (CONTEXT_EXECUTED) when this was executed."""
        if self.executed:
            raise FailedPrecondition("CONTEXT_EXECUTED", "these commands have taken effect already")

    def __len__(self) -> int:
        return len(self._commands)

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands)


def flat(commands: Iterable[Command | HasCommands]) -> list[Command]:
    """The commands themselves, and those that others stand for."""
    # All are looked at before any is used up.
    given = list(iterable("commands", "commands", commands))
    for place, one in enumerate(given):
        if not isinstance(one, Command | HasCommands):
            raise wrong(f"commands[{place}]", "a command, such as Complete or Push", one)
    items: list[Command] = []
    for one in given:
        if isinstance(one, HasCommands):
            items += one.commands()
        else:
            items.append(one)
    return items


def token_of(lease: str | Leased) -> str:
    """The token of a lease. Raises InvalidArgument for another value."""
    token = lease if isinstance(lease, str) else getattr(lease, "lease_token", None)
    if not isinstance(token, str):
        raise wrong("lease", "a claimed message or its lease token", lease)
    check_text("lease", token)
    return token


async def execute(
    locations: QueueLocations,
    commands: Sequence[Command],
    request_id: str = "",
    encryption: KeyRing | None = None,
) -> list[CommandResult]:
    """All of them or none, on the broker of their leases; repeated under one request ID."""
    if not 1 <= len(commands) <= COMMANDS_MAX:
        raise InvalidArgument("commands", f"must be 1 to {COMMANDS_MAX:,}, not {len(commands):,}")
    pushed = (one.payload for one in commands if isinstance(one, Push))
    sealer = sealer_of(encryption, request_id, pushed)
    request = message_of(
        consumer_pb2.ExecuteRequest,
        request_id=request_id or str(uuid4()),
        commands=[_wire(place, command, sealer) for place, command in enumerate(commands)],
    )
    on = shard_of_all(commands, "commands")
    first = commands[0]

    async def attempt(timeout: float) -> list[CommandResult]:
        nonlocal on  # A repeat goes where they may have run, also if the queue has moved.
        if on is None and isinstance(first, Push):
            on = await locations.shard_of(first.queue_id)
        assert on is not None, "what has no lease is a push"
        stub: Any = consumer_pb2_grpc.ConsumerServiceStub(await locations.peers.broker(on))
        with errors_translated(locations.peers.process("broker", on)):
            response = await stub.Execute(request, timeout=timeout)
        return [CommandResult(result.lease_deadline_ms) for result in response.results]

    return await locations.peers.call(attempt)


def shard_of_all(commands: Sequence[Command], field: str) -> int | None:
    """The broker shard of their leases; None: all are pushes. Raises FailedPrecondition.

    Errors are about `field`.
    """
    chosen: int | None = None
    for place, command in enumerate(commands):
        if isinstance(command, Push):
            continue
        try:
            shard = shard_of(token_of(command.lease))
        except InvalidArgument as error:
            raise moved(error, f"{field}[{place}].lease") from None
        if chosen is not None and shard != chosen:
            raise FailedPrecondition(
                "OTHER_SHARD",
                f"{field}[{place}] has a queue of broker shard {shard}, an earlier one a queue of "
                f"shard {chosen}: create such queues with one another; messages of several "
                "partitions take several executions",
                metadata={"command": str(place)},
            )
        chosen = shard
    return chosen


def _wire(place: int, command: Command, sealer: KeyRing | DataKey | None) -> consumer_pb2.Command:
    try:
        return _wire_of(command, sealer)
    except InvalidArgument as error:
        raise moved(error, f"commands[{place}].{error.field}") from None


def _wire_of(command: Command, sealer: KeyRing | DataKey | None) -> consumer_pb2.Command:
    if isinstance(command, Push):
        return consumer_pb2.Command(push=_push(command, sealer))
    token = token_of(command.lease)
    if isinstance(command, Complete):
        return consumer_pb2.Command(complete=consumer_pb2.CompleteCommand(lease_token=token))
    if isinstance(command, Fail):
        fail = consumer_pb2.FailCommand(lease_token=token, reason=cut_reason(command.reason))
        return consumer_pb2.Command(fail=fail)
    if isinstance(command, Extend):
        lease_ms = 0 if command.length is None else milliseconds(command.length, "length")
        extend = message_of(consumer_pb2.ExtendCommand, lease_token=token, lease_ms=lease_ms)
        return consumer_pb2.Command(extend=extend)
    if isinstance(command, Release):
        delay_ms = bounded_delay_ms(command.delay)
        release = consumer_pb2.ReleaseCommand(lease_token=token, delay_ms=delay_ms)
        return consumer_pb2.Command(release=release)
    check_text("queue_id", command.queue_id)
    transfer = message_of(
        consumer_pb2.TransferCommand,
        lease_token=token,
        target_queue_id=command.queue_id,
        priority=command.priority,
        delay_ms=None if command.delay is None else bounded_delay_ms(command.delay),
    )
    return consumer_pb2.Command(transfer=transfer)


def _push(command: Push, sealer: KeyRing | DataKey | None) -> consumer_pb2.PushCommand:
    plain = outgoing(
        command.payload,
        command.headers,
        retention=command.retention,
        delay=command.delay,
        visible_at=command.visible_at,
    )
    message = sealed(plain, sealer)
    return message_of(
        consumer_pb2.PushCommand,
        queue_id=command.queue_id,
        payload=message.payload,
        headers=message.headers,
        retention_s=message.retention_s,
        delay_ms=message.delay_ms,
        visible_at_ms=message.visible_at_ms,
    )
