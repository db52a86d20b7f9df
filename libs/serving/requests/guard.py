"""What surrounds every call: admission, errors, and the reading of requests.

Handlers raise `slatemq.errors`; the guard answers with google.rpc.Status and its details. Anything
else that a handler raises is a bug: logged with its traceback, answered as INTERNAL without
details. The kinds of methods (unary and streaming, in and out) differ only in their signatures; no
method has a stream of requests and one response. Request streams must be read by iteration, not by
`context.read()`.

To gRPC each method takes a stream of bytes, which is the same on the wire: so `reading` has each
request before it is parsed, and can refuse one that is still arriving. Health and reflection, whose
code is not ours, are guarded, too, but answer in every state.

Handlers are wrapped once per method, not per call, so that a call pays for a dictionary look-up and
two more coroutines (some 10 µs of 270; docs/decisions/0002-one-guard.md).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from copy import copy
from functools import partial
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.rpc.status_pb2 import Status

from libs.access.current import caller_quota, hold_back
from libs.access.principals import BOUND_REASONS
from libs.serving import limits
from libs.serving.peers.elsewhere import Elsewhere
from libs.serving.requests.calls import UNKNOWN_METHOD, UNRECORDED, Call, MethodCalls, is_known
from libs.serving.requests.doors import UNJUDGED, Door, Judge, ServiceDoor, Visit, current_visit
from libs.serving.requests.gate import Entrance, Gate, NewestGate, OpenGate
from libs.serving.requests.partitions import note_partition
from libs.serving.requests.reading import Codec, RequestReader
from libs.serving.telemetry import Telemetry
from libs.storage.errors import (
    CorruptRecord,
    DamagedObject,
    DamagedStore,
    Fenced,
    OtherFormat,
    StoreFailed,
    StoreUnavailable,
    Unstorable,
)
from libs.storage.objects.durability import NO_SPACE
from slatemq import errors
from slatemq._cancelling import is_cancelled
from slatemq._rpc.rpc_status import STATUS_DETAILS_KEY, from_rpc_error, grpc_code, to_status

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

M = TypeVar("M")

Behavior = Callable[[Any, Context], Any]

LOOKUP_PREFIX = "/slatemq.v1.TopologyService/"


class CallGuard(grpc.aio.ServerInterceptor):
    """Wraps the handler of each method, once."""

    def __init__(
        self,
        gate: Gate,
        telemetry: Telemetry,
        message_bytes_max: int = limits.message_bytes_max(),
        elsewhere: Elsewhere | None = None,
        held_bytes: Callable[[], int] = lambda: 0,
        directed: Callable[[errors.NotFound], Awaitable[errors.SlateMQError]] | None = None,
        lookups: Gate | None = None,
    ) -> None:
        """Guard with this gate and size limit, and trace where telemetry is on.

        `elsewhere` knows where the services are that this process does not have. `held_bytes`
        returns what the service holds for its callers, requests aside. `directed` adds to the error
        about what is not here where it is. `lookups` admits the calls of TopologyService, which a
        standby serves; without it the gate does.
        """
        self._directed = directed
        self._gate = gate
        self._lookups = lookups or gate
        self._telemetry = telemetry
        self._reader = RequestReader(message_bytes_max, _fail, held_bytes)
        self._elsewhere = elsewhere or Elsewhere()
        self._door: Door = ServiceDoor()
        self._probe_streams = NewestGate(limits.PROBE_STREAMS_MAX)
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._calls: dict[str, MethodCalls] = {}

    def of_door(self, door: Door) -> CallGuard:
        """A guard of another port, which shares all bounds with this one, but that of probes."""
        other = copy(self)
        other._door = door
        # Anyone may open them at the port for clients: they end none of the services' own.
        other._probe_streams = NewestGate(limits.PROBE_STREAMS_MAX)
        other._guarded = {}
        return other

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The guarded handler of the method; None where there is no such method."""
        method = handler_call_details.method
        # Each call has a task of its own, which this is.
        note_partition(handler_call_details.invocation_metadata or ())
        guarded = self._guarded.get(method)
        if guarded is not None:
            return guarded
        handler = await continuation(handler_call_details)
        if handler is None:
            # Not kept: callers name as many methods as they like.
            return self._refused(method)
        guarded = self._guard(method, handler)
        self._guarded[method] = guarded
        return guarded

    def _guard(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        is_streaming = (handler.request_streaming, handler.response_streaming)
        behavior = getattr(handler, "_".join(("unary", "stream")[many] for many in is_streaming))
        codec = Codec(handler.request_deserializer or _unchanged)
        gate = self._gate_of(method, any(is_streaming))
        judge = self._door.judge_of(method)
        guarded: Callable[[Any, Context], Any]
        encoding = _encoding
        if inspect.isasyncgenfunction(behavior):
            encoding = _unboxing
            if handler.request_streaming:
                guarded = self._guard_both_streams(method, behavior, codec, gate, judge)
            else:
                guarded = self._guard_answer_stream(method, behavior, codec, gate, judge)
        elif inspect.iscoroutinefunction(behavior) and not handler.request_streaming:
            guarded = self._guard_one(method, behavior, codec, gate, judge)
        else:
            return self._refused(method)  # The generated base class's own.
        make: Callable[..., grpc.RpcMethodHandler[Any, Any]] = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(guarded, None, encoding(handler.response_serializer))

    def _gate_of(self, method: str, is_stream: bool) -> Entrance:
        if method.startswith(LOOKUP_PREFIX):
            return self._lookups
        if not method.startswith(limits.PROBE_PREFIXES):
            return self._gate
        return self._probe_streams if is_stream else OpenGate()

    def _guard_one(
        self, method: str, behavior: Behavior, codec: Codec, gate: Entrance, judge: Judge | None
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """Guard a handler that returns its response, or writes several itself, as health's does."""
        reader, calls = self._reader, self._calls_of(method)

        async def guarded(_: Any, context: Context) -> Any:
            with calls.begin(context, is_current=True) as call:
                try:
                    with await _visit(gate, judge, context) as visit, gate.place(caller_quota()):
                        request, held_bytes = await reader.read(
                            context, codec, method, visit.charge
                        )
                        try:
                            await visit.judge(request)
                            if (proof := gate.proof()) is not None:
                                await proof
                            return await behavior(request, context)
                        finally:
                            del request  # An error would keep it as long as this frame.
                            if held_bytes:
                                reader.release(held_bytes)
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - all are answered
                    await self._fail(method, context, error, call)

        return guarded

    def _guard_answer_stream(
        self, method: str, behavior: Behavior, codec: Codec, gate: Entrance, judge: Judge | None
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        reader, calls = self._reader, self._calls_of(method)

        async def guarded(_: Any, context: Context) -> AsyncIterator[Any]:
            with calls.begin(context) as call:
                try:
                    with await _visit(gate, judge, context) as visit, gate.place(caller_quota()):
                        request, held_bytes = await reader.read(
                            context, codec, method, visit.charge
                        )
                        try:
                            await visit.judge(request)
                            if (proof := gate.proof()) is not None:
                                await proof
                            # Closed here and now when the client goes, not when the collector
                            # finds it.
                            async with aclosing(behavior(request, context)) as responses:
                                visit.follow(responses)
                                async for response in responses:
                                    await visit.renew()
                                    box = [response]
                                    del response
                                    yield box
                        finally:
                            del request  # An error would keep it as long as this frame.
                            if held_bytes:
                                reader.release(held_bytes)
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - all are answered
                    await self._fail(method, context, error, call)

        return guarded

    def _guard_both_streams(
        self, method: str, behavior: Behavior, codec: Codec, gate: Entrance, judge: Judge | None
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        calls = self._calls_of(method)

        async def guarded(requests: Any, context: Context) -> AsyncIterator[Any]:
            with calls.begin(context) as call:
                is_let_in = False
                try:
                    with await _visit(gate, judge, context) as visit, gate.place(caller_quota()):
                        is_let_in = True
                        if (proof := gate.proof()) is not None:
                            await proof
                        parsed = self._reader.stream(requests, codec, visit.judge, visit.charge)
                        async with aclosing(behavior(parsed, context)) as responses:
                            visit.follow(responses)
                            async for response in responses:
                                await visit.renew()
                                box = [response]
                                del response
                                yield box
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - all are answered
                    if isinstance(error, errors.Unauthenticated) and not is_let_in:
                        await self._reader.pass_over(
                            requests, partial(_fail, method, context, error)
                        )
                    elif _is_of_caller(error):
                        await self._reader.skip(requests)
                    await self._fail(method, context, error, call)

        return guarded

    async def _fail(self, method: str, context: Context, error: BaseException, call: Call) -> None:
        """As `_fail` below, with where to look for what is not here."""
        if self._directed is not None and isinstance(error, errors.NotFound):
            error = await self._directed(error)
        await _fail(method, context, error, call)

    def _calls_of(self, method: str) -> MethodCalls:
        """What records the calls of a method that there is, or of UNKNOWN_METHOD."""
        calls = self._calls.get(method)
        if calls is None:
            calls = self._calls[method] = MethodCalls(self._telemetry, method)
        return calls

    def _refused(self, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler that refuses: no such method here, or the service is starting."""
        # Callers name as many methods as they like: only those that there are get a series.
        calls = self._calls_of(method if is_known(method) else UNKNOWN_METHOD)

        async def refused(requests: Any, context: Context) -> None:
            with calls.begin(context, is_current=True) as call:
                try:
                    if self._elsewhere.is_ours(method):
                        self._gate.check()
                except errors.SlateMQError as error:
                    await _fail(method, context, error, call)
                else:
                    is_open = self._door.judge_of(method) is None
                    refusal = await self._elsewhere.refusal(method, shows_addresses=is_open)
                    end = partial(_fail, method, context, refusal)
                    await self._reader.pass_over(requests, end)
                    await _fail(method, context, refusal, call)

        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(refused)
        return handler


async def _visit(gate: Entrance, judge: Judge | None, context: Context) -> Visit:
    """Find out who calls, which may wait for other checks: so it takes no place of other calls."""
    if judge is None:
        return UNJUDGED
    gate.check()  # Where calls are not let in, it does not matter who calls.
    visit = await judge.enter(context)
    current_visit.set(visit)
    return visit


def _unchanged(data: bytes) -> bytes:
    return data


def encoded(kind: type[M], data: bytes) -> M:
    """A response of this type that is encoded already; it is sent as it is."""
    return cast("M", data)


def _encoding(serializer: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """A serializer that passes bytes through."""
    if serializer is None:
        return None
    encode = serializer
    return lambda answer: answer if isinstance(answer, bytes) else encode(answer)


def _unboxing(serializer: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Encode the responses of a stream, each taken out of a list of its own.

    gRPC keeps what a stream yields until the next, which may come hours later.
    """
    encode = _encoding(serializer) or _unchanged
    return lambda box: encode(box.pop())


async def _fail(
    method: str, context: Context, error: BaseException, call: Call = UNRECORDED
) -> None:
    """End the call with the status of the error; a cancelled or aborted call just ends."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, asyncio.CancelledError) and (context.cancelled() or is_cancelled()):
        raise error
    if isinstance(error, errors.SlateMQError):
        error.__traceback__ = None  # Its frames would keep the request meanwhile.
        is_publish = current_visit.get().answers_publishes
        await hold_back(error, context.time_remaining(), is_publish=is_publish)
    with call.in_span():
        status = status_of(method, error)
    call.failed(error)
    # What the handler held would stay until the next full collection: a cycle of frames and error.
    # The frames themselves are left alone: an error that others wait for, too, has theirs as well.
    error.__traceback__ = None
    try:
        await context.abort(
            grpc_code(status),
            status.message,
            ((STATUS_DETAILS_KEY, status.SerializeToString()),),
        )
    except grpc.aio.UsageError:
        return  # It was ended before, while it waited; gRPC sees to the rest.


def status_of(method: str, error: BaseException) -> Status:
    """The status of an error for the method's caller, also as a part of a response."""
    return to_status(_translated(method, error))


def _translated(method: str, error: BaseException) -> errors.SlateMQError:
    """The error for the caller; logs what it must not contain."""
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
            log.warning("a peer is down: %s", cause.message, extra={"method": method})
            return errors.Unavailable(
                "a service that this one needs is down",
                reason="PEER_UNAVAILABLE",
                retry_after_ms=cause.retry_after_ms,
            )
    if isinstance(error, Fenced):
        return errors.Unavailable("another process owns the shard now", reason="NOT_OWNER")
    if isinstance(error, Unstorable):
        log.error("%s", error, extra={"method": method})
        return errors.Internal(str(error), reason="UNSTORABLE_RECORD")
    if isinstance(error, StoreUnavailable | StoreFailed):
        log.warning("the store is down: %s", error, extra={"method": method})
        full = ": its disk is full" if NO_SPACE in str(error) else ""
        return errors.Unavailable(f"the object store is down{full}", reason="STORE_UNAVAILABLE")
    if isinstance(error, CorruptRecord | DamagedStore | DamagedObject):
        log.error("damaged data: %s", error, extra={"method": method})
        return errors.DataLoss(str(error), reason="DAMAGED_DATA")
    if isinstance(error, OtherFormat):
        return errors.FailedPrecondition("OTHER_FORMAT", str(error))
    log.error("unexpected error", exc_info=error, extra={"method": method})
    return errors.Internal("internal error; the service's log says more")


def _is_of_caller(error: BaseException) -> bool:
    """Whether the caller of a stream caused it, perhaps while sending."""
    if isinstance(error, errors.ResourceExhausted):
        return error.reason in BOUND_REASONS
    return isinstance(error, _CALLERS)


_CALLERS = (
    errors.InvalidArgument,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.NotFound,
    errors.FailedPrecondition,
)
"""Errors that a request of a stream may cause."""
