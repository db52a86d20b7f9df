"""Errors on the wire: `slatemq.errors` to google.rpc.Status and back, in one table.

==================== =================== =============================================
error                gRPC code           details, next to ErrorInfo (domain "slatemq")
==================== =================== =============================================
InvalidArgument      INVALID_ARGUMENT    BadRequest: the field and the rule
Unauthenticated      UNAUTHENTICATED
PermissionDenied     PERMISSION_DENIED
NotFound             NOT_FOUND           ResourceInfo: type and name
AlreadyExists        ALREADY_EXISTS      ResourceInfo: type and name
FailedPrecondition   FAILED_PRECONDITION PreconditionFailure: type = reason, subject
Aborted              ABORTED             ErrorInfo.metadata["etag"]
ResourceExhausted    RESOURCE_EXHAUSTED  QuotaFailure: subject = reason; any RetryInfo
Unavailable          UNAVAILABLE         RetryInfo
DeadlineExceeded     DEADLINE_EXCEEDED
Unimplemented        UNIMPLEMENTED       ErrorInfo.metadata["service", "served_by", "addresses"]
DataLoss             DATA_LOSS
Internal             INTERNAL
==================== =================== =============================================

A call that fails as a whole carries the Status in the trailer `grpc-status-details-bin`; a batch
answer carries one Status per item, made by the same two functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2
from google.rpc.status_pb2 import Status

from slatemq import errors
from slatemq._cancelling import is_cancelled
from slatemq._rpc.connection_faults import ConnectionFault, connection_fault

ERROR_DOMAIN = "slatemq"

STATUS_DETAILS_KEY = "grpc-status-details-bin"

MESSAGE_BYTES_MAX = 1024
"""A message travels up to three times in the trailers (percent-encoded as text, and twice in the
details), and a peer may refuse trailers over 8 KiB: with this cap they stay below."""

FACT_BYTES_MAX = 256
"""Cap of a field path, a subject, a name and each metadata value, for the same reason."""

_CODES: dict[type[errors.SlateMQError], code_pb2.Code] = {
    errors.InvalidArgument: code_pb2.INVALID_ARGUMENT,
    errors.Unauthenticated: code_pb2.UNAUTHENTICATED,
    errors.PermissionDenied: code_pb2.PERMISSION_DENIED,
    errors.NotFound: code_pb2.NOT_FOUND,
    errors.AlreadyExists: code_pb2.ALREADY_EXISTS,
    errors.FailedPrecondition: code_pb2.FAILED_PRECONDITION,
    errors.Aborted: code_pb2.ABORTED,
    errors.ResourceExhausted: code_pb2.RESOURCE_EXHAUSTED,
    errors.Unavailable: code_pb2.UNAVAILABLE,
    errors.DeadlineExceeded: code_pb2.DEADLINE_EXCEEDED,
    errors.Unimplemented: code_pb2.UNIMPLEMENTED,
    errors.DataLoss: code_pb2.DATA_LOSS,
    errors.Internal: code_pb2.INTERNAL,
}

_KINDS: dict[int, type[errors.SlateMQError]] = {
    **{code: kind for kind, code in _CODES.items()},
    code_pb2.CANCELLED: errors.Unavailable,
}

_OF_CONNECTIONS = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
)
"""The codes that gRPC itself gives calls whose connection failed."""

_M = TypeVar("_M", bound=Message)

_GRPC_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class _FailedCall(Protocol):
    """What synchronous and asyncio failures of grpcio have in common."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def to_status(error: errors.SlateMQError) -> Status:
    """Make the google.rpc.Status of an error: code, message, ErrorInfo, and the kind's details."""
    message = _capped(error.message, MESSAGE_BYTES_MAX)
    status = Status(code=_code(type(error)), message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    for key, value in error.metadata.items():
        info.metadata[key] = _capped(value, FACT_BYTES_MAX)
    for detail in (info, *_kind_details(error)):
        status.details.add().Pack(detail)
    return status


def from_status(status: Status) -> errors.SlateMQError:
    """Make the error of a google.rpc.Status; a code that has no kind of its own is Internal.

    Raises:
        ValueError: The status is OK.
    """
    if status.code == code_pb2.OK:
        raise ValueError("an OK status is not an error")
    return _Reader(status).error()


def grpc_code(status: Status) -> grpc.StatusCode:
    return _GRPC_CODES.get(status.code, grpc.StatusCode.UNKNOWN)


def from_rpc_error(error: grpc.RpcError) -> errors.SlateMQError:
    """Make the error of a failed call, from its trailer or, where it has none, from its code."""
    call = cast("_FailedCall", error)
    code = int(call.code().value[0])
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                status = Status.FromString(value)
            except DecodeError:
                break
            if status.code == code:
                return from_status(status)
    fault = fault_of(error)
    message = call.details() if fault is None else fault.message()
    return from_status(Status(code=code, message=message or call.code().name))


def fault_of(error: grpc.RpcError) -> ConnectionFault | None:
    """Why a call failed for its connection; None where it failed for another reason."""
    call = cast("_FailedCall", error)
    is_answered = any(key == STATUS_DETAILS_KEY for key, _ in call.trailing_metadata() or ())
    if is_answered or call.code() not in _OF_CONNECTIONS:
        return None
    return connection_fault(call.details() or "")


@contextmanager
def raising_slatemq_errors() -> Iterator[None]:
    """Within it, a failed call raises an error of `slatemq.errors` instead of an RpcError."""
    try:
        with raising_peer_moved():
            yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


@contextmanager
def raising_peer_moved() -> Iterator[None]:
    """Within it, a call whose channel is closed meanwhile raises Unavailable (PEER_MOVED).

    gRPC ends it with CancelledError, which differs from a cancellation of the task itself by the
    task's own count of them.
    """
    try:
        yield
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise errors.Unavailable("the channel was closed", reason="PEER_MOVED") from None


def _code(kind: type[errors.SlateMQError]) -> code_pb2.Code:
    for parent in kind.__mro__:
        if parent in _CODES:
            return _CODES[parent]
    return code_pb2.INTERNAL


def _kind_details(error: errors.SlateMQError) -> tuple[Message, ...]:
    details = error_details_pb2
    match error:
        case errors.InvalidArgument():
            field = _capped(error.field, FACT_BYTES_MAX)
            rule = _capped(error.description, MESSAGE_BYTES_MAX)
            violation = details.BadRequest.FieldViolation(field=field, description=rule)
            return (details.BadRequest(field_violations=[violation]),)
        case errors.NotFound() | errors.AlreadyExists():
            name = _capped(error.resource_name, FACT_BYTES_MAX)
            return (details.ResourceInfo(resource_type=error.resource_type, resource_name=name),)
        case errors.FailedPrecondition():
            subject = _capped(error.subject, FACT_BYTES_MAX)
            state = details.PreconditionFailure.Violation(type=error.reason, subject=subject)
            return (details.PreconditionFailure(violations=[state]),)
        case errors.ResourceExhausted():
            quota = details.QuotaFailure.Violation(subject=error.reason)
            failure = details.QuotaFailure(violations=[quota])
            return (failure, *_retry_info(error.retry_after_ms))
        case errors.Unavailable():
            return _retry_info(error.retry_after_ms)
    return ()


def _retry_info(retry_after_ms: int | None) -> tuple[error_details_pb2.RetryInfo, ...]:
    if retry_after_ms is None:
        return ()
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(retry_after_ms)
    return (info,)


def _capped(text: str, bytes_max: int) -> str:
    """The text cut to this many UTF-8 bytes; lone surrogates, which have none, become `?`."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= bytes_max:
        return encoded.decode()
    return encoded[: bytes_max - 3].decode("utf-8", "ignore") + "…"


class _Reader:
    """Takes a Status apart; details that are missing or of other types leave defaults behind."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._info = self._detail(error_details_pb2.ErrorInfo)

    def error(self) -> errors.SlateMQError:
        status, reason, metadata = self._status, self._info.reason, dict(self._info.metadata)
        message = status.message
        match status.code:
            case code_pb2.INVALID_ARGUMENT | code_pb2.OUT_OF_RANGE:
                field, rule = self._violation()
                return errors.InvalidArgument(field, rule, reason=reason, metadata=metadata)
            case code_pb2.UNAUTHENTICATED:
                return errors.Unauthenticated(message, reason=reason, metadata=metadata)
            case code_pb2.PERMISSION_DENIED:
                return errors.PermissionDenied(message, reason=reason, metadata=metadata)
            case code_pb2.NOT_FOUND | code_pb2.ALREADY_EXISTS:
                made = (
                    errors.NotFound if status.code == code_pb2.NOT_FOUND else errors.AlreadyExists
                )
                found = self._detail(error_details_pb2.ResourceInfo)
                kind = found.resource_type or "resource"
                return made(kind, found.resource_name, message, reason=reason, metadata=metadata)
            case code_pb2.FAILED_PRECONDITION:
                failure = self._detail(error_details_pb2.PreconditionFailure).violations
                subject = failure[0].subject if failure else ""
                return errors.FailedPrecondition(
                    reason, message, subject=subject, metadata=metadata
                )
            case code_pb2.RESOURCE_EXHAUSTED if "larger than max" in message:
                reason = reason or "MESSAGE_TOO_LARGE"  # gRPC's own refusal, on either side
            case code_pb2.CANCELLED:
                reason = reason or "CANCELLED"
            case code_pb2.DEADLINE_EXCEEDED if message == "Deadline Exceeded":
                message = "no answer came in time"  # gRPC's own, which says for what no more
        kind = _KINDS.get(status.code, errors.Internal)
        if issubclass(kind, errors.ResourceExhausted | errors.Unavailable):
            retry_after_ms = self._retry_after_ms()
            return kind(message, retry_after_ms=retry_after_ms, reason=reason, metadata=metadata)
        if kind is errors.Internal:
            reason = reason or grpc_code(status).name
        return kind(message, reason=reason, metadata=metadata)

    def _detail(self, kind: type[_M]) -> _M:
        found = kind()
        for packed in self._status.details:
            if packed.Is(found.DESCRIPTOR):
                try:
                    packed.Unpack(found)
                except DecodeError:
                    return kind()
                break
        return found

    def _violation(self) -> tuple[str, str]:
        violations = self._detail(error_details_pb2.BadRequest).field_violations
        if not violations:
            return "", self._status.message
        return violations[0].field, violations[0].description

    def _retry_after_ms(self) -> int | None:
        info = self._detail(error_details_pb2.RetryInfo)
        if info.HasField("retry_delay"):
            return int(info.retry_delay.ToMilliseconds())
        # Our services leave it out where waiting does not help; what is not theirs has no reason.
        return None if self._info.reason else errors.DEFAULT_RETRY_AFTER_MS
