"""Publishing: single messages are gathered into requests, and every request may be repeated safely.

Each request carries a request ID of its own and sticks to one ingest shard: within ten minutes, a
repeat of a publish whose outcome is unknown stores nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

import grpc

from slatemq.errors import InvalidArgument, ResourceExhausted, SlateMQError, Unavailable
from slatemq.models import BatchSettings, OutgoingMessage
from slatemq.peers import Peers, closed
from slatemq.room import Room
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc

if TYPE_CHECKING:
    from slatemq.otel import Telemetry

log = logging.getLogger(__name__)

ATTEMPT_S = 30.0
"""How long one try of a publish may take: it may have 64 MiB, and a store may be slow."""

REPEAT_S_MAX = 540.0
"""How long a publish is repeated at most: the server knows its request ID for 600 s."""

AWAY_S = 5.0
"""How long new requests avoid a shard that could not be reached, where there are others."""

_PLACE = re.compile(r"messages\[(\d+)\]\.?(.*)", re.DOTALL)


class _Batch:
    """A request that is being gathered, and who waits for which of its messages."""

    __slots__ = ("answers", "request", "size")

    def __init__(self) -> None:
        self.request = ingest_pb2.PublishRequest()
        self.answers: list[asyncio.Future[int]] = []
        self.size = 0


class Publisher:
    """Gathers single publishes; sends them in the background."""

    def __init__(
        self, peers: Peers, settings: BatchSettings, telemetry: Telemetry | None = None
    ) -> None:
        """Publish through these peers."""
        settings.check()
        self._peers = peers
        self.settings = settings
        self._telemetry = telemetry
        self._room = Room(settings.outstanding_bytes_max)
        self._open = _Batch()
        self._full: deque[_Batch] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._lingered = False
        self._sending: set[asyncio.Task[None]] = set()
        self._next_shard = 0
        self._away: dict[int, float] = {}
        self._entering = 0
        self._closed = False

    # --- Single messages ----------------------------------------------------

    async def publish(self, message: OutgoingMessage) -> int:
        """Publishes one message; returns its ID when it is durable."""
        if self._telemetry is None:
            return await self._publish(ingest_pb2.PublishRequest(), message)
        request = ingest_pb2.PublishRequest()
        _add(request, message)
        with self._telemetry.publishing(request.messages, is_batch=False):
            return await self._publish(request, message)

    async def _publish(self, traced: ingest_pb2.PublishRequest, message: OutgoingMessage) -> int:
        self._peers.check_home()
        if self._closed:
            raise closed()
        size = size_of(message)
        if not self._room.try_take(size):
            self._entering += 1
            try:
                await self._room.take(size)
            finally:
                self._entering -= 1
        try:
            answer = self._gather(traced, message, size)
        except InvalidArgument as error:
            self._room.give_back(size)
            raise _moved(error, "message") from error
        # A caller that gives up does not take its message back: it is on its way.
        return await answer

    def _gather(
        self, traced: ingest_pb2.PublishRequest, message: OutgoingMessage, size: int
    ) -> asyncio.Future[int]:
        """Adds it to the open request, or begins another one."""
        settings = self.settings
        if self._open.answers and self._open.size + size > settings.payload_bytes_max:
            self._seal()
        batch = self._open
        if traced.messages:
            batch.request.messages.append(traced.messages[0])
        else:
            _add(batch.request, message)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        batch.answers.append(answer)
        batch.size += size
        if len(batch.answers) >= settings.messages_max or batch.size >= settings.payload_bytes_max:
            self._seal()
            self._send()
        elif self._timer is None and not self._lingered:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(settings.linger_s, self._on_lingered)
        return answer

    def _seal(self) -> None:
        self._full.append(self._open)
        self._open = _Batch()
        self._lingered = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_lingered(self) -> None:
        self._timer = None
        self._lingered = True
        self._send()

    def _send(self) -> None:
        """Sends what may be sent; while all requests are under way the open one goes on growing."""
        while len(self._sending) < self.settings.requests_max:
            if not self._full:
                if not (self._lingered and self._open.answers):
                    break
                self._seal()
            task = asyncio.create_task(self._send_batch(self._full.popleft()))
            self._sending.add(task)
            task.add_done_callback(self._on_sent)

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._send()

    async def _send_batch(self, batch: _Batch) -> None:
        """Sends a request; without the messages that are refused, as often as it takes."""
        until = time.monotonic() + self._peers.call_s
        problem: Exception = closed()
        try:
            while batch.answers:
                try:
                    left = max(until - time.monotonic(), 0.001)
                    ids = await self._send_request(batch.request, call_s=left)
                except InvalidArgument as error:
                    # The server refuses whole requests: one bad message must not take others along.
                    bad = _PLACE.match(error.field)
                    if bad is None or int(bad[1]) >= len(batch.answers):
                        raise
                    _fail(batch.answers.pop(int(bad[1])), _moved(error, f"message.{bad[2]}"))
                    del batch.request.messages[int(bad[1])]
                    batch.request.request_id = ""  # Other content; the refused one stored nothing.
                    continue
                for answer, message_id in zip(batch.answers, ids, strict=True):
                    if not answer.done():
                        answer.set_result(message_id)
                return
        except Exception as error:
            problem = error
            if not isinstance(error, SlateMQError):
                log.exception("a request could not be sent")
        finally:
            for answer in batch.answers:
                _fail(answer, problem)
            self._room.give_back(batch.size)

    # --- Batches ------------------------------------------------------------

    async def publish_many(
        self, messages: Iterable[OutgoingMessage], in_flight: int = 1
    ) -> list[int]:
        """See Client.publish_many."""
        if in_flight < 1:
            raise InvalidArgument("in_flight", "must be at least 1")
        ids: list[list[int]] = []
        running: deque[asyncio.Task[list[int]]] = deque()
        count = 0

        async def oldest() -> None:
            ids.append(await running[0])
            running.popleft()

        try:
            for part in self._parts(messages):
                while len(running) >= in_flight:
                    await oldest()
                running.append(asyncio.create_task(self._send_part(part, count)))
                count += len(part.messages)
            while running:
                await oldest()
        except SlateMQError as error:
            error.metadata["published_count"] = str(sum(map(len, ids)))
            raise
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return [message_id for part_ids in ids for message_id in part_ids]

    def _parts(self, messages: Iterable[OutgoingMessage]) -> Iterator[ingest_pb2.PublishRequest]:
        settings = self.settings
        request, count, size = ingest_pb2.PublishRequest(), 0, 0
        for message in messages:
            length = size_of(message)
            full = count >= settings.messages_max or size + length > settings.payload_bytes_max
            if count and full:
                yield request
                request, count, size = ingest_pb2.PublishRequest(), 0, 0
            _add(request, message)
            count += 1
            size += length
        if count:
            yield request

    async def _send_part(self, request: ingest_pb2.PublishRequest, offset: int) -> list[int]:
        try:
            return await self._send_traced(request)
        except InvalidArgument as error:
            bad = _PLACE.match(error.field)
            if bad is None:
                raise
            place = f"messages[{offset + int(bad[1])}].{bad[2]}"
            raise _moved(error, place.rstrip(".")) from error

    async def publish_batch(
        self, messages: Sequence[OutgoingMessage], *, request_id: str = "", shard: int | None = None
    ) -> list[int]:
        """Publishes messages in one request, all or none; returns their IDs when durable."""
        request = ingest_pb2.PublishRequest()
        for message in messages:
            _add(request, message)
        request.request_id = request_id
        return await self._send_traced(request, shard)

    async def _send_traced(
        self, request: ingest_pb2.PublishRequest, shard: int | None = None
    ) -> list[int]:
        if self._telemetry is None:
            return await self._send_request(request, shard)
        with self._telemetry.publishing(request.messages, is_batch=True):
            return await self._send_request(request, shard)

    async def _send_request(
        self,
        request: ingest_pb2.PublishRequest,
        shard: int | None = None,
        call_s: float | None = None,
    ) -> list[int]:
        """One request, under one ID on one shard, however often it is tried."""
        request.request_id = request.request_id or str(uuid4())
        chosen = shard
        full: set[int] = set()

        async def attempt(timeout: float) -> list[int]:
            nonlocal chosen
            if chosen is None:
                chosen = await self._choose_shard(full)
            stub = ingest_pb2_grpc.IngestServiceStub(await self._peers.ingest(chosen))
            try:
                answer = await stub.Publish(request, timeout=timeout)
            except grpc.RpcError:
                self._away[chosen] = time.monotonic() + AWAY_S
                raise
            self._away.pop(chosen, None)
            return list(answer.message_ids)

        bound_s = min(self._peers.call_s if call_s is None else call_s, REPEAT_S_MAX)
        while True:
            try:
                return await self._peers.call(attempt, call_s=bound_s, attempt_s=ATTEMPT_S)
            except ResourceExhausted as error:
                # That shard stored nothing and never will; another one may.
                if error.reason != "SHARD_FULL" or shard is not None or chosen is None:
                    raise
                full.add(chosen)
                if full.issuperset(await self._peers.ingest_shards()):
                    raise
                chosen = None

    async def _choose_shard(self, full: set[int]) -> int:
        shards = [shard for shard in await self._peers.ingest_shards() if shard not in full]
        if not shards:
            self._peers.forget()
            raise Unavailable("no ingest is known", reason="PEER_UNKNOWN")
        now = time.monotonic()
        at_hand = [shard for shard in shards if self._away.get(shard, 0.0) < now] or shards
        self._next_shard += 1
        return at_hand[self._next_shard % len(at_hand)]

    # --- End ----------------------------------------------------------------

    async def close(self, close_s: float | None = None) -> None:
        """Sends what was gathered and waits for it; each publish gets its own outcome.

        What has none after `close_s` (None: `call_timeout`) gets Unavailable (CLIENT_CLOSED).
        """
        self._closed = True
        try:
            async with asyncio.timeout(self._peers.call_s if close_s is None else close_s):
                while self._open.answers or self._full or self._sending or self._entering:
                    self._on_lingered()
                    # Whoever waited for room gathers before the next look.
                    await asyncio.sleep(0)
                    if self._sending:
                        await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            log.warning("closed before everything published was answered")
        finally:
            await self._give_up()

    async def _give_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        batches = [self._open, *self._full]
        self._open, self._timer = _Batch(), None
        self._full.clear()
        for batch in batches:
            for answer in batch.answers:
                _fail(answer, closed())
        sending = list(self._sending)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        self._room.refuse(closed())


def _fail(answer: asyncio.Future[int], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # Whoever gave up waiting does not want to hear of it.


def _moved(error: InvalidArgument, field: str) -> InvalidArgument:
    """The same error about another field: who published one message knows of no batch."""
    return InvalidArgument(
        field.rstrip("."), error.description, reason=error.reason, metadata=error.metadata
    )


def size_of(message: OutgoingMessage) -> int:
    """About the bytes of a message in a request."""
    try:
        size = len(message.payload) + 64
        if message.headers:
            size += sum(len(key) + len(value) + 8 for key, value in message.headers.items())
    except (TypeError, AttributeError) as error:
        if isinstance(message.headers, Mapping):
            _check_texts(message.headers)
        raise InvalidArgument("message", f"has a value of a wrong type: {error}") from error
    return size


def _check_texts(headers: Mapping[str, str], where: str = "") -> None:
    """Names the first header that is no text."""
    for key, value in headers.items():
        for what in (key, value):
            if not isinstance(what, str):
                raise InvalidArgument(
                    f"{where}headers[{key!r}]", f"must be text, not {type(what).__name__}"
                )


def _add(request: ingest_pb2.PublishRequest, message: OutgoingMessage) -> None:
    """Adds a message to a request, or nothing. Raises InvalidArgument for what has no wire form."""
    before = len(request.messages)
    try:
        wire = request.messages.add(payload=message.payload)
        if message.headers:
            wire.headers.update(message.headers)
        if message.created_at_ms is not None:
            wire.created_at_ms = message.created_at_ms
        if message.retention_s is not None:
            wire.retention_s = message.retention_s
    except (TypeError, ValueError) as error:
        # Another type, text that is no UTF-8, or a number beyond 64 bits.
        del request.messages[before:]
        if isinstance(message.headers, Mapping):
            _check_texts(message.headers, f"messages[{before}].")
        raise InvalidArgument(f"messages[{before}]", str(error)) from error
