"""Every error that a caller of SlateMQ may see.

::

    SlateMQError
    ├── InvalidArgument      the call itself is wrong: fix it
    ├── Unauthenticated      the caller is not proven: get a new token
    ├── PermissionDenied     the caller may not do that: ask an operator
    ├── NotFound             the thing named does not exist
    ├── AlreadyExists        the thing to create is there already
    ├── FailedPrecondition   right call, wrong state: look at `reason`
    ├── Aborted              it was changed since you read it: read again, then retry
    ├── ResourceExhausted    a bound was reached: wait `retry_after_ms`, then retry
    ├── Unavailable          a part is down: wait `retry_after_ms`, then retry
    ├── DeadlineExceeded     no answer in time: the call may or may not have happened
    ├── Unimplemented        this process does not serve that: call another
    ├── DataLoss             stored bytes are damaged or lost
    └── Internal             a fault of ours: report it

There is one class for each thing a caller would do differently, and no more. `reason` says exactly
what happened, in an UPPER_SNAKE word that programs may compare; `message` is for people and may
change. On the wire each kind is one gRPC code, with `reason` and `metadata` as google.rpc.ErrorInfo
(see `slatemq._rpc.rpc_status`). This module imports nothing, so that every layer may raise these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

__all__ = [
    "Aborted",
    "AlreadyExists",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "SlateMQError",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
]

DEFAULT_RETRY_AFTER_MS = 100
"""How long a caller waits before the first retry when the server has no better guess."""

INCOMPLETE = "INCOMPLETE"
"""The reason of the error that ends a listing in which brokers are missing."""

SHARDS = "broker_shards"
"""The fact of such an error that names them, with commas."""


INGEST_DOWN = "INGEST_DOWN"
"""The reason of a claim without messages where some wait for an ingest."""

PARTITION = "slatemq-partition"
"""The metadata of a call that is for one partition of a queue: `<queue ID>/<index>`."""

WRONG_SHARD = "WRONG_SHARD"
"""The reason of NotFound of a queue that another broker shard has.

InvalidArgument has it, too, about a dedupe key or a task that belongs to another ingest shard.
"""

SHARD = "broker_shard"
"""The fact of such an error that names it."""


class SlateMQError(Exception):
    """Base of all errors of SlateMQ; catch it to catch them all.

    Attributes:
        message: What happened, for people.
        reason: What happened, for programs: UPPER_SNAKE, stable between versions.
        metadata: Further facts for programs, such as the current etag.
    """

    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self, message: str, *, reason: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        """Keep the message, the reason (the kind's own if none is given) and the metadata."""
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: dict[str, str] = dict(metadata or {})


class InvalidArgument(SlateMQError):
    """The request breaks a rule, in any state. Fix the field named; a retry cannot help.

    Nothing was changed. `field` is the path in the request, e.g. `messages[3].headers`, and
    `description` the rule it broke; `message` is both.
    """

    default_reason = "INVALID_FIELD"

    def __init__(
        self,
        field: str,
        description: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Name the field and the rule; an empty field means the request as a whole."""
        message = f"{field}: {description}" if field else description
        super().__init__(message, reason=reason, metadata=metadata)
        self.field = field
        self.description = description


class Unauthenticated(SlateMQError):
    """The call does not prove who makes it: no token, or one that has expired or is not valid.

    Nothing was changed. Get a new token; a retry with the same one fails again.
    """

    default_reason = "UNAUTHENTICATED"


class PermissionDenied(SlateMQError):
    """The caller may not do that. Nothing was changed.

    `slatemq access check` says which rule is missing.
    """

    default_reason = "PERMISSION_DENIED"


class _ResourceError(SlateMQError):
    """Names one resource by type (`queue`, `message`, …) and name."""

    _phrase: ClassVar[str]

    def __init__(
        self,
        resource_type: str,
        resource_name: str,
        message: str = "",
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Name the resource; the message is made from it unless one is given."""
        super().__init__(
            message or f"{resource_type} {resource_name!r} {self._phrase}",
            reason=reason or f"{resource_type.upper()}_{self.default_reason}",
            metadata=metadata,
        )
        self.resource_type = resource_type
        self.resource_name = resource_name


class NotFound(_ResourceError):
    """The resource does not exist. Check the name, or create it. Reason: e.g. QUEUE_NOT_FOUND.

    Where the broker that was asked does not have the queue, but another one, the reason is
    WRONG_SHARD, and `broker_shard` in the metadata says which. The client then asks that one.
    """

    default_reason = "NOT_FOUND"
    _phrase = "does not exist"


class AlreadyExists(_ResourceError):
    """The resource exists. Use it, or choose another name. Reason: e.g. QUEUE_ALREADY_EXISTS."""

    default_reason = "ALREADY_EXISTS"
    _phrase = "exists already"


class FailedPrecondition(SlateMQError):
    """The call is right but the state forbids it. Change the state first; a bare retry fails again.

    `reason` says which state, e.g. LEASE_ENDED (drop the message: it is no longer yours).
    `subject` names what is in that state.
    """

    default_reason = "FAILED_PRECONDITION"

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        subject: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Say which state forbids it; the reason comes first since no call does without one."""
        super().__init__(message, reason=reason, metadata=metadata)
        self.subject = subject


class Aborted(SlateMQError):
    """It was changed since you read it. Read again, apply your change, retry.

    `etag` is the current one, where there is one to give.
    """

    default_reason = "CONFLICT"

    def __init__(
        self,
        message: str,
        *,
        etag: str = "",
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Keep the current etag (also in the metadata, which is how it crosses the wire)."""
        facts = dict(metadata or {})
        if etag:
            facts["etag"] = etag
        super().__init__(message, reason=reason, metadata=facts)
        self.etag = facts.get("etag", "")


class _RetryableError(SlateMQError):
    """Nothing was changed, and the same call may succeed after `retry_after_ms`; None: not so."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_ms: int | None = DEFAULT_RETRY_AFTER_MS,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Keep how long to wait before the next try."""
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after_ms = retry_after_ms


class ResourceExhausted(_RetryableError):
    """A bound (bytes, streams, waiting claims) was reached. Send less, or wait and retry.

    Unless the reason is a limit on the request itself (MESSAGE_TOO_LARGE): then send it in parts.
    Where `retry_after_ms` is None, waiting does not help: the message says what does.
    """

    default_reason = "LIMIT_REACHED"


class Unavailable(_RetryableError):
    """The service or one it needs is down or starting. Wait `retry_after_ms`, then retry.

    A publish that carries a request ID, an ack and a nack may always be repeated.
    """

    default_reason = "UNAVAILABLE"


class DeadlineExceeded(SlateMQError):
    """No answer before the deadline; it may still have happened. Repeat only what is idempotent."""

    default_reason = "DEADLINE_EXCEEDED"


class Unimplemented(SlateMQError):
    """The process called does not have the method. Call another one, or a newer version.

    Where another process has it, the reason is WRONG_SERVICE, and the metadata says which: the
    `service` that was called, `served_by` (such as `broker`), and `addresses`, separated by commas,
    as far as they are known.
    """

    default_reason = "UNIMPLEMENTED"


class DataLoss(SlateMQError):
    """Stored bytes are damaged or lost. Do not retry; restore, or drop what is named."""

    default_reason = "DATA_LOSS"


class Internal(SlateMQError):
    """A fault in SlateMQ itself, or an answer that this version does not know. Report it."""

    default_reason = "INTERNAL"


def incomplete(problems: Mapping[int, SlateMQError]) -> Unavailable:
    """The error of an answer that lacks these broker shards (INCOMPLETE)."""
    return brokers_silent("the answer is incomplete", problems, INCOMPLETE)


def brokers_silent(what: str, problems: Mapping[int, SlateMQError], reason: str) -> Unavailable:
    """The error about broker shards that did not answer."""
    named = ", ".join(str(shard) for shard in sorted(problems))
    shards = f"broker shard {named} does" if len(problems) == 1 else f"broker shards {named} do"
    why = problems[min(problems)].message
    return Unavailable(
        f"{what}: {shards} not answer ({why})", reason=reason, metadata={SHARDS: named}
    )
