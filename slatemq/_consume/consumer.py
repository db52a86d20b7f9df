"""Consuming by a stream: messages as they come, fetched a little ahead, their leases kept."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, NamedTuple, NoReturn, Self

import grpc
import grpc.aio

from slatemq._cancelling import end_all, is_cancelled
from slatemq._checks import check_text, check_whole
from slatemq._consume.credit import CreditWindow
from slatemq._consume.delivered import (
    Claimed,
    Lease,
    LeaseKeeper,
    Origin,
    Received,
    claimed_of,
    received,
)
from slatemq._consume.finishing import Nack
from slatemq._consume.handles import shard_of
from slatemq._rpc.forks import refuse_pickling
from slatemq._rpc.outages import PROVEN_S, IngestWatch, Outage, OutageWatch, broker_of, timeout_of
from slatemq._rpc.peers import BACKOFF_S, BACKOFF_S_MAX, closed, pause_s, translated
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.errors import (
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    SlateMQError,
    Unauthenticated,
    Unavailable,
)
from slatemq.models import Duration, milliseconds, seconds
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc

log = logging.getLogger(__name__)

PREFETCH = 100
"""Messages that a consumer holds beyond the one in work: enough for some thousand a second."""

PREFETCH_MAX = 100_000
"""Credit that the server grants a stream."""

PREFETCH_BYTES = 32 << 20
"""Payload bytes that it holds at most, one message aside."""

HOLD_S = 3600.0
"""The longest time that the lease of an unfinished message is kept alive in the background."""

CLOSE_S = 5.0
"""The time for which closing a consumer waits for a broker that does not answer."""

NOT_RELEASED = (
    "the consumer could not give back %d of its messages, which come again once their leases have "
    "ended: %s"
)

PAUSED = "QUEUE_PAUSED"
"""The server's reason for delivering nothing: consumers wait until the queue is resumed."""


class ConsumeOptions(NamedTuple):
    """How to consume; see Client.consume."""

    prefetch: int = PREFETCH
    prefetch_bytes: int = PREFETCH_BYTES
    lease: Duration | None = None
    consumer_id: str = ""
    hold: Duration = HOLD_S
    outage_timeout: Duration | None = None

    @property
    def lease_ms(self) -> int:
        """The lease on the wire: 0 = the queue's."""
        return milliseconds(self.lease, "lease") if self.lease is not None else 0

    def check(self) -> None:
        """Raises InvalidArgument for what could not work."""
        check_whole("prefetch", self.prefetch, 1, PREFETCH_MAX)
        check_whole("prefetch_bytes", self.prefetch_bytes, 1)
        check_text("consumer_id", self.consumer_id)
        if self.lease is not None:
            milliseconds(self.lease, "lease")
        seconds(self.hold, "hold")
        timeout_of(self.outage_timeout)


class QueueConsumer(ABC):
    """What both kinds of consumers of a queue have: its partitions, and how they end."""

    def __init__(
        self,
        locations: QueueLocations,
        origin: Origin,
        keeper: LeaseKeeper,
        options: ConsumeOptions,
        on_close: Callable[[Any], None],
    ) -> None:
        options.check()
        self.queue_id = origin.queue_id
        self._locations = locations
        self._peers = locations.peers
        self._origin = origin
        self._keeper = keeper
        self._options = options
        self._hold_s = seconds(options.hold)
        self._error: SlateMQError | None = None
        self._closed = False
        self._parts: list[PartitionFetcher] = []
        self._on_close = on_close
        self._closing: asyncio.Task[None] | None = None
        self._timeout_s = timeout_of(options.outage_timeout)

    def __reduce__(self) -> NoReturn:
        raise refuse_pickling(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def close(self) -> None:
        """Stops, and releases the messages that were not taken, without counting an attempt.

        Keeps the leases of messages in work until they are finished or the client is closed. Waits
        for a broker that does not answer for 5 s at most. Where its task is cancelled, it goes on
        in the background. Again waits for that, and for what was acked since.
        """
        self._closed = True  # From now on no task takes a message.
        self._closing = asyncio.create_task(self._close_after(self._closing))
        self._origin.finisher.keep(self._closing)
        await asyncio.shield(self._closing)

    async def _close_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self._close()

    @abstractmethod
    async def _close(self) -> None: ...

    @abstractmethod
    def _part(self, index: int) -> PartitionFetcher:
        """What fetches from a partition."""

    @abstractmethod
    def _has_work(self) -> bool:
        """Whether anything waits to be taken."""

    @property
    def outage(self) -> Outage | None:
        """The outage of a broker, or of an ingest that messages wait for; None without one.

        Iterating waits for `outage_timeout`; meanwhile other partitions deliver.
        """
        outages = (part.watch.outage or part.ingests.outage for part in self._parts)
        return next((outage for outage in outages if outage is not None), None)

    def _give_up(self, error: Unavailable) -> None:
        self._fail(error)
        for part in self._parts:
            part.task.cancel()

    def _fail(self, error: SlateMQError) -> None:
        self._error = error

    def _begin(self, partitions_count: int = 1) -> None:
        """Fetches from so many partitions, unless this is closed."""
        if not self._closed:
            self._peers.check_home()
            for index in range(len(self._parts), partitions_count):
                self._parts.append(self._part(index))

    async def _end_parts(self) -> None:
        """Ends fetching from all partitions."""
        for part in self._parts:
            part.task.cancel()
        if self._parts:
            await asyncio.wait([part.task for part in self._parts])

    async def _settle(self, tokens: Sequence[str]) -> None:
        """Releases these, and waits for the acks in the background."""
        items = [Nack(token, release=True) for token in tokens]
        try:
            async with asyncio.timeout(CLOSE_S):
                results = await self._origin.finisher.nack_many(items)
                await self._origin.finisher.flush_acks()
        except (SlateMQError, TimeoutError) as error:
            why = error if isinstance(error, SlateMQError) else f"no answer within {CLOSE_S:g} s"
            log.warning(NOT_RELEASED, len(tokens), why)
            return
        refused = [result for result in results if result is not None]
        if refused:
            log.warning(NOT_RELEASED, len(refused), refused[0])


class PartitionFetcher(ABC):
    """What fetches from one partition of a queue, or from all of one without partitions."""

    def __init__(self, consumer: QueueConsumer, index: int) -> None:
        """Begin at once. `index` is that of the partition; the first finds out about the others."""
        self.index = index
        self.watch = OutageWatch(
            broker_of(consumer.queue_id), consumer._timeout_s, consumer._give_up
        )
        self.ingests = IngestWatch(
            consumer.queue_id, consumer._timeout_s, consumer._give_up, consumer._has_work
        )
        self.shard: int | None = None
        # Not in the trace in which the consumer began: it lasts for all its messages.
        self.task = asyncio.create_task(self.run(), context=Context())

    @abstractmethod
    async def run(self) -> None:
        """Fetches until the consumer is closed."""

    async def locate(self, consumer: QueueConsumer) -> int:
        """The shard of the partition. Raises as `QueueLocations.shards_of`."""
        if not self.index:
            consumer._begin(len(await consumer._locations.shards_of(consumer.queue_id)))
        self.shard = None
        self.shard = await consumer._locations.shard_of(consumer.queue_id, self.index)
        return self.shard

    def close(self) -> None:
        self.watch.close()
        self.ingests.close()


class Consumer(QueueConsumer):
    """Messages of one queue, as an asynchronous iterator and context manager; see Client.consume.

    Several tasks may iterate over one consumer: each message goes to one of them.
    """

    def __init__(
        self,
        locations: QueueLocations,
        origin: Origin,
        keeper: LeaseKeeper,
        options: ConsumeOptions,
        on_close: Callable[[Consumer], None],
    ) -> None:
        super().__init__(locations, origin, keeper, options, on_close)
        self._consumer_id = options.consumer_id
        self._buffer: deque[tuple[Received, Lease, _Stream]] = deque()
        self._streams: list[_Stream] = []
        self._arrived = asyncio.Event()

    async def __anext__(self) -> Received:
        """The next message; ends when the consumer is closed.

        Raises NotFound when the queue does not exist or is deleted, InvalidArgument when the
        server refuses the options; so does every later try.
        """
        if (telemetry := self._origin.telemetry) is None:
            return await self._next()
        with telemetry.receiving(self.queue_id, SlateMQError) as received:
            received.append(message := await self._next())
        return message

    async def _next(self) -> Received:
        if not self._parts:
            self._begin()
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
                return message

    @property
    def paused(self) -> bool:
        """Whether the queue is paused, as of the last try; iterating waits for its end."""
        return any(stream.is_paused for stream in self._streams)

    def _take(self) -> Received | None:
        """The first buffered message; None when its lease was lost, so that others may have it."""
        message, lease, stream = self._buffer.popleft()
        stream.taken(len(message._payload))
        if not self._buffer:
            for one in self._streams:
                one.ingests.progress()
        return message if self._keeper.take(lease) else None

    def requeue(self, message: Received) -> None:
        """Returns the message of a caller that was interrupted while it took it."""
        lease = lease_of(message)
        lease.buffered = True
        shard = shard_of(message.lease_token)
        stream = next((one for one in self._streams if one.shard == shard), self._streams[0])
        stream.requeued(len(message._payload))
        self._buffer.appendleft((message, lease, stream))
        self._arrived.set()

    async def _close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._arrived.set()
        streaming = [stream.task for stream in self._streams if stream.is_streaming]
        try:
            if streaming:
                await asyncio.wait(streaming, timeout=CLOSE_S)
        finally:
            tokens = [lease.token for _, lease, _ in self._buffer if not lease.refused]
            self._buffer.clear()
            self._keeper.drop_all(tokens)
            await self._end_parts()
            await self._settle(tokens)
            self._on_close(self)

    def _part(self, index: int) -> _Stream:
        stream = _Stream(self, index)
        self._streams.append(stream)
        return stream

    def _has_work(self) -> bool:
        return bool(self._buffer)

    def _fail(self, error: SlateMQError) -> None:
        super()._fail(error)
        self._arrived.set()

    def _receive(self, claimed: Claimed, stream: _Stream) -> None:
        for message in received(claimed, self._origin, self._hold_s):
            self._buffer.append((message, lease_of(message), stream))
            stream.buffered(len(message._payload))
        self._arrived.set()


class _Stream(PartitionFetcher):
    """Keeps a stream of one partition open. It gets an even share of the consumer's credit."""

    def __init__(self, consumer: Consumer, index: int) -> None:
        self._consumer = consumer
        self._options = consumer._options
        self._locations = consumer._locations
        self._peers = consumer._peers
        self.queue_id = consumer.queue_id
        self.is_streaming = False
        self._stopping = False
        self._paused = False
        self._has_received = False
        self._answered_at_s: float | None = None
        self._taken = asyncio.Event()
        self._taken_count = 0
        self._taken_bytes = 0
        self._has_granted = False
        self._window = CreditWindow(self._options.prefetch_bytes)
        self._buffered_count = 0
        self._buffered_bytes = 0
        super().__init__(consumer, index)

    @property
    def is_paused(self) -> bool:
        answered_at_s = self._answered_at_s
        return self._paused and (
            answered_at_s is None or time.monotonic() - answered_at_s < PROVEN_S
        )

    @property
    def _messages_share(self) -> int:
        return -(-self._options.prefetch // len(self._consumer._streams))

    @property
    def _bytes_share(self) -> int:
        share = -(-self._options.prefetch_bytes // len(self._consumer._streams))
        return min(share, self._window.size_bytes)

    def buffered(self, size_bytes: int) -> None:
        """Counts a message that came into the buffer."""
        self._buffered_count += 1
        self._buffered_bytes += size_bytes

    def taken(self, size_bytes: int) -> None:
        """Counts a message that was taken out of the buffer, whose credit is granted again."""
        self._buffered_count -= 1
        self._buffered_bytes -= size_bytes
        self._taken_count += 1
        self._taken_bytes += size_bytes
        if (
            self._taken_count * 2 >= self._messages_share
            or self._taken_bytes * 2 >= self._bytes_share
        ):
            self._taken.set()

    def requeued(self, size_bytes: int) -> None:
        """Counts a message that came back into the buffer."""
        self.buffered(size_bytes)
        self._taken_count -= 1
        self._taken_bytes -= size_bytes

    def close(self) -> None:
        """Stops the stream: messages on their way still arrive."""
        super().close()
        self._stopping = True
        self._taken.set()

    async def run(self) -> None:
        """Keeps a stream open until the consumer is closed or refused permanently."""
        backoff = BACKOFF_S
        self.watch.begin()
        while not self._consumer._closed:
            self._has_received = False
            refused: SlateMQError | None = None
            try:
                await self._stream()
            except (Unavailable, DeadlineExceeded, ResourceExhausted) as error:
                if error.reason == "CLIENT_CLOSED":
                    self._consumer._fail(error)
                    return
                log.debug("stream of %s broke: %s", self.queue_id, error)
                refused = error
                self.watch.begin(error)
                if not isinstance(error, ResourceExhausted):
                    self._peers.forget()
            except SlateMQError as error:
                if error.reason == PAUSED:
                    self.watch.end()
                    self._paused = True
                elif (final := await self._final(error)) is not None:
                    self._consumer._fail(final)
                    return
            except Exception as error:
                log.exception("the stream of %s ended by a fault", self.queue_id)
                self._consumer._fail(Internal(f"a fault of the client: {error!r}"))
                return
            if self._has_received:
                backoff = BACKOFF_S  # It worked: this is a new outage.
            if not self._consumer._closed:
                await asyncio.sleep(pause_s(refused, backoff))
            backoff = min(backoff * 2, BACKOFF_S_MAX)

    async def _final(self, error: SlateMQError) -> SlateMQError | None:
        """Why this ends, after a stream was refused; None where the next try asks again."""
        try:
            moved = await self._locations.may_have_moved(
                self.queue_id, self.shard, error, self.index
            )
        except ResourceExhausted as problem:
            log.debug("where %s is cannot be asked now: %s", self.queue_id, problem)
            return None
        except SlateMQError as problem:
            return problem
        return None if moved else error

    async def _stream(self) -> None:
        """One stream, to its end. Raises why it ended, unless this consumer stopped it."""
        self._answered_at_s = None
        proof = self._peers.proof
        shard = await self.locate(self._consumer)
        channel = await self._peers.broker(shard)
        stub: Any = consumer_pb2_grpc.ConsumerServiceStub(channel)
        call = stub.Consume(metadata=self._locations.naming(self.queue_id, self.index))
        writing = asyncio.create_task(self._write_all(call))
        self.is_streaming = True
        try:
            await self._receive_all(call, shard)
        except Unauthenticated as error:
            raise self._peers.renewed(error, proof) from None
        finally:
            self.is_streaming = False
            self.ingests.close()
            await end_all([writing])
            call.cancel()

    async def _receive_all(self, call: Any, shard: int) -> None:
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                self._consumer._consumer_id = answer.consumer_id
                if self._answered_at_s is None:
                    self._note_count(answer.partitions_count)
                self.watch.end_soon()
                self._answered_at_s = self._answered_at_s or time.monotonic()
                self._receive(claimed_of(answer))
        except grpc.RpcError as error:
            raise translated(error, self._peers.process("broker", shard)) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise closed() from None  # The channel was closed under the stream.
        if not self._consumer._closed:
            raise Unavailable("the stream ended", reason="STREAM_ENDED")

    def _note_count(self, partitions_count: int) -> None:
        """Raises Unavailable where this shard may have another partition: it is looked up again."""
        if self._locations.note_count(self.queue_id, partitions_count):
            raise Unavailable("the queue has other partitions now", reason="PARTITIONS_CHANGED")

    def _start(self) -> consumer_pb2.ConsumeStart:
        self._taken_count = self._taken_bytes = 0
        self._taken.clear()
        self._window = CreditWindow(self._options.prefetch_bytes)  # It may be another link.
        count = self._messages_share - self._buffered_count
        room = self._bytes_share - self._buffered_bytes
        start = consumer_pb2.ConsumeStart(
            queue_id=self.queue_id,
            lease_ms=self._options.lease_ms,
            consumer_id=self._consumer._consumer_id,
        )
        self._has_granted = count > 0 and room > 0
        if self._has_granted:
            start.credit.messages_count = count
            start.credit.payload_bytes = room
            self._window.granted(room, time.monotonic())
        else:  # Granted with what is taken, or the stream would never have more than that.
            self._taken_count, self._taken_bytes = count, room
        return start

    async def _write_all(self, call: Any) -> None:
        """Starts the stream, grants what is taken out of the buffer, and stops it at the end."""
        try:
            await call.write(consumer_pb2.ConsumeRequest(start=self._start()))
            while not self._stopping:
                await self._taken.wait()
                self._taken.clear()
                await self._grant(call)
            # Messages on their way still arrive: dropping them would count an attempt.
            await call.write(consumer_pb2.ConsumeRequest(stop=consumer_pb2.ConsumeStop()))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            log.debug("nothing can be written to a stream: %r", error)  # The reader gets the error.

    async def _grant(self, call: Any) -> None:
        count, size = self._taken_count, self._taken_bytes
        # Bytes are unlimited until some are granted.
        is_limited = size or (count and self._has_granted)
        if min(count, size) < 0 or not is_limited or self._stopping:
            return
        self._has_granted = True
        self._taken_count = self._taken_bytes = 0
        self._window.granted(size, time.monotonic())
        credit = consumer_pb2.ConsumeCredit(messages_count=count, payload_bytes=size)
        await call.write(consumer_pb2.ConsumeRequest(credit=credit))

    def _grow(self, received_bytes: int) -> None:
        """Grants more than was taken, where the link has carried what was granted."""
        before = self._bytes_share
        self._window.received(received_bytes, time.monotonic())
        if self._bytes_share > before:
            self._taken_bytes += self._bytes_share - before
            self._taken.set()

    def _receive(self, claimed: Claimed) -> None:
        self.ingests.note(claimed.awaited_shards)
        if claimed.payloads:
            self._grow(sum(map(len, claimed.payloads)))
            self._has_received = True
            self._paused = False
            self.watch.end()
            self.ingests.progress()
            self._consumer._receive(claimed, self)


def lease_of(message: Received) -> Lease:
    assert message._lease is not None, "a consumer's messages have kept leases"
    return message._lease
