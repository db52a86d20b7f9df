"""What stands around every call: admission, errors, and request bytes that do not decode.

Handlers raise `slatemq.errors`; the guard answers with google.rpc.Status and its details. Anything
else that a handler raises is a fault of ours: logged with its traceback, answered as INTERNAL with
nothing of it told. The four kinds of methods (unary and streaming, in and out) differ only in their
signatures; request streams must be read by iteration, not by `context.read()`.

Handlers are wrapped once per method, not per call, so that a call pays for a dictionary look-up and
two more coroutines (some 10 µs of 270; docs/decisions/0002-one-guard.md).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.rpc.status_pb2 import Status

from libs.serving import limits
from libs.serving.telemetry import Telemetry
from libs.serving.undecodable import field_at_fault, first_list
from libs.storage.errors import CorruptRecord, DamagedStore, StoreFailed, StoreUnavailable
from slatemq import errors
from slatemq.rpc_status import STATUS_DETAILS_KEY, from_rpc_error, grpc_code, to_status

log = logging.getLogger(__name__)

EXEMPT_PREFIXES = ("/grpc.health.", "/grpc.reflection.")
"""Answered in every state, and by code that is not ours."""

Context = grpc.aio.ServicerContext[Any, Any]

M = TypeVar("M")


class Gate:
    """Whether calls are let in: not before the service has started, not once it drains.

    A context manager around each call: entering it counts the call or raises why not.

    Attributes:
        calls_count: Calls in flight.
        large_bytes: Bytes of the large requests among them.
    """

    def __init__(self, calls_max: int) -> None:
        """Begin closed, as a service that is starting."""
        self.calls_count = 0
        self.large_bytes = 0
        self._calls_max = calls_max
        self._closed: tuple[str, str] | None = ("STARTING", "the service is starting")
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        """Let calls in."""
        self._closed = None

    def close(self, reason: str, message: str) -> None:
        """Answer new calls with UNAVAILABLE and this reason; calls in flight go on."""
        self._closed = (reason, message)

    async def idle(self) -> None:
        """Return once no call is in flight."""
        await self._idle.wait()

    def has_room(self, request_bytes: int) -> bool:
        """Whether a large request may be decoded now: one may always, more within the bound."""
        return not self.large_bytes or self.large_bytes + request_bytes <= limits.LARGE_BYTES_MAX

    def __enter__(self) -> None:
        if self._closed is not None:
            reason, message = self._closed
            raise errors.Unavailable(message, reason=reason)
        if self.calls_count >= self._calls_max:
            raise errors.ResourceExhausted(
                f"{self._calls_max} calls are in flight", reason="TOO_MANY_CALLS"
            )
        self.calls_count += 1
        self._idle.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.calls_count -= 1
        if not self.calls_count:
            self._idle.set()


class CallGuard(grpc.aio.ServerInterceptor):
    """Wraps each method's handler, once, and hands the wrapped one to every later call."""

    def __init__(
        self,
        gate: Gate,
        telemetry: Telemetry,
        message_bytes_max: int = limits.message_bytes_max(),
    ) -> None:
        """Guard with this gate and size limit, and trace where telemetry is on."""
        self._gate = gate
        self._message_bytes_max = message_bytes_max
        self._telemetry = telemetry
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The guarded handler of the method called; None where there is no such method."""
        method = handler_call_details.method
        guarded = self._guarded.get(method)
        if guarded is not None:
            return guarded
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(EXEMPT_PREFIXES):
            return handler
        guarded = self._guard(method, handler)
        self._guarded[method] = guarded
        return guarded

    def _guard(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        streams = (handler.request_streaming, handler.response_streaming)
        name, make = _KINDS[streams]
        behavior = getattr(handler, name)
        if inspect.isasyncgenfunction(behavior):
            behavior = self._telemetry.traced_stream(method, behavior)
            guarded: Callable[[Any, Context], Any] = self._guard_stream(method, behavior)
        elif inspect.iscoroutinefunction(behavior):
            behavior = self._telemetry.traced(method, behavior)
            guarded = self._guard_coroutine(method, behavior)
        else:
            return handler  # The generated base class's own: answers UNIMPLEMENTED.
        made: grpc.RpcMethodHandler[Any, Any] = make(
            guarded,
            _tolerant(handler.request_deserializer, self._gate, self._message_bytes_max),
            _encoding(handler.response_serializer),
        )
        return made

    def _guard_coroutine(
        self, method: str, behavior: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        gate = self._gate

        async def guarded(request: Any, context: Context) -> Any:
            try:
                with gate:
                    return await behavior(_decoded(request), context)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - all are answered
                await _fail(method, context, error)

        return guarded

    def _guard_stream(
        self, method: str, behavior: Callable[[Any, Context], AsyncIterator[Any]]
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        gate = self._gate

        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                # Closed here and now when the client goes, not when the collector finds it.
                with gate:
                    responses: Any = behavior(_decoded(request), context)
                    async with aclosing(responses):
                        async for response in responses:
                            yield response
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - all are answered
                await _fail(method, context, error)

        return guarded


def encoded(kind: type[M], data: bytes) -> M:
    """An answer of this type that is in protobuf's wire format already; it is sent as it is."""
    return cast("M", data)


def _encoding(serializer: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """A serializer that lets bytes pass."""
    if serializer is None:
        return None
    encode = serializer
    return lambda answer: answer if isinstance(answer, bytes) else encode(answer)


class _Refused:
    """Stands for a request that is refused before its handler hears of it."""

    def __init__(self, error: errors.SlateMQError) -> None:
        self.error = error


class _Large:
    """A large request, which counts as long as it is in memory."""

    def __init__(self, message: Any, size_bytes: int, gate: Gate) -> None:
        self.message = message
        self._size_bytes = size_bytes
        self._gate = gate
        gate.large_bytes += size_bytes

    def __del__(self) -> None:
        self._gate.large_bytes -= self._size_bytes


def _tolerant(
    deserializer: Callable[[bytes], Any] | None, gate: Gate, message_bytes_max: int
) -> Callable[[bytes], Any] | None:
    """A deserializer that never raises: for one that does, grpc.aio answers UNKNOWN."""
    if deserializer is None:
        return None
    decode = deserializer
    descriptor = getattr(getattr(deserializer, "__self__", None), "DESCRIPTOR", None)

    def tolerant(data: bytes) -> Any:
        size_bytes = len(data)
        if size_bytes > message_bytes_max:
            field = first_list(descriptor) if descriptor else ""
            return _Refused(_too_large(field, size_bytes, message_bytes_max))
        is_large = size_bytes > limits.LARGE_REQUEST_BYTES
        if is_large and not gate.has_room(size_bytes):
            return _Refused(
                errors.ResourceExhausted(
                    "other large requests are in work", reason="LARGE_REQUESTS", retry_after_ms=200
                )
            )
        try:
            message = decode(data)
        except Exception:  # noqa: BLE001 - whatever it says, the bytes are the caller's
            field = field_at_fault(descriptor, data) if descriptor else ""
            return _Refused(
                errors.InvalidArgument(
                    field, "the bytes do not decode as the request's type", reason="UNDECODABLE"
                )
            )
        return _Large(message, size_bytes, gate) if is_large else message

    return tolerant


def _too_large(field: str, size_bytes: int, size_bytes_max: int) -> errors.InvalidArgument:
    return errors.InvalidArgument(
        field,
        f"the request has {size_bytes} bytes, at most {size_bytes_max} fit: send it in parts",
        reason="MESSAGE_TOO_LARGE",
    )


def _decoded(request: Any) -> Any:
    """The request, or for a stream an iterator of requests; raises for one that is refused."""
    if isinstance(request, _Refused):
        raise request.error
    if isinstance(request, _Large):
        return request.message
    if hasattr(request, "__aiter__"):
        return _decoded_stream(request)
    return request


async def _decoded_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _decoded(request)


async def _fail(method: str, context: Context, error: BaseException) -> NoReturn:
    """End the call with the status of an error; a cancelled or aborted call just ends."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, asyncio.CancelledError) and _cancelled_from_outside(context):
        raise error
    status = status_of(method, error)
    # What the handler held would stay until the next full collection: a cycle of frames and error.
    # The frames themselves are left alone: an error that others wait for, too, has theirs as well.
    error.__traceback__ = None
    await context.abort(
        grpc_code(status),
        status.message,
        ((STATUS_DETAILS_KEY, status.SerializeToString()),),
    )


def _cancelled_from_outside(context: Context) -> bool:
    task = asyncio.current_task()
    return context.cancelled() or (task is not None and task.cancelling() > 0)


def status_of(method: str, error: BaseException) -> Status:
    """What the caller of a method is told of an error, also as a part of an answer."""
    return to_status(_told(method, error))


def _told(method: str, error: BaseException) -> errors.SlateMQError:
    """What the caller is told of an error, logging what the caller is not."""
    if isinstance(error, errors.SlateMQError):
        if isinstance(error, errors.Internal | errors.DataLoss):
            log.error("%s", error.message, extra={"method": method, "reason": error.reason})
        return error
    if isinstance(error, asyncio.CancelledError):
        # Something that the handler waited for was cancelled, as happens while a service stops.
        # Left alone, the caller would hang until its deadline.
        return errors.Unavailable("the service is stopping", reason="STOPPING")
    if isinstance(error, grpc.RpcError):
        cause = from_rpc_error(error)
        if isinstance(cause, errors.Unavailable):
            log.warning("a peer is away: %s", cause.message, extra={"method": method})
            return errors.Unavailable(
                "a service that this one needs is away",
                reason="PEER_UNAVAILABLE",
                retry_after_ms=cause.retry_after_ms,
            )
    if isinstance(error, StoreUnavailable | StoreFailed):
        log.warning("the store is away: %s", error, extra={"method": method})
        return errors.Unavailable("the object store is away", reason="STORE_UNAVAILABLE")
    if isinstance(error, CorruptRecord | DamagedStore):
        log.error("damaged data: %s", error, extra={"method": method})
        return errors.DataLoss(str(error), reason="DAMAGED_DATA")
    log.error("unexpected error", exc_info=error, extra={"method": method})
    return errors.Internal("internal error; the service's log says more")


_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., Any]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
