"""Consume: claims as a stream, by credit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from libs.access.current import caller_name, caller_quota, require
from libs.serving.requests.doors import current_visit
from libs.serving.requests.guard import encoded
from services.broker.core.queue import Queue
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.lease_keeper import LeaseKeeper
from services.broker.delivery.responses import (
    consumer_id,
    encode_messages,
    lease_length,
    release,
    stopping,
    too_late,
)
from services.broker.delivery.waiters import Stream, paused
from services.broker.requests.limits import lease_ms_of
from services.broker.requests.queues import checked_id
from services.broker.shard.owner import ShardOwner
from slatemq.errors import Internal, InvalidArgument, SlateMQError
from slatemq.v1 import consumer_pb2

log = logging.getLogger(__name__)

Requests = AsyncIterator[consumer_pb2.ConsumeRequest]


@dataclass(eq=False)
class Streams:
    _shard: int
    _owner: ShardOwner
    _delivery: Dispatcher
    _keeper: LeaseKeeper
    _draining: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def consume(
        self, requests: Requests
    ) -> AsyncGenerator[consumer_pb2.ConsumeResponse, None]:
        """One stream, from its first request to its end."""
        with self._delivery.places.place(caller_quota()):
            start = await self._start_of(requests)
            queue_id = checked_id(start.queue_id, "start.queue_id")
            asked_ms = lease_ms_of("start.lease_ms", start.lease_ms)
            consumer = consumer_id(start.consumer_id, "start.consumer_id")
            queue = await self._owner.find(queue_id)
            stream = Stream(consumer, lease_length(asked_ms, queue), keep_leases=start.keep_leases)
            stream.principal = caller_name()
            stream.quota = caller_quota()
            stream.heard(self._owner.clock.now_ms())
            if start.HasField("credit"):
                stream.grant(start.credit, "start.credit")
            if queue.settings.paused:
                stream.failed(paused(queue))
            self._delivery.streams[stream] = queue
            reading = asyncio.create_task(self._read(requests, queue, stream))
            try:
                yield consumer_pb2.ConsumeResponse(
                    consumer_id=consumer, partitions_count=queue.settings.partitions_count
                )
                while answer := await self._next_answer(queue, stream):
                    yield answer
                    del answer
                    self._delivery.sent(stream.sent(), stream.principal)
            finally:
                reading.cancel()
                stream.is_closed = True
                del self._delivery.streams[stream]
                self._delivery.remove(queue, stream)
                batches = stream.take_back()
                self._delivery.sent((*stream.sent(), *batches), stream.principal)
                await release(self._owner, batches)

    def drain(self) -> None:
        """Ends the streams that have not begun; the others are `Dispatcher.drain`'s."""
        self._draining.set()

    async def _start_of(self, requests: Requests) -> consumer_pb2.ConsumeStart:
        reading = asyncio.ensure_future(_first(requests))
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait({reading, draining}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise stopping()
            first = reading.result()
        finally:
            reading.cancel()
            draining.cancel()
        if first is None or first.WhichOneof("action") != "start":
            raise InvalidArgument("start", "must be the first request of the stream")
        return first.start

    async def _next_answer(
        self, queue: Queue, stream: Stream
    ) -> consumer_pb2.ConsumeResponse | None:
        """What the stream sends next; None at its end. Raises what ended it."""
        while True:
            self._line_up(queue, stream)
            batches = await stream.next()
            if batches is not None and not batches:
                return self._head(stream)
            await self._owner.durable()
            if batches is None:
                if stream.error is not None:
                    raise stream.error
                return None
            if too_late(self._owner, batches):
                batches = stream.take_back()
                self._delivery.sent(batches, stream.principal)
                await release(self._owner, batches)
                continue
            head = self._head(stream).SerializeToString()
            encoding = await encode_messages(self._shard, batches, head)
            answer = encoded(consumer_pb2.ConsumeResponse, encoding)
            # While its messages can still be released: the guard would withhold it with them.
            await current_visit.get().renew()
            if stream.keep_leases:
                # Some may have ended while the commit was on its way: purged, or their queue gone.
                tokens = [token for one in batches for token in one.claimed.tokens]
                running = map(self._owner.shard.leases.running, tokens)
                self._keeper.keep(stream, list(filter(None, running)))
            stream.sending()
            return answer

    def _head(self, stream: Stream) -> consumer_pb2.ConsumeResponse:
        """An answer without its messages."""
        return consumer_pb2.ConsumeResponse(
            consumer_id=stream.consumer, awaited_ingest_shards=stream.sending_shards()
        )

    async def _read(self, requests: Requests, queue: Queue, stream: Stream) -> None:
        try:
            async for request in requests:
                require("consume", queue.queue_id)  # The policy may have changed since the start.
                stream.heard(self._owner.clock.now_ms())
                self._take(request, queue, stream)
            stream.no_more_credit()
        except SlateMQError as error:
            self._end(queue, stream, error)
        except Exception:
            log.exception("reading the requests of a stream failed")
            self._end(queue, stream, Internal("internal error; the service's log says more"))

    def _end(self, queue: Queue, stream: Stream, error: SlateMQError) -> None:
        stream.failed(error)
        # Before the commit, which its consumer waits for: others are behind it in line.
        self._delivery.remove(queue, stream)

    def _take(self, request: consumer_pb2.ConsumeRequest, queue: Queue, stream: Stream) -> None:
        action = request.WhichOneof("action")
        if stream.is_stopped:
            raise InvalidArgument(action or "stop", "nothing may follow the stop of a stream")
        match action:
            case "credit":
                stream.grant(request.credit, "credit")
                self._line_up(queue, stream)
            case "heartbeat":
                pass
            case "stop":
                stream.stop()
                self._delivery.remove(queue, stream)
            case _:
                raise InvalidArgument(
                    action or "credit", "only credit, heartbeats and a stop may follow the start"
                )

    def _line_up(self, queue: Queue, stream: Stream) -> None:
        """Puts the stream in line, if it wants anything."""
        if stream.wants:
            try:
                self._delivery.add(queue, stream)
            except SlateMQError as error:
                stream.failed(error)


async def _first(requests: Requests) -> consumer_pb2.ConsumeRequest | None:
    return await anext(requests, None)
