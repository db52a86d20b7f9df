"""Served calls as spans and durations: from the guard's door to the end, refused ones among them.

Spans are below the caller's. Durations are by method and status, of which there are few: a method
that there is not has the name that OpenTelemetry's conventions give to all of these.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pool
from opentelemetry import trace

from libs.serving.telemetry import Telemetry, extract
from slatemq.errors import SlateMQError

UNKNOWN_METHOD: Final = "_OTHER"

RPC_STATUS: Final = "rpc.response.status_code"
"""Name of the attribute with the name of a gRPC status."""

_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}

_NO_SPAN: Final = nullcontext()


class Call:
    """One served call, while the context lasts; this one is not recorded."""

    __slots__ = ()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Record what has become of it."""

    def in_span(self) -> AbstractContextManager[object]:
        """Within the block, its span is the current one, which log lines name."""
        return _NO_SPAN

    def failed(self, error: BaseException) -> None:
        """Note the error with which it is about to end."""


UNRECORDED: Final = Call()


class MethodCalls:
    """The calls of one method, or of all that are unknown."""

    def __init__(self, telemetry: Telemetry, method: str) -> None:
        """`method` is as gRPC has it: `/slatemq.v1.QueueService/GetQueue`."""
        service, _, name = method.strip("/").rpartition("/")
        self.name = method.strip("/")
        self.attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        self.tracer = telemetry.tracer
        self._is_recorded = telemetry.enabled
        self._has_spans = telemetry.traces
        self._durations = telemetry.call_duration
        # By status; each is made once, since calls are many.
        self._facts: dict[str, dict[str, str]] = {}

    def begin(self, context: Any, *, is_current: bool = False) -> Call:
        """Begin to serve a call.

        `is_current`: all that happens within it has its span as the current one. Not for
        generators: their frames run in their caller's context, where what was set before a yield
        cannot be reset after it.
        """
        if not self._is_recorded:
            return UNRECORDED
        return _Traced(self, context, is_current) if self._has_spans else _Timed(self, context)

    def record(self, began_s: float, status: str) -> None:
        facts = self._facts.get(status)
        if facts is None:
            facts = self._facts[status] = {**self.attributes, RPC_STATUS: status}
        self._durations.record((time.monotonic() - began_s) * 1000, facts)


class _Timed(Call):
    """One served call: its duration."""

    __slots__ = ("_began_s", "_context", "_method")

    def __init__(self, method: MethodCalls, context: Any) -> None:
        self._method = method
        self._context = context
        self._began_s = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._method.record(self._began_s, _ended(self._context, error))


class _Traced(_Timed):
    """One served call: its duration, and a span under the caller's."""

    __slots__ = ("_is_explained", "_scope", "_span")

    def __init__(self, method: MethodCalls, context: Any, is_current: bool) -> None:
        super().__init__(method, context)
        self._span = method.tracer.start_span(
            method.name,
            context=extract(dict(context.invocation_metadata() or ())),
            kind=trace.SpanKind.SERVER,
            attributes=method.attributes,
        )
        self._is_explained = False
        self._scope = self.in_span() if is_current else _NO_SPAN

    def __enter__(self) -> Call:
        self._scope.__enter__()
        return self

    def in_span(self) -> AbstractContextManager[object]:
        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)

    def failed(self, error: BaseException) -> None:
        self._is_explained = True
        reason = error.reason if isinstance(error, SlateMQError) else ""
        if not isinstance(error, SlateMQError):
            # A refusal is no fault of ours, and its traceback would cost more than the call.
            self._span.record_exception(error)
        self._span.set_attribute("error.type", reason or type(error).__name__)
        self._span.set_status(trace.StatusCode.ERROR, str(error))

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._scope.__exit__(kind, error, traceback)
        status = _ended(self._context, error)
        self._span.set_attribute(RPC_STATUS, status)
        if status not in ("OK", "CANCELLED") and not self._is_explained:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()
        self._method.record(self._began_s, status)


def is_known(method: str) -> bool:
    """Whether a proto that is loaded here has this method."""
    try:
        descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", "."))
    except KeyError:
        return False
    return True


def code_name(context: Any) -> str:
    """The name of the code that a call was ended with, which gRPC has as a number or as its enum.

    Empty where its handler has returned, or the caller has cancelled it.
    """
    code: Any = context.code()
    if not code:
        return ""
    return _CODES[code] if isinstance(code, int) else str(code.name)


def _ended(context: Any, error: BaseException | None) -> str:
    """The name of the status of a call whose handler has ended, perhaps by an error without one."""
    if code := code_name(context):
        return code
    if context.cancelled() or isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELLED"
    return "OK" if error is None else "UNKNOWN"
