"""Errors as exit codes, and as sentences that say what to do."""

from __future__ import annotations

from typing import Any

from slatemq.cli.wording import in_options
from slatemq.errors import (
    Aborted,
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
    Unimplemented,
)

EXIT_DONE = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2  # wrong input too
EXIT_UNREACHABLE = 3

EXIT_SIGNALLED = 128
"""Ended by a signal: 128 and its number, as shells tell it; 130 after Ctrl-C, 141 when whoever
read the output went away."""


class BadInput(Exception):
    """What was to be read is not as it must be; the message says where and why."""


class ReaderGone(Exception):
    """Whoever read our output has closed it."""


class Interrupted(Exception):
    """A signal told the command to end."""

    def __init__(self, number: int) -> None:
        """Keep the signal's number."""
        super().__init__(f"signal {number}")
        self.number = number


def exit_code(error: SlateMQError) -> int:
    """The exit code of a command that this error ended."""
    if isinstance(error, Unavailable | DeadlineExceeded):
        return EXIT_UNREACHABLE
    return EXIT_REFUSED


def advice(error: SlateMQError) -> str:
    """What the user may do now; empty when the error itself says it."""
    if error.reason == "UNREACHABLE":
        return (
            "is SlateMQ running there? Name any of its services with --endpoint host:port or "
            "SLATEMQ_ENDPOINT; `make up` starts a local stack on port 7420"
        )
    if error.reason == "NOT_SLATEMQ":
        return "name any service of SlateMQ with --endpoint host:port or SLATEMQ_ENDPOINT"
    if error.reason == "MESSAGE_TOO_LARGE":
        return "send it in smaller parts"
    match error:
        case NotFound(resource_type="queue"):
            return "`slatemq queue ls` lists the queues, `slatemq queue create` makes one"
        case AlreadyExists(resource_type="queue"):
            return "look at it with `slatemq queue show`, change it with `slatemq queue update`"
        case FailedPrecondition(reason="CHANGE_LOSES"):
            return "--accept-loss permits it"
        case FailedPrecondition(reason="QUEUES_DELAY_LONGER"):
            return f"`slatemq queue update {error.subject} --default-delay` shortens its delay"
        case FailedPrecondition(reason="QUEUE_PAUSED"):
            return "`slatemq queue resume` ends the pause"
        case NotFound(resource_type="message", reason="ENTRY_UNKNOWN"):
            return (
                "no queue has taken it (`slatemq explain` says which queues take what), or it is "
                "no longer listed: it was cancelled or purged, or its retention is over"
            )
        case NotFound(resource_type="message", reason="OTHER_STATE"):
            return f"`slatemq message show {error.resource_name}` shows where it is, if anywhere"
        case FailedPrecondition(reason="HANDLE_STALE") | NotFound(reason="ENTRY_UNKNOWN"):
            return "`slatemq message ls` has fresh handles, `slatemq message show ID` searches"
        case NotFound(resource_type="run"):
            return "`slatemq janitor runs` lists them"
        case FailedPrecondition(reason="JOB_RUNNING"):
            return f"`slatemq janitor show {error.subject} --follow` watches it"
        case NotFound(resource_type="redrive"):
            return "`slatemq failed redrives` lists them"
        case NotFound(reason="LEASE_UNKNOWN") | FailedPrecondition(reason="LEASE_ENDED"):
            return "the message is no longer yours: claim again"
        case Aborted():
            return f"somebody changed it first; its etag is now {error.etag}: look, and try again"
        case ResourceExhausted():
            return "try again in a moment, or send less at once"
        case Unavailable():
            return "try again; `slatemq status` tells which service is away"
        case DeadlineExceeded():
            return "it may have happened all the same: look before you repeat it"
        case Unimplemented():
            return "the process there is of another version, or not one of SlateMQ's"
        case DataLoss():
            return "stored bytes are damaged: look into the log of the service"
        case Internal():
            return "this is a fault of SlateMQ's: please report it"
    return ""


def sentence(error: SlateMQError) -> str:
    """The error and the advice, for people."""
    result = in_options(error) if isinstance(error, InvalidArgument) else error.message
    what = result or error.reason
    hint = advice(error)
    return f"{what}\n  {hint}" if hint else what


def error_fields(error: SlateMQError) -> dict[str, Any]:
    """The error for programs."""
    fields: dict[str, Any] = {
        "kind": type(error).__name__,
        "reason": error.reason,
        "message": error.message,
    }
    if isinstance(error, InvalidArgument):
        fields["field"] = error.field
    if error.metadata:
        fields["metadata"] = error.metadata
    if hint := advice(error):
        fields["advice"] = hint
    return fields
