"""Errors as exit codes, and as sentences that say what is wrong and what to do."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from slatemq._rpc.connection_faults import OTHER_NAMES, UNTRUSTED
from slatemq.cli.parameters import format_duration
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
    Unauthenticated,
    Unavailable,
    Unimplemented,
)

EXIT_DONE = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2  # also wrong input
EXIT_UNREACHABLE = 3

EXIT_SIGNALLED = 128
"""Plus the signal's number, as in shells: 130 after Ctrl-C, 141 when the reader of the output has
closed it."""

_NO_SLATEMQ = {"NOT_SLATEMQ", "TLS_MISMATCH"}
"""The reasons of errors about an endpoint where SlateMQ does not answer, or not in this way."""

_OPTIONS = {
    "delay",
    "visible_at",
    "retention",
    "created_at",
    "dedupe_key",
    "start_from",
    "endpoint",
}
"""Fields that are options, beside the settings of a queue."""

_FIELD = re.compile(
    r"(?:(?:queue|message|draft)\.|(?=(?:filter|start_from_ms|endpoint)$))(?P<name>\w+?)(?P<unit>_ms|_s)?"
)

_SETTING = re.compile(r"settings\.(?P<name>\w+)")
"""A setting of the instance, which commands name without this."""

_BOUNDS = re.compile(r"(?P<least>\d+)\.\.(?P<most>\d+)(?P<why> \([^)]*\))?, not (?P<given>\d+)")


class BadInput(Exception):
    """Input that cannot be used; the message says where and why."""


class ReaderGone(Exception):
    """The reader of our output has closed it."""


class Interrupted(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def exit_code(error: SlateMQError) -> int:
    if isinstance(error, Unavailable | DeadlineExceeded) or error.reason in _NO_SLATEMQ:
        return EXIT_UNREACHABLE
    return EXIT_REFUSED


def _where_it_may_be(error: SlateMQError) -> str:
    if any(sign in error.message for sign in (UNTRUSTED, OTHER_NAMES)):
        return "is --ca the file of its authority, and --server-name a name in its certificate?"
    return (
        "is SlateMQ running there? Name any of its services with --endpoint host:port or "
        "SLATEMQ_ENDPOINT; `make up` starts a local stack on port 7420"
    )


def advice(error: SlateMQError) -> str:
    """What the user can do now; empty when the error itself says it."""
    if error.reason == "UNREACHABLE":
        return _where_it_may_be(error)
    if error.reason == "NOT_SLATEMQ":
        return "name any service of SlateMQ with --endpoint host:port or SLATEMQ_ENDPOINT"
    if error.reason == "MESSAGE_TOO_LARGE":
        return "split it into smaller messages"
    match error:
        case NotFound(resource_type="queue"):
            return "`slatemq queue ls` lists the queues, `slatemq queue create` creates one"
        case AlreadyExists(resource_type="queue"):
            return "`slatemq queue show` shows it, `slatemq queue update` changes it"
        case FailedPrecondition(reason="CHANGE_LOSES"):
            return "--accept-loss permits it"
        case FailedPrecondition(reason="QUEUES_DELAY_LONGER"):
            return f"`slatemq queue update {error.subject} --default-delay` shortens its delay"
        case FailedPrecondition(reason="QUEUE_PAUSED"):
            return "`slatemq queue resume` ends the pause"
        case NotFound(resource_type="message", reason="ENTRY_UNKNOWN"):
            return (
                "no queue has taken it (`slatemq explain` shows which queues would), or it is no "
                "longer listed: cancelled, purged, or past its retention"
            )
        case NotFound(resource_type="message", reason="OTHER_STATE"):
            return f"`slatemq message show {error.resource_name}` shows its state in each queue"
        case FailedPrecondition(reason="HANDLE_STALE") | NotFound(reason="ENTRY_UNKNOWN"):
            return "`slatemq message ls` has fresh handles, `slatemq message show ID` searches"
        case NotFound(resource_type="run"):
            return "`slatemq janitor runs` lists the runs"
        case FailedPrecondition(reason="JOB_RUNNING"):
            return f"`slatemq janitor show {error.subject} --follow` follows it"
        case NotFound(resource_type="redrive"):
            return "`slatemq failed redrives` lists the redrives"
        case NotFound(reason="LEASE_UNKNOWN") | FailedPrecondition(reason="LEASE_ENDED"):
            return "the message is no longer yours: claim again"
        case Aborted():
            return f"it was changed meanwhile, and its etag is now {error.etag}: review, and retry"
        case Unauthenticated(reason="UNAUTHENTICATED"):
            return (
                "give a token with --token-file or SLATEMQ_TOKEN_FILE, or a client certificate "
                "with --cert and --key"
            )
        case FailedPrecondition(reason="KEY_UNKNOWN"):
            return "add it to the file of --encryption-keys (SLATEMQ_ENCRYPTION_KEYS)"
        case ResourceExhausted(reason="PRINCIPAL_LIMIT" | "PRINCIPAL_SHARE"):
            return ""  # The error says whether waiting helps, and what else does.
        case ResourceExhausted():
            return "retry in a moment, or send less in one call"
        case Unavailable(reason="NOT_CONNECTED"):
            return "start the process, or retry once it is up; `slatemq status` shows all of them"
        case Unavailable(reason="BACKEND_DOWN"):
            return "retry; `slatemq events status` shows whether the event backend answers"
        case Unavailable():
            return "retry; `slatemq status` shows which service is down"
        case DeadlineExceeded(reason="TASK_PENDING"):
            return "`slatemq task pending` shows the error of its last attempt"
        case DeadlineExceeded():
            return "if it was to change something, it may have done so: check before you repeat it"
        case Unimplemented():
            return "the process at this address is another version, or not part of SlateMQ"
        case DataLoss(reason="NOT_DECRYPTED"):
            return "compare the key of this ID with the one that its sender has"
        case DataLoss():
            return "stored bytes are damaged: see the log of the service"
        case Internal():
            return "this is a bug in SlateMQ: please report it"
    return ""


def sentence(error: SlateMQError) -> str:
    result = _in_options(error) if isinstance(error, InvalidArgument) else error.message
    what = result or error.reason
    hint = advice(error)
    return f"{what}\n  {hint}" if hint else what


def _in_options(error: InvalidArgument) -> str:
    """The error in terms of the option, with units, or of the setting, where its field is one."""
    if (setting := _SETTING.fullmatch(error.field)) is not None:
        return f"{setting['name']}: {error.description}"
    settings = import_module("slatemq.cli.queue_options").SETTINGS  # most commands need none
    found = _FIELD.fullmatch(error.field)
    if found is None or found["name"] not in {*_OPTIONS, *(one.keyword for one in settings)}:
        return error.message
    option = "--" + found["name"].replace("_", "-")
    rule = error.description
    if found["unit"]:
        scale = 1 if found["unit"] == "_ms" else 1000

        def lengths(bounds: re.Match[str]) -> str:
            least, most, given = (
                format_duration(int(bounds[name]) * scale) for name in ("least", "most", "given")
            )
            return f"{least} to {most}{bounds['why'] or ''}, not {given}"

        rule = _BOUNDS.sub(lengths, rule)
    return f"{option}: {rule}"


def error_fields(error: SlateMQError) -> dict[str, Any]:
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
