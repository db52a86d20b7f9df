"""Requests on a stream to their ingest shard: a quarter of the work of a call for each.

A stream never repeats a request. After any failure (it breaks, an answer is late, the server says
to wait) the caller gets the error, and sends the request again under the same ID to the same shard.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio

from slatemq._cancelling import end_all
from slatemq._publish.published import Published, published
from slatemq._publish.shards import IngestShards, Liveness
from slatemq._publish.wire import numbered
from slatemq._rpc.peers import (
    HOPELESS,
    NOT_CONNECTED,
    Peers,
    connect_s,
    not_connected,
    translated,
)
from slatemq._rpc.rpc_status import from_status
from slatemq.errors import DeadlineExceeded, ResourceExhausted, SlateMQError, Unavailable
from slatemq.v1 import ingest_pb2

ATTEMPT_S: Final = 30.0
"""The limit of a request on a stream, which is small: then it is sent by a call."""

BYTES_MAX: Final = 1 << 20
"""Larger requests are sent by calls, so that others do not wait behind them."""

IDLE_S: Final = 30.0
"""A stream is ended when it was not used for this long, so that idle clients cost no call."""

END_S: Final = 1.0
"""How long a closing client waits for an ingest to end a stream."""

AVOID_S: Final = 1.0
"""The time without a new stream after one broke."""

STREAMS_MAX: Final = 8
"""Streams that a client opens for messages that may go to any shard."""

STREAMS_LIMIT: Final = "PRINCIPAL_LIMIT"
"""Ends a stream that exceeds the limit; limits of publishes are answered for each request."""

_METHOD: Final = "/slatemq.v1.IngestService/PublishStream"

Answer = Callable[["list[Published] | SlateMQError"], None]


class _Sent(NamedTuple):
    """A request without an answer; it fails at `until`, by the loop's time."""

    answer: Answer
    until: float


class PublishStreams:
    """At most one stream to each ingest shard."""

    def __init__(self, peers: Peers, shards: IngestShards) -> None:
        self._peers = peers
        self._shards = shards
        self._streams: dict[int, PublishStream] = {}
        self._avoided: dict[int, float] = {}
        self._alive: dict[PublishStream, None] = {}

    def for_shard(self, shard: int | None) -> PublishStream | None:
        """The stream to this shard; for None that to any, an idle one where there is one.

        Opens it as needed. None where the address of the shard is unknown, or its stream just
        broke: send by calls then.
        """
        if shard is not None:
            return self._stream(shard)
        least: PublishStream | None = None
        for one in self._shards.in_turn():
            if one not in self._streams and len(self._streams) >= STREAMS_MAX:
                continue
            stream = self._stream(one)
            if stream is not None and (
                least is None or stream.in_flight_count < least.in_flight_count
            ):
                least = stream
                if not stream.in_flight_count:
                    break
        return least

    def _stream(self, shard: int) -> PublishStream | None:
        stream = self._streams.get(shard)
        if stream is not None:
            return stream
        if self._avoided.get(shard, 0.0) > time.monotonic():
            return None
        channel = self._peers.known_ingest(shard)
        if channel is None:
            return None
        shards = self._shards
        # Not in the trace of the message that happens to come first: its context would stay.
        stream = self._streams[shard] = Context().run(
            PublishStream,
            self._peers,
            channel,
            shard,
            self._on_ended,
            shards.liveness(shard),
            lambda: shards.are_several,
        )
        self._alive[stream] = None
        stream.reading.add_done_callback(lambda _: self._alive.pop(stream, None))
        return stream

    def _on_ended(self, stream: PublishStream, error: SlateMQError | None) -> None:
        if self._streams.get(stream.shard) is stream:
            del self._streams[stream.shard]
        if error is not None:
            self._avoided[stream.shard] = time.monotonic() + AVOID_S

    async def close(self) -> None:
        """Ends all of them; requests without an answer fail."""
        for stream in list(self._alive):
            await stream.close()


class PublishStream:
    """One stream; the task `reading` ends with it."""

    def __init__(
        self,
        peers: Peers,
        channel: grpc.aio.Channel,
        shard: int,
        on_ended: Callable[[PublishStream, SlateMQError | None], None],
        liveness: Liveness,
        has_several: Callable[[], bool],
    ) -> None:
        """Opens the stream; calls `on_ended` when it takes no more requests.

        While `has_several` ingests are known, nothing is written before the `liveness` of this one
        is proven: a request that was not written may go to another one.
        """
        self.shard = shard
        self._peers = peers
        self._proof = peers.proof
        self._on_ended = on_ended
        self._channel = channel
        self._liveness = liveness
        self._has_several = has_several
        self._call: Any = channel.stream_stream(
            _METHOD, response_deserializer=ingest_pb2.PublishStreamResponse.FromString
        )()
        self._loop = asyncio.get_running_loop()
        self._unanswered: dict[int, _Sent] = {}
        self._number = 0
        self._queue: deque[tuple[int, bytes]] = deque()
        self._wanted: asyncio.Future[None] | None = None
        self._is_over = False
        self._is_connected = False
        self._connecting: asyncio.TimerHandle | None = None
        self._used_at = self._loop.time()
        self._timer = self._loop.call_later(IDLE_S, self._look)
        self._writing = asyncio.create_task(self._write())
        self.reading = asyncio.create_task(self._read())

    @property
    def _process(self) -> str:
        return self._peers.process("ingest", self.shard)

    @property
    def in_flight_count(self) -> int:
        """The number of requests without an answer."""
        return len(self._unanswered)

    def send(self, request: bytes, answer: Answer, until: float) -> None:
        """Sends an encoded PublishRequest.

        Calls `answer` with its outcome once, by `until` (loop time) at the latest. An outcome that
        is unknown is Unavailable or DeadlineExceeded.
        """
        now = self._loop.time()
        self._number += 1
        if not self._is_connected and self._connecting is None:
            timeout_s = connect_s(until - now)
            self._connecting = self._loop.call_later(timeout_s, self._give_up, timeout_s)
        sent = _Sent(answer, min(until, now + ATTEMPT_S))
        self._unanswered[self._number] = sent
        self._used_at = now
        self._queue.append((self._number, request))
        _wake(self._wanted)
        if sent.until < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(sent.until, self._look)

    async def close(self) -> None:
        """Ends the stream; requests without an answer are Unavailable."""
        self._end(None)
        if self._is_connected and not self._unanswered:
            # A cancelled call stays with gRPC for a while, and keeps a fork right after from
            # connecting. One that the server ends is over.
            await asyncio.wait([self._writing, self.reading], timeout=END_S)
            if self.reading.done():
                await self._call.code()
        self._call.cancel()
        await end_all([self._writing, self.reading])
        self._return_unanswered(Unavailable("the stream was closed", reason="STREAM_ENDED"))

    # --- What comes and goes ------------------------------------------------

    async def _write(self) -> None:
        # Where writing fails the call has ended: `_read` gets the error.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.wait_for_connection()
            self._is_connected = True
            if self._connecting is not None:
                self._connecting.cancel()
            while True:
                while self._queue:
                    await self._write_next()
                if self._is_over:
                    await self._call.done_writing()
                    return
                self._wanted = self._loop.create_future()
                await self._wanted

    async def _write_next(self) -> None:
        """Writes the first request of the queue, unless it has waited for too long, and failed."""
        number, request = self._queue[0]
        sent = self._unanswered.get(number)
        if sent is None:
            self._queue.popleft()
            return
        if self._has_several() and not self._liveness.is_fresh:
            await self._prove(self._left_ms(sent) / 1000)
        if self._queue:
            self._queue.popleft()
            await self._call.write(numbered(number, request, self._left_ms(sent)))

    def _left_ms(self, sent: _Sent) -> int:
        """The rest of its time; 1 at least, since 0 says nothing to an ingest."""
        return max(int((sent.until - self._loop.time()) * 1000), 1)

    async def _prove(self, left_s: float) -> None:
        """Waits for a sign of life; without one the stream ends."""
        try:
            await self._liveness.prove(self._channel, connect_s(left_s), self._process)
        except Unavailable as error:
            self._break(error)

    async def _read(self) -> None:
        error: SlateMQError = Unavailable("the stream ended", reason="STREAM_ENDED")
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._liveness.answered()
                for answer in response.answers:
                    self._answered(answer)
            self._end(None if self._is_over else error)
        except grpc.RpcError as broken:
            error = self._peers.renewed(translated(broken, self._process), self._proof)
            self._end(error)
        except asyncio.CancelledError:
            self._end(error)
            raise
        finally:
            self._return_unanswered(error)

    def _answered(self, answer: ingest_pb2.PublishStreamAnswer) -> None:
        sent = self._unanswered.pop(answer.number, None)
        if sent is None:
            return  # It came too late: the request has failed.
        if answer.HasField("error"):
            sent.answer(from_status(answer.error))
            return
        value = answer.published
        sent.answer(
            published(value.message_ids, value.received_at_ms, value.duplicates, value.task_id)
        )

    # --- Its end ------------------------------------------------------------

    def _look(self) -> None:
        """Fails requests that have waited for too long; ends a stream that is not used."""
        now = self._loop.time()
        late = [number for number, sent in self._unanswered.items() if sent.until <= now]
        for number in late:
            self._unanswered.pop(number).answer(DeadlineExceeded("no answer in time"))
        if self._unanswered:
            at = min(sent.until for sent in self._unanswered.values())
        elif now - self._used_at >= IDLE_S:
            self._end(None)
            return
        else:
            at = self._used_at + IDLE_S
        self._timer = self._loop.call_at(at, self._look)

    def _give_up(self, waited_s: float) -> None:
        """Ends a stream that did not connect: its requests may go elsewhere."""
        if self._is_connected or not self._unanswered:
            return
        self._break(not_connected(waited_s, self._process))

    def _break(self, error: SlateMQError) -> None:
        """Ends the stream now: requests that were not written may go elsewhere."""
        self._end(error)
        self._call.cancel()
        self._return_unanswered(error)

    def _end(self, error: SlateMQError | None) -> None:
        """Takes no more requests: because of an error, or since the stream is not used."""
        self._timer.cancel()
        if not self._is_over:
            self._is_over = True
            self._on_ended(self, error)
        _wake(self._wanted)

    def _return_unanswered(self, error: SlateMQError) -> None:
        """Fails the requests without an answer."""
        # A request that was not written may be stored by another ingest.
        unwritten = {number for number, _ in self._queue}
        not_sent = Unavailable(error.message, reason=NOT_CONNECTED)
        self._queue.clear()
        is_of_a_request = isinstance(error, Unavailable | ResourceExhausted)
        of_the_stream = (*HOPELESS, NOT_CONNECTED, STREAMS_LIMIT)
        if not is_of_a_request or error.reason in of_the_stream:
            # The error is not about a single request: a call of its own will show.
            error = Unavailable(error.message, reason="STREAM_BROKEN", retry_after_ms=0)
        unanswered, self._unanswered = self._unanswered, {}
        for number, sent in unanswered.items():
            sent.answer(not_sent if number in unwritten else error)


def _wake(sleeper: asyncio.Future[None] | None) -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)
