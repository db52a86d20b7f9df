"""Lists of commands that take effect together: all of them, in order, in one commit, or none.

    plan every command ──► what is cold: Needs ──► apply every step
      │ refused: an error that names the command, and nothing has changed

Pure, like the queue machine: no I/O, no clock, no asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from libs.storage.records.queues import AvailableMessage, FailedAttempt
from libs.storage.records.states import LeaseOutcome
from services.broker.core.lease_table import lease_ended, lease_unknown
from services.broker.core.leases import Lease
from services.broker.core.lists.attempts import attempts_at, carried
from services.broker.core.queue import Queue
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Shard
from services.broker.core.waiting.scan import AttemptsKey
from slatemq.errors import FailedPrecondition, InvalidArgument, SlateMQError

FAILED_BY_COMMAND = "fail: "
"""The beginning of an attempt's outcome that a fail command ended; its reason follows."""


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
    """The lease runs for `lease_ms` from now; 0 = as long as the claim's."""

    token: int
    lease_ms: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """The message gets a new entry in another queue, and is done here.

    Without a priority or delay it has the target's.
    """

    token: int
    target: str
    priority: int | None = None
    delay_ms: int | None = None


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
        fingerprint: Of the commands, to recognize a repeat.
        ingest_shard: Where pushes go.
        elsewhere: Queues that are known to be on other shards.
    """

    commands: Sequence[Command]
    request_id: str = ""
    fingerprint: bytes = b""
    ingest_shard: int = 0
    elsewhere: frozenset[str] = frozenset()


class PlannedCommand(NamedTuple):
    """A command as planned.

    Attributes:
        apply: Changes the shard; returns the end of the lease that it extends, else 0.
        attempts: The attempts records that it needs.
    """

    apply: Callable[[], int]
    attempts: Sequence[AttemptsKey] = ()


def execute(
    shard: Shard, execution: Execution, now_ms: int, arrived_ms: int | None = None
) -> list[int]:
    """Applies the commands; returns for each the end of the lease that it extends, else 0.

    Delays count from `arrived_ms`, when the commands came; None: now. A repeat changes nothing, and
    returns where the extended leases end now (0: they have ended). May raise Needs. Raises
    InvalidArgument, NotFound, FailedPrecondition and ResourceExhausted, with the place of the
    command in the metadata, when nothing has changed.
    """
    ends = repeated(shard, execution)
    if ends is not None:
        return ends
    steps = plan(shard, execution, now_ms, arrived_ms)
    shard.attempts.require(key for step in steps for key in step.attempts)
    ends = [step.apply() for step in steps]
    if execution.request_id:
        shard.executed.add(execution.request_id, execution.fingerprint)
    return ends


def repeated(shard: Shard, execution: Execution) -> list[int] | None:
    """What a repeat returns; None if these commands did not take effect yet.

    Raises InvalidArgument if others took effect under the same request ID.
    """
    known = shard.executed.fingerprint(execution.request_id) if execution.request_id else None
    if known is None:
        return None
    if known != execution.fingerprint:
        raise InvalidArgument(
            "request_id", "was used before with other commands", reason="REQUEST_ID_REUSED"
        )
    return [_end_now(shard, command) for command in execution.commands]


def _end_now(shard: Shard, command: Command) -> int:
    lease = shard.leases.running(command.token) if isinstance(command, Extend) else None
    return lease.deadline_ms if lease else 0


def plan(
    shard: Shard, execution: Execution, now_ms: int, arrived_ms: int | None = None
) -> list[PlannedCommand]:
    """What each command will do; changes nothing. Raises what `execute` does, except Needs."""
    planner = _Planner(shard, execution, now_ms, now_ms if arrived_ms is None else arrived_ms)
    steps = []
    for index, command in enumerate(execution.commands):
        try:
            steps.append(planner.plan(command, index))
        except SlateMQError as error:
            error.metadata.setdefault("command", str(index))
            raise
    pushes = [command.value for command in execution.commands if isinstance(command, Push)]
    if pushes:
        shard.outbox.check_capacity(len(pushes), sum(map(len, pushes)))
    if execution.request_id:
        shard.executed.check_capacity()
    return steps


@dataclass(eq=False)
class _Planner:
    _shard: Shard
    _execution: Execution
    _now_ms: int
    _since_ms: int
    _used: set[int] = field(default_factory=set, init=False)

    def plan(self, command: Command, index: int) -> PlannedCommand:
        if isinstance(command, Push):
            elsewhere = self._execution.elsewhere
            if command.queue_id not in self._shard.queues and command.queue_id not in elsewhere:
                raise self._shard.absence(command.queue_id)
            return PlannedCommand(partial(self._push, command))
        if command.token in self._used:
            raise InvalidArgument(
                f"commands[{index}].{type(command).__name__.lower()}.lease_token",
                "is used by another command, too",
                reason="LEASE_USED_TWICE",
            )
        self._used.add(command.token)
        lease = _running(self._shard, command.token)
        match command:
            case Complete():
                return PlannedCommand(partial(self._complete, lease))
            case Release():
                return PlannedCommand(partial(self._release, command, lease))
            case Extend():
                return PlannedCommand(partial(self._extend, command))
            case Fail():
                key = attempts_at(lease.queue, lease.message_id)
                return PlannedCommand(partial(self._fail, command, lease), (key,))
            case Transfer():
                target = self._target(command, lease.queue.settings)
                keys = carried((lease.message_id,), lease.queue, target)
                return PlannedCommand(partial(self._transfer, command, lease, target), keys)

    def _target(self, command: Transfer, source: QueueSettings) -> Queue:
        target = self._shard.queues.get(command.target)
        if target is not None and target.settings.accepts(source):
            return target
        if target is not None:
            raise FailedPrecondition(
                "OTHER_PARTITION",
                f"a header decides the partition of queue {command.target!r}: push a new message "
                "to it, or give both queues the same partitions and ordering header",
                subject="queue",
            )
        if command.target in self._execution.elsewhere:
            raise FailedPrecondition(
                "OTHER_SHARD",
                f"queue {command.target!r} is on another shard: push a new message to it, or "
                "create queues that work together with one another",
                subject="queue",
            )
        raise self._shard.absence(command.target)

    def _push(self, command: Push) -> int:
        self._shard.outbox.push(self._execution.ingest_shard, command.value, self._now_ms)
        return 0

    def _complete(self, lease: Lease) -> int:
        self._shard.leases.end(lease, LeaseOutcome.ACKED)
        lease.queue.ack([lease], self._now_ms)
        return 0

    def _release(self, command: Release, lease: Lease) -> int:
        self._shard.leases.end(lease, LeaseOutcome.NACKED)
        lease.attempts -= 1
        lease.queue.requeue(lease, self._visible_at(command.delay_ms), self._now_ms)
        return 0

    def _extend(self, command: Extend) -> int:
        leases = self._shard.leases
        [(_, deadline_ms)] = leases.extend([command.token], command.lease_ms, self._now_ms)
        return deadline_ms

    def _fail(self, command: Fail, lease: Lease) -> int:
        self._shard.leases.end(lease, LeaseOutcome.NACKED)
        outcome = f"{FAILED_BY_COMMAND}{command.reason}"
        lease.queue.fail(lease, outcome, self._now_ms)
        attempt = FailedAttempt(lease.consumer, lease.claimed_at_ms, outcome)
        self._shard.attempts.add(attempts_at(lease.queue, lease.message_id), attempt)
        return 0

    def _transfer(self, command: Transfer, lease: Lease, target: Queue) -> int:
        self._shard.leases.end(lease, LeaseOutcome.ACKED)
        lease.queue.ack([lease], self._now_ms, transferred_to=command.target)
        self._shard.attempts.carry(lease.message_id, lease.queue, target)
        priority, delay_ms = command.priority, command.delay_ms
        item = AvailableMessage(
            lease.message_id,
            target.settings.fallback_priority if priority is None else priority,
            self._visible_at(target.settings.default_delay_ms if delay_ms is None else delay_ms),
            lease.retention_deadline_ms,
            0,
        )
        target.waiting.admit(item, self._now_ms)
        return 0

    def _visible_at(self, delay_ms: int) -> int:
        """From when on a message waits for nothing but a claim; 0: at once."""
        return self._since_ms + delay_ms if delay_ms else 0


def _running(shard: Shard, token: int) -> Lease:
    lease = shard.leases.running(token)
    if lease is not None:
        return lease
    unknown = shard.leases.finished.outcome(token) is None
    raise lease_unknown() if unknown else lease_ended()
