"""Lists of commands that take effect together: all of them, in order, in one commit, or none.

    look at everything ──► what is cold: Needs ──► change everything
      │ refused: an error that names the command, and nothing has changed

Pure, like the queue machine: no I/O, no clock, no asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.storage.records.queues import AvailableMessage, FailedAttempt
from libs.storage.records.states import LeaseOutcome
from services.broker.core.commands import Needs
from services.broker.core.leases.lease_bucket import Lease
from services.broker.core.lists.attempts import attempts_at
from services.broker.core.queue import Queue
from services.broker.core.shard import Shard
from services.broker.core.waiting.scan import AttemptsKey
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, SlateMQError

FAILED_BY_COMMAND = "fail: "
"""How the outcome of an attempt begins that a fail command ended; its reason follows."""


@dataclass(frozen=True, slots=True)
class Complete:
    """The message is done."""

    token: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The message is failed, whatever attempts are left."""

    token: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """The message is available again, and its attempt is not counted."""

    token: int
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class Extend:
    """The lease runs for so long from now; 0 = as long as the claim's."""

    token: int
    lease_ms: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """The message gets a new entry in another queue, and is done here."""

    token: int
    target: str
    priority: int | None = None
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class Push:
    """A new message for a queue: `value` is its outbox row."""

    queue_id: str
    value: bytes


Command = Complete | Fail | Release | Extend | Transfer | Push


@dataclass(frozen=True, slots=True)
class Execution:
    """A list of commands, and what is known about it beforehand.

    Attributes:
        request_id: Makes repeating safe; empty = none.
        fingerprint: Tells other commands from the same.
        ingest_shard: Where pushes go.
        elsewhere: Queues that are known to be on other shards.
    """

    commands: Sequence[Command]
    request_id: str = ""
    fingerprint: bytes = b""
    ingest_shard: int = 0
    elsewhere: frozenset[str] = frozenset()


def execute(
    shard: Shard, execution: Execution, now_ms: int, came_ms: int | None = None
) -> list[int]:
    """Applies the commands; gives for each the end of the lease that it extends, else 0.

    Delays count from `came_ms`, when the commands came; None: now. A repeat changes nothing, and
    gives where the extended leases end now (0: they have ended). May raise Needs. Raises
    InvalidArgument, NotFound, FailedPrecondition and ResourceExhausted, with the place of the
    command in the metadata, when nothing has changed.
    """
    ends = repeated(shard, execution)
    if ends is not None:
        return ends
    leases = check(shard, execution)
    since_ms = now_ms if came_ms is None else came_ms
    _check_needs(shard, execution.commands, leases)
    ends = [
        _apply(shard, execution, command, lease, now_ms, since_ms)
        for command, lease in zip(execution.commands, leases, strict=True)
    ]
    if execution.request_id:
        shard.executed.add(execution.request_id, execution.fingerprint)
    return ends


def repeated(shard: Shard, execution: Execution) -> list[int] | None:
    """What a repeat gives; None when these commands did not take effect yet.

    Raises InvalidArgument when others took effect under the same request ID.
    """
    known = shard.executed.fingerprint(execution.request_id) if execution.request_id else None
    if known is None:
        return None
    if known != execution.fingerprint:
        raise InvalidArgument(
            "request_id", "was used before with other commands", reason="REQUEST_ID_REUSED"
        )
    return [_end_now(shard, command) for command in execution.commands]


# --- Before anything changes ------------------------------------------------


def check(shard: Shard, execution: Execution) -> list[Lease | None]:
    """The lease of each command (none for a push); raises what `execute` does, but for Needs."""
    leases: list[Lease | None] = []
    used: set[int] = set()
    for index, command in enumerate(execution.commands):
        try:
            if isinstance(command, Push):
                _check_push(shard, execution, command)
                leases.append(None)
                continue
            if command.token in used:
                raise InvalidArgument(
                    f"commands[{index}].{type(command).__name__.lower()}.lease_token",
                    "stands in another command, too",
                    reason="LEASE_USED_TWICE",
                )
            used.add(command.token)
            leases.append(_running(shard, command.token))
            if isinstance(command, Transfer):
                _check_target(shard, execution, command)
        except SlateMQError as error:
            error.metadata.setdefault("command", str(index))
            raise
    pushes = [command.value for command in execution.commands if isinstance(command, Push)]
    if pushes:
        shard.outbox.check_room(len(pushes), sum(map(len, pushes)))
    if execution.request_id:
        shard.executed.check_room()
    return leases


def _running(shard: Shard, token: int) -> Lease:
    lease = shard.running(token)
    if lease is not None:
        return lease
    if shard.finished.outcome(token) is None:
        raise NotFound(
            "lease",
            "",
            "no such lease: never given out, or its message is gone",
            reason="LEASE_UNKNOWN",
        )
    raise FailedPrecondition(
        "LEASE_ENDED",
        "the lease ran out or was finished otherwise; another consumer may have the message",
        subject="lease",
    )


def _check_push(shard: Shard, execution: Execution, command: Push) -> None:
    if command.queue_id not in shard.queues and command.queue_id not in execution.elsewhere:
        raise NotFound("queue", command.queue_id)


def _check_target(shard: Shard, execution: Execution, command: Transfer) -> None:
    if command.target in shard.queues:
        return
    if command.target in execution.elsewhere:
        raise FailedPrecondition(
            "OTHER_SHARD",
            f"queue {command.target!r} is on another shard: push a new message to it, or create "
            "queues that work together with one another",
            subject="queue",
        )
    raise NotFound("queue", command.target)


def _check_needs(
    shard: Shard,
    commands: Sequence[Command],
    leases: Sequence[Lease | None],
) -> None:
    """Raises Needs for everything that `_apply` must find in memory."""
    attempts: list[AttemptsKey] = []
    for command, lease in zip(commands, leases, strict=True):
        if isinstance(command, Fail) and lease:
            key = attempts_at(lease.queue, lease.message_id)
            if key not in shard.attempts:
                attempts.append(key)
        elif isinstance(command, Transfer) and lease:
            ids = (lease.message_id,)
            attempts += shard.attempts.needed(ids, lease.queue, shard.queues[command.target])
    if attempts:
        raise Needs((), attempts)


# --- Changes ----------------------------------------------------------------


def _apply(
    shard: Shard,
    execution: Execution,
    command: Command,
    lease: Lease | None,
    now_ms: int,
    since_ms: int,
) -> int:
    if isinstance(command, Push):
        shard.outbox.push(execution.ingest_shard, command.value, now_ms)
        return 0
    assert lease is not None, "every command but a push has one"
    queue = lease.queue
    if isinstance(command, Extend):
        [(_, deadline_ms)] = shard.extend([command.token], command.lease_ms, now_ms)
        return deadline_ms
    if isinstance(command, Complete):
        shard.end(lease, LeaseOutcome.ACKED)
        queue.ack([lease], now_ms)
    elif isinstance(command, Transfer):
        shard.end(lease, LeaseOutcome.ACKED)
        queue.ack([lease], now_ms, transferred_to=command.target)
        target = shard.queues[command.target]
        shard.attempts.carry(lease.message_id, queue, target)
        target.come(_new_entry(target, command, lease, since_ms), now_ms)
    elif isinstance(command, Release):
        shard.end(lease, LeaseOutcome.NACKED)
        lease.attempts -= 1
        queue.give_back(lease, _visible_at(command, since_ms), now_ms)
    else:
        shard.end(lease, LeaseOutcome.NACKED)
        outcome = f"{FAILED_BY_COMMAND}{command.reason}"
        queue.fail(lease, outcome, now_ms)
        attempt = FailedAttempt(lease.consumer, lease.claimed_at_ms, outcome)
        shard.attempts.add(attempts_at(queue, lease.message_id), attempt)
    return 0


def _new_entry(target: Queue, command: Transfer, lease: Lease, since_ms: int) -> AvailableMessage:
    """The entry that a transfer makes."""
    priority = target.settings.fallback_priority if command.priority is None else command.priority
    visible_at_ms = _visible_at(command, since_ms)
    return AvailableMessage(
        lease.message_id, priority, visible_at_ms, lease.retention_deadline_ms, 0
    )


def _visible_at(command: Release | Transfer, since_ms: int) -> int:
    """From when on a message waits for nothing but a claim; 0: at once."""
    return since_ms + command.delay_ms if command.delay_ms else 0


def _end_now(shard: Shard, command: Command) -> int:
    lease = shard.running(command.token) if isinstance(command, Extend) else None
    return lease.deadline_ms if lease else 0
