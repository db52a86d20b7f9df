"""Consuming by a stream: messages as they come, fetched a little ahead, their leases kept."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from slatemq.delivered import Batch, Origin, Received
from slatemq.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.finishing import Finisher, Nack
from slatemq.keeping import Lease, LeaseKeeper
from slatemq.models import Span, milliseconds, seconds
from slatemq.peers import BACKOFF_S, BACKOFF_S_MAX, Peers, closed, translated
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc

__all__ = ["Batch", "Consumer", "Received"]

log = logging.getLogger(__name__)

PREFETCH = 100
"""Messages that a consumer holds beyond the one in work: enough for some thousand a second."""

PREFETCH_MAX = 100_000
"""Credit that the server grants a stream."""

PREFETCH_BYTES = 32 << 20
"""Payload bytes that it holds at most, one message aside."""

HOLD_S = 3600.0
"""How long a message's lease is kept alive in the background, as long as nobody finishes it."""

CLOSE_S = 5.0
"""How long closing a consumer waits for a broker that does not answer."""

PROVEN_S = 1.0
"""A stream that brought nothing and broke sooner does not count as an end of the outage."""

QUIET_S = 0.05
"""A closing consumer takes in what is on its way until nothing has come for so long."""


class Wish(NamedTuple):
    """How to consume; see Client.consume."""

    prefetch: int = PREFETCH
    prefetch_bytes: int = PREFETCH_BYTES
    lease: Span | None = None
    consumer_id: str = ""
    hold: Span = HOLD_S

    @property
    def lease_ms(self) -> int:
        """The lease on the wire: 0 = the queue's."""
        return milliseconds(self.lease) if self.lease is not None else 0

    def check(self) -> None:
        """Raises InvalidArgument for what could not work."""
        if not 1 <= self.prefetch <= PREFETCH_MAX:
            raise InvalidArgument("prefetch", f"must be 1 to {PREFETCH_MAX:,}")
        if self.prefetch_bytes < 1:
            raise InvalidArgument("prefetch_bytes", "must be at least 1")
        if seconds(self.hold) < 0:
            raise InvalidArgument("hold", "may not be negative")


class Outage(NamedTuple):
    """That a consumer has no stream: since when, by the monotonic clock, and why not."""

    since_s: float
    error: SlateMQError


class Consumer:
    """Messages of one queue, as an asynchronous iterator and context manager; see Client.consume.

    Several tasks may iterate over one consumer: each message goes to one of them.
    """

    def __init__(
        self,
        peers: Peers,
        origin: Origin,
        keeper: LeaseKeeper,
        wish: Wish,
        on_close: Callable[[Consumer], None],
    ) -> None:
        """Made by the client."""
        wish.check()
        self.queue_id = origin.queue_id
        self._peers = peers
        self._origin = origin
        self._finisher: Finisher = origin.finisher
        self._keeper = keeper
        self._wish = wish
        self._hold_s = seconds(wish.hold)
        self._consumer_id = wish.consumer_id
        self._buffer: deque[tuple[Received, Lease]] = deque()
        self._buffer_bytes = 0
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._taken_count = 0
        self._taken_bytes = 0
        self._outstanding = 0
        self._has_received = False
        self._error: SlateMQError | None = None
        self._closed = False
        self._stopping = asyncio.Event()
        self._streaming = False
        self._down_since_s = 0.0
        self._up_since_s: float | None = None
        self._broke_by: SlateMQError | None = None
        self._task: asyncio.Task[None] | None = None
        self._on_close = on_close

    async def __aenter__(self) -> Consumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Received:
        """The next message; ends when the consumer is closed.

        Raises NotFound when the queue does not exist or is deleted, InvalidArgument when the
        server refuses the wish; so does every later try.
        """
        if self._task is None and not self._closed:
            self._peers.check_home()
            self._task = asyncio.create_task(self._run())
        began_ns = time.time_ns() if self._origin.telemetry is not None else 0
        while True:
            while not self._buffer or self._closed:
                if self._closed:
                    raise StopAsyncIteration
                if self._error is not None:
                    raise self._error
                self._arrived.clear()
                await self._arrived.wait()
            message = self._take()
            if message is not None:
                break
        if self._origin.telemetry is not None:
            self._origin.telemetry.received(self.queue_id, began_ns, [message._wire])
        return message

    @property
    def outage(self) -> Outage | None:
        """Since when the broker cannot be reached; None while it can, or before the first try.

        Iterating waits for the broker for as long as it takes: who wants to give up looks here.
        """
        if self._up_since_s is not None or self._broke_by is None:
            return None
        return Outage(self._down_since_s, self._broke_by)

    def _take(self) -> Received | None:
        """The first buffered message; None when its lease was lost, so that others may have it."""
        message, lease = self._buffer.popleft()
        size = len(message.payload)
        self._buffer_bytes -= size
        self._taken_count += 1
        self._taken_bytes += size
        wish = self._wish
        if self._taken_count * 2 >= wish.prefetch or self._taken_bytes * 2 >= wish.prefetch_bytes:
            self._taken.set()
        lease.buffered = False
        return None if lease.lost else message

    def put_back(self, message: Received) -> None:
        """For a caller that was interrupted while it took the message: it is the next again."""
        lease = message._lease
        assert lease is not None, "a consumer's messages have kept leases"
        lease.buffered = True
        size = len(message.payload)
        self._buffer.appendleft((message, lease))
        self._buffer_bytes += size
        self._taken_count -= 1
        self._taken_bytes -= size
        self._arrived.set()

    async def close(self) -> None:
        """Stops, and gives back what nobody has begun with, without counting an attempt.

        Leases of messages in work are kept on until they are finished or the client is closed. A
        broker that does not answer is waited for 5 s at most.
        """
        self._closed = True
        self._stopping.set()
        self._arrived.set()
        try:
            if self._task is not None and self._streaming:
                await asyncio.wait([self._task], timeout=CLOSE_S)
        finally:
            if self._task is not None:
                self._task.cancel()
            tokens = [lease.token for _, lease in self._buffer if not lease.lost]
            self._buffer.clear()
            self._buffer_bytes = 0
            self._keeper.drop_all(tokens)
            self._on_close(self)
            if self._task is not None:
                await asyncio.wait([self._task])
            await self._settle(tokens)

    async def _settle(self, tokens: Sequence[str]) -> None:
        """Gives these back, and waits for the acks in the background."""
        items = [Nack(token, release=True) for token in tokens]
        try:
            async with asyncio.timeout(CLOSE_S):
                results = await self._finisher.nack_many(items)
                await self._finisher.flush_acks()
        except (SlateMQError, TimeoutError) as error:
            log.warning("%d messages could not be given back in time: %r", len(tokens), error)
            return
        refused = [result for result in results if result is not None]
        if refused:
            log.warning("%d messages could not be given back: %s", len(refused), refused[0])

    async def _run(self) -> None:
        """Keeps a stream open until the consumer is closed or refused for good."""
        backoff = BACKOFF_S
        self._down_since_s = time.monotonic()
        while not self._closed:
            self._has_received = False
            try:
                await self._stream()
            except (Unavailable, DeadlineExceeded, ResourceExhausted) as error:
                if error.reason == "CLIENT_CLOSED":
                    self._fail(error)
                    return
                log.debug("stream of %s broke: %s", self.queue_id, error)
                self._broke(error)
                self._peers.forget()
            except SlateMQError as error:
                if isinstance(error, NotFound):
                    self._peers.moved(self.queue_id)
                self._fail(error)
                return
            except Exception as error:
                log.exception("the stream of %s ended by a fault", self.queue_id)
                self._fail(Internal(f"a fault of the client: {error!r}"))
                return
            if self._has_received:
                backoff = BACKOFF_S  # It worked: this is a new outage.
            if not self._closed:
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, BACKOFF_S_MAX)

    def _broke(self, error: SlateMQError) -> None:
        now_s, up_since_s = time.monotonic(), self._up_since_s
        if up_since_s is not None and (self._has_received or now_s - up_since_s >= PROVEN_S):
            self._down_since_s = now_s
        self._up_since_s = None
        self._broke_by = error

    def _fail(self, error: SlateMQError) -> None:
        self._error = error
        self._arrived.set()

    async def _stream(self) -> None:
        """One stream, to its end. Raises why it ended."""
        channel = await self._peers.broker(await self._peers.broker_of(self.queue_id))
        stub: Any = consumer_pb2_grpc.ConsumerServiceStub(channel)
        call = stub.Consume()
        reading = asyncio.create_task(self._receive_all(call))
        work = [
            reading,
            asyncio.create_task(self._grant(call)),
            asyncio.create_task(self._until_stopping()),
        ]
        self._streaming = True
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            if self._closed:
                await self._until_quiet(reading)
            for task in done:
                task.result()
        finally:
            self._streaming = False
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            call.cancel()

    async def _until_stopping(self) -> None:
        await self._stopping.wait()

    async def _receive_all(self, call: Any) -> None:
        try:
            await call.write(consumer_pb2.ConsumeRequest(start=self._start()))
            self._up_since_s = time.monotonic()
            while (answer := await call.read()) is not grpc.aio.EOF:
                self._consumer_id = answer.consumer_id
                self._receive(answer.messages)
        except grpc.RpcError as error:
            raise translated(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise closed() from None  # The channel was closed under the stream.
        raise Unavailable("the stream ended", reason="STREAM_ENDED")

    async def _until_quiet(self, reading: asyncio.Future[None]) -> None:
        """Takes in what the broker has sent already: what is dropped here would burn an attempt.

        When all credit is used up, nothing more can be on its way.
        """
        while self._outstanding > 0 and not reading.done():
            before = self._outstanding
            await asyncio.wait([reading], timeout=QUIET_S)
            if self._outstanding == before:
                return

    def _start(self) -> consumer_pb2.ConsumeStart:
        self._taken_count = self._taken_bytes = 0
        self._taken.clear()
        count = self._wish.prefetch - len(self._buffer)
        room = self._wish.prefetch_bytes - self._buffer_bytes
        start = consumer_pb2.ConsumeStart(
            queue_id=self.queue_id, lease_ms=self._wish.lease_ms, consumer_id=self._consumer_id
        )
        self._outstanding = 0
        if count > 0 and room > 0:
            start.credit.messages_count = self._outstanding = count
            start.credit.payload_bytes = room
        return start

    async def _grant(self, call: Any) -> None:
        """Grants what the consumer has taken out of the buffer, a good part at a time."""
        try:
            while True:
                await self._taken.wait()
                self._taken.clear()
                count, size = self._taken_count, self._taken_bytes
                if count < 1 or self._stopping.is_set():
                    continue
                self._taken_count = self._taken_bytes = 0
                self._outstanding += count
                credit = consumer_pb2.ConsumeCredit(
                    messages_count=count, payload_bytes=max(size, 0)
                )
                await call.write(consumer_pb2.ConsumeRequest(credit=credit))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            log.debug("no credit could be granted: %r", error)  # The reader hears why.
            await asyncio.Event().wait()

    def _receive(self, messages: Any) -> None:
        for wire in messages:
            lease = self._keeper.hold(wire.lease_token, wire.lease_ms, self._hold_s)
            message = Received(wire, self._origin, lease)
            self._buffer.append((message, lease))
            self._buffer_bytes += len(message.payload)
        if messages:
            self._outstanding -= len(messages)
            self._has_received = True
            self._arrived.set()
