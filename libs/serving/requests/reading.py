"""Requests on their way from the wire to a handler: counted, checked, parsed, given back.

::

    arriving ──► whole ──► budget ──► shape ──► parsed ──► handler ──► released
    (arrivals)            (32 KiB and more)                                │
                                                      memory given back ◄──┘

The bytes come raw for all kinds of methods: so a call can be refused while its request is arriving,
and nothing that a caller sends is parsed elsewhere. What is parsed is bounded by
its shape, since parsing holds up all of the process, in a thread, too: it keeps the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from libs.serving import limits
from libs.serving.process.memory import Trimmer
from libs.serving.requests.arrivals import Arrivals, StreamReads
from libs.serving.requests.shape import (
    WALKED_BYTES_MIN,
    ShapeError,
    field_at_fault,
    first_list,
    walk,
)
from slatemq import errors
from slatemq._byte_budget import ByteBudget

WAIT_S: Final = 10.0
"""How long a large request waits for those before it; then its caller is asked to retry."""


Refuse = Callable[[str, Any, errors.SlateMQError], Awaitable[None]]
Charge = Callable[[int], None]
"""Counts the bytes of a request that is too large, or cannot be read."""


STEP_BYTES: Final = 1 << 20
"""From here on, and after a walk of several steps, others have their turn before the parsing."""

PASS_OVER_S: Final = 1.0
"""For a client to notice that its stream has ended. One that behaves needs milliseconds."""


class Codec:
    """How the requests of a method are parsed.

    Attributes:
        decode: From the bytes; raises anything for those that it cannot parse.
        descriptor: Of the message; None where it is not protobuf's.
        has_payloads: Whether a request has payloads, and may so be large.
    """

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self.decode = decode
        self.descriptor: Descriptor | None = getattr(
            getattr(decode, "__self__", None), "DESCRIPTOR", None
        )
        self.has_payloads = self.descriptor is None or _has_bytes(self.descriptor)


class RequestReader:
    def __init__(
        self, message_bytes_max: int, refuse: Refuse, held_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """Refuse requests over this size; `refuse` ends the call of a method with an error.

        `held_bytes` returns what the service holds for its callers, requests aside.
        """
        self._message_bytes_max = message_bytes_max
        self._refuse = refuse
        growth_bytes_max = limits.ARRIVING_GROWTH_BYTES_MAX
        self._with_payloads = Arrivals(limits.ARRIVING_AT_ONCE, growth_bytes_max)
        self._others = Arrivals(limits.ARRIVING_AT_ONCE, growth_bytes_max)
        self._probes = Arrivals(limits.PROBES_AT_ONCE, growth_bytes_max)
        self._passed_over = Arrivals(limits.PASSED_OVER_AT_ONCE, growth_bytes_max)
        self._budget = ByteBudget(limits.REQUESTS_BYTES_MAX)
        self._trimmer = Trimmer()
        self._stream_reads = StreamReads(
            limits.STREAMS_SUDDEN_BYTES_MAX,
            limits.STREAMS_LASTING_BYTES_MAX,
            held_bytes,
            self._trimmer.freed,
        )
        self._reading: set[asyncio.Task[None]] = set()

    async def read(
        self, context: Any, codec: Codec, method: str, charge: Charge
    ) -> tuple[Any, int]:
        """The one request of a call, and how many bytes of it to release after the call.

        Raises InvalidArgument, ResourceExhausted.
        """
        arrivals = self._arrivals_of(codec, method)
        try:
            arrival = await arrivals.begin(lambda: self._refuse(method, context, overloaded()))
        except TimeoutError:
            raise overloaded() from None
        try:
            data = await context.read()
            if data is grpc.aio.EOF:
                raise errors.InvalidArgument("", "the call has no request", reason="NO_REQUEST")
            size_bytes = len(data)
            self._check_size(codec, size_bytes, charge, is_call=True)
            if size_bytes < WALKED_BYTES_MIN:
                return self._parsed(codec, data, charge), 0
            arrival.is_whole = True
            await self._reserve(size_bytes)
        finally:
            arrivals.end(arrival)
            if arrival.is_refused:
                self._trimmer.freed(self._message_bytes_max)
        try:
            return await self._parsed_in_steps(codec, data, charge), size_bytes
        except BaseException:
            self.release(size_bytes)
            raise

    async def stream(
        self,
        requests: AsyncIterator[bytes],
        codec: Codec,
        judge: Callable[[Any], Awaitable[None]],
        charge: Charge,
    ) -> AsyncGenerator[Any, bool]:
        """The requests of a call, each held until the next is asked for.

        `asend(True)` releases the last one without asking for the next, and returns None. `judge`
        raises for one that its caller may not make.

        Raises InvalidArgument, ResourceExhausted.
        """
        messages = aiter(requests)
        is_first = True
        while (data := await self._next(messages, codec, charge, is_first=is_first)) is not None:
            is_first = False
            held_bytes = len(data) if len(data) >= WALKED_BYTES_MIN else 0
            is_pause = False
            try:
                if held_bytes:
                    request = await self._parsed_in_steps(codec, data, charge)
                else:
                    request = self._parsed(codec, data, charge)
                del data
                await judge(request)
                is_pause = yield request
                del request
            finally:
                if held_bytes:
                    self.release(held_bytes)
            if is_pause:
                yield None

    async def _next(
        self, messages: AsyncIterator[bytes], codec: Codec, charge: Charge, *, is_first: bool
    ) -> bytes | None:
        """The next message of a stream, with its budget reserved; None at the end."""
        data: bytes | None = None
        try:
            async with asyncio.timeout(None) as read:
                self._stream_reads.begin(read, is_first=is_first)
                try:
                    data = await anext(messages, None)
                    if data is not None:
                        self._check_size(codec, len(data), charge, is_call=False)
                        if len(data) >= WALKED_BYTES_MIN:
                            await self._reserve(len(data))
                finally:
                    if data is None:
                        self._stream_reads.abandon(read)
                    else:
                        self._stream_reads.end(read)
            return data
        except TimeoutError:
            # Outside of the error, whose frames would keep what has arrived.
            del data
        self._trimmer.freed(limits.STREAM_MESSAGE_BYTES_MAX)
        raise overloaded()

    async def skip(self, requests: AsyncIterator[bytes]) -> None:
        """Read, for a moment, what was sent behind a request that ends its stream.

        Some clients, gRPC's for asyncio among them, get no status but INTERNAL for a stream that
        ends while they send.
        """

        async def read() -> None:
            # RuntimeError: the handler has not noticed its end yet, and reads itself.
            with suppress(grpc.aio.AbortError, grpc.aio.UsageError, RuntimeError):
                async for _ in requests:
                    pass

        # It is not cancelled when the time is over: what arrives for a read that was would be lost
        # to gRPC, too. It ends with the call.
        reading = asyncio.create_task(read())
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        with suppress(TimeoutError):
            # A scope without an end of its own: one that has just come could not be ended again.
            async with asyncio.timeout(None) as pause:
                self._stream_reads.begin(pause, is_first=False)
                try:
                    await asyncio.wait({reading}, timeout=PASS_OVER_S)
                finally:
                    self._stream_reads.end(pause)
        self._trimmer.freed(limits.STREAM_MESSAGE_BYTES_MAX)

    async def pass_over(
        self, requests: AsyncIterator[bytes], refuse: Callable[[], Awaitable[None]]
    ) -> None:
        """The same for a caller without a good proof, and for a method that is not served here.

        Those can be of anyone, so few are read at once, in places of their own. `refuse` ends
        the call where requests that are large arrive meanwhile.
        """
        try:
            arrival = await self._passed_over.begin(refuse)
        except TimeoutError:
            return
        try:
            await self.skip(requests)
        finally:
            self._passed_over.end(arrival)

    def release(self, size_bytes: int) -> None:
        self._budget.release(size_bytes)
        self._trimmer.freed(size_bytes)

    def _arrivals_of(self, codec: Codec, method: str) -> Arrivals:
        """The arrivals that a request is among: large ones of another kind must not delay it."""
        if method.startswith(limits.PROBE_PREFIXES):
            return self._probes
        return self._with_payloads if codec.has_payloads else self._others

    async def _reserve(self, size_bytes: int) -> None:
        if self._budget.try_reserve(size_bytes):
            return
        try:
            async with asyncio.timeout(WAIT_S):
                await self._budget.reserve(size_bytes)
        except TimeoutError:
            raise overloaded() from None

    def _check_size(self, codec: Codec, size_bytes: int, charge: Charge, *, is_call: bool) -> None:
        """Raise InvalidArgument for a message too large for a call, or for a stream."""
        bytes_max = self._message_bytes_max if is_call else limits.STREAM_MESSAGE_BYTES_MAX
        if size_bytes > bytes_max:
            charge(size_bytes)
            self._trimmer.freed(size_bytes)
            raise errors.InvalidArgument(
                first_list(codec.descriptor) if codec.descriptor else "",
                f"the request has {size_bytes} bytes, the limit is {bytes_max}"
                f"{'' if is_call else ' on a stream'}: send it in parts"
                f"{'' if is_call else ', or by a call of its own'}",
                reason="MESSAGE_TOO_LARGE",
            )

    async def _parsed_in_steps(self, codec: Codec, data: bytes, charge: Charge) -> Any:
        refusal = await self._shape_refusal(codec.descriptor, data)
        if refusal is not None:
            charge(len(data))
            raise refusal
        try:
            return codec.decode(data)
        except Exception:  # noqa: BLE001 - the bytes are the caller's
            field = ""
        charge(len(data))
        if codec.descriptor is not None:
            field = await asyncio.to_thread(field_at_fault, codec.descriptor, data)
        raise _undecodable(field)

    async def _shape_refusal(
        self, descriptor: Descriptor | None, data: bytes
    ) -> errors.InvalidArgument | None:
        """The error of a request that is not parsed, without the frames that hold its bytes."""
        if descriptor is None:
            return None
        is_long = len(data) >= STEP_BYTES
        try:
            for _ in walk(descriptor, data):
                is_long = True
                await asyncio.sleep(0)
        except ShapeError as error:
            if not error.rule:
                return _undecodable(error.field)
            return errors.InvalidArgument(error.field, error.rule, reason="TOO_MANY_ITEMS")
        if is_long:
            await asyncio.sleep(0)
        return None

    def _parsed(self, codec: Codec, data: bytes, charge: Charge) -> Any:
        try:
            return codec.decode(data)
        except Exception:  # noqa: BLE001 - as above
            field = ""
        charge(len(data))
        if codec.descriptor is not None:
            field = field_at_fault(codec.descriptor, data)
        raise _undecodable(field)


def overloaded() -> errors.ResourceExhausted:
    """The error of a large request that memory is too short for."""
    return errors.ResourceExhausted(
        "other large requests take all the memory for requests",
        reason="LARGE_REQUESTS",
        retry_after_ms=200,
    )


def _has_bytes(descriptor: Descriptor, above: tuple[str, ...] = ()) -> bool:
    """Whether a message of this type, or one in it, has a field of bytes."""
    if descriptor.full_name in above:
        return False
    above = (*above, descriptor.full_name)
    return any(
        field.type == FieldDescriptor.TYPE_BYTES
        or (field.message_type is not None and _has_bytes(field.message_type, above))
        for field in descriptor.fields
    )


def _undecodable(field: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(
        field, "the bytes do not decode as the request's type", reason="UNDECODABLE"
    )
