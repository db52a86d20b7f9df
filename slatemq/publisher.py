"""Publishing: single messages are gathered into requests, and every request may be repeated safely.

Each request carries a request ID of its own and sticks to one ingest shard: within ten minutes, a
repeat of a publish whose outcome is unknown stores nothing twice. Messages with dedupe keys go to
the shards of their keys, so that requests for different shards are gathered side by side.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from slatemq.checks import check_whole, message_of
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.models import BatchSettings, OutgoingMessage
from slatemq.peers import Peers, closed
from slatemq.publish_requests import WRONG_SHARD, PublishRequests
from slatemq.publish_wire import PLACE, add, moved, size_of
from slatemq.published import Published
from slatemq.room import Room
from slatemq.v1 import ingest_pb2

if TYPE_CHECKING:
    from slatemq.otel import Telemetry

log = logging.getLogger(__name__)


class _Batch:
    """A request that is being gathered, and who waits for which of its messages.

    `shard` None: any. `ripe`: its oldest message has waited for long enough.
    """

    __slots__ = ("answers", "request", "ripe", "shard", "size", "timer")

    def __init__(self, shard: int | None) -> None:
        self.shard = shard
        self.request = ingest_pb2.PublishRequest()
        self.answers: list[asyncio.Future[Published]] = []
        self.size = 0
        self.timer: asyncio.TimerHandle | None = None
        self.ripe = False


class _Part(NamedTuple):
    """A request of `publish_many`, and the places of its messages among all."""

    shard: int | None
    request: ingest_pb2.PublishRequest
    places: list[int]


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
        self._requests = PublishRequests(peers, telemetry)
        self._room = Room(settings.outstanding_bytes_max)
        self._open: dict[int | None, _Batch] = {}
        self._full: deque[_Batch] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._entering = 0
        self._closed = False

    # --- Single messages ----------------------------------------------------

    async def publish(self, message: OutgoingMessage) -> Published:
        """Publishes one message; returns its ID when it is durable."""
        if self._telemetry is None:
            return await self._publish(ingest_pb2.PublishRequest(), message)
        request = ingest_pb2.PublishRequest()
        try:
            add(request, message)
        except InvalidArgument as error:
            raise _alone(error) from error
        with self._telemetry.publishing(request.messages, is_batch=False):
            return await self._publish(request, message)

    async def _publish(
        self, traced: ingest_pb2.PublishRequest, message: OutgoingMessage
    ) -> Published:
        self._peers.check_home()
        if self._closed:
            raise closed()
        size = size_of(message)
        shard: int | None = None
        if message.dedupe_key or not self._room.try_take(size):
            self._entering += 1
            try:
                shard = await self._requests.shard_of(message.dedupe_key)
                if not self._room.try_take(size):
                    await self._room.take(size)
            finally:
                self._entering -= 1
        try:
            answer = self._gather(traced, message, size, shard)
        except InvalidArgument as error:
            self._room.give_back(size)
            raise _alone(error) from error
        # A caller that gives up does not take its message back: it is on its way.
        return await answer

    def _gather(
        self,
        traced: ingest_pb2.PublishRequest,
        message: OutgoingMessage,
        size: int,
        shard: int | None,
    ) -> asyncio.Future[Published]:
        """Adds it to the open request of the shard, or begins another one."""
        settings = self.settings
        batch = self._open.get(shard)
        if batch is not None and batch.answers and batch.size + size > settings.payload_bytes_max:
            self._seal(batch)
            batch = None
        if batch is None:
            batch = self._open[shard] = _Batch(shard)
        if traced.messages:
            batch.request.messages.append(traced.messages[0])
        else:
            add(batch.request, message)
        answer: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        batch.answers.append(answer)
        batch.size += size
        if len(batch.answers) >= settings.messages_max or batch.size >= settings.payload_bytes_max:
            self._seal(batch)
            self._send()
        elif batch.timer is None and not batch.ripe:
            loop = asyncio.get_running_loop()
            batch.timer = loop.call_later(settings.linger_s, self._on_lingered, batch)
        return answer

    def _seal(self, batch: _Batch) -> None:
        del self._open[batch.shard]
        self._full.append(batch)
        if batch.timer is not None:
            batch.timer.cancel()
            batch.timer = None

    def _on_lingered(self, batch: _Batch) -> None:
        batch.timer = None
        batch.ripe = True
        self._send()

    def _send(self) -> None:
        """Sends what may be sent; while all requests are under way the open ones go on growing."""
        while len(self._sending) < self.settings.requests_max:
            if not self._full:
                ripe = [batch for batch in self._open.values() if batch.ripe and batch.answers]
                if not ripe:
                    break
                self._seal(ripe[0])
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
                    told = await self._requests.send(batch.request, batch.shard, left)
                except InvalidArgument as error:
                    if error.reason == WRONG_SHARD and await self._send_elsewhere(batch):
                        return
                    # The server refuses whole requests: one bad message must not take others along.
                    bad = PLACE.match(error.field)
                    if bad is None or int(bad[1]) >= len(batch.answers):
                        raise
                    _fail(batch.answers.pop(int(bad[1])), moved(error, f"message.{bad[2]}"))
                    del batch.request.messages[int(bad[1])]
                    batch.request.request_id = ""  # Other content; the refused one stored nothing.
                    continue
                for answer, one in zip(batch.answers, told, strict=True):
                    if not answer.done():
                        answer.set_result(one)
                return
        except Exception as error:
            problem = error
            if not isinstance(error, SlateMQError):
                log.exception("a request could not be sent")
        finally:
            for answer in batch.answers:
                _fail(answer, problem)
            self._room.give_back(batch.size)

    async def _send_elsewhere(self, batch: _Batch) -> bool:
        """Sends messages whose keys fall to other shards by now; whether there are such."""
        by_shard = await self._requests.places(batch.request.messages)
        if list(by_shard) == [batch.shard]:
            return False
        parts = []
        for shard, places in by_shard.items():
            part = _Batch(shard)  # Of no size: the batch itself gives back the room.
            part.request.messages.extend(batch.request.messages[place] for place in places)
            part.answers = [batch.answers[place] for place in places]
            parts.append(part)
        await asyncio.gather(*map(self._send_batch, parts))
        return True

    # --- Batches ------------------------------------------------------------

    async def publish_many(
        self, messages: Iterable[OutgoingMessage], in_flight: int = 1
    ) -> list[Published]:
        """See Client.publish_many."""
        check_whole("in_flight", in_flight, 1)
        told: dict[int, Published] = {}
        running: deque[tuple[list[int], asyncio.Task[list[Published]]]] = deque()

        async def oldest() -> None:
            places, task = running[0]
            told.update(zip(places, await task, strict=True))
            running.popleft()

        try:
            async for part in self._parts(messages):
                while len(running) >= in_flight:
                    await oldest()
                running.append((part.places, asyncio.create_task(self._send_part(part))))
            while running:
                await oldest()
        except SlateMQError as error:
            first_missing = next(place for place in range(len(told) + 1) if place not in told)
            error.metadata["published_count"] = str(first_missing)
            raise
        finally:
            tasks = [task for _, task in running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [told[place] for place in range(len(told))]

    async def _parts(self, messages: Iterable[OutgoingMessage]) -> AsyncIterator[_Part]:
        settings = self.settings
        parts: dict[int | None, _Part] = {}
        sizes: dict[int | None, int] = {}
        for place, message in enumerate(messages):
            length = size_of(message, f"messages[{place}].")
            key = message.dedupe_key
            shard = await self._requests.shard_of(key) if key else None
            part = parts.get(shard)
            if part is not None and (
                len(part.places) >= settings.messages_max
                or sizes[shard] + length > settings.payload_bytes_max
            ):
                del parts[shard]
                yield part
                part = None
            if part is None:
                part = parts[shard] = _Part(shard, ingest_pb2.PublishRequest(), [])
                sizes[shard] = 0
            try:
                add(part.request, message)
            except InvalidArgument as error:
                raise _placed(error, [*part.places, place]) from error
            part.places.append(place)
            sizes[shard] += length
        for part in parts.values():
            yield part

    async def _send_part(self, part: _Part) -> list[Published]:
        try:
            return await self._requests.send_traced(part.request, part.shard)
        except InvalidArgument as error:
            if error.reason != WRONG_SHARD:
                raise _placed(error, part.places) from error
            by_shard = await self._requests.places(part.request.messages)
            if list(by_shard) == [part.shard]:
                raise _placed(error, part.places) from error
        told: dict[int, Published] = {}
        for shard, indexes in by_shard.items():
            request = ingest_pb2.PublishRequest()
            request.messages.extend(part.request.messages[index] for index in indexes)
            moved_part = _Part(shard, request, [part.places[index] for index in indexes])
            told.update(zip(moved_part.places, await self._send_part(moved_part), strict=True))
        return [told[place] for place in part.places]

    async def publish_batch(
        self, messages: Sequence[OutgoingMessage], *, request_id: str = "", shard: int | None = None
    ) -> list[Published]:
        """Publishes messages in one request, all or none; returns their IDs when durable."""
        request = message_of(ingest_pb2.PublishRequest, request_id=request_id)
        for message in messages:
            add(request, message)
        if shard is not None:
            return await self._requests.send_traced(request, shard)
        chosen = await self._requests.one_shard(request.messages)
        try:
            return await self._requests.send_traced(request, chosen)
        except InvalidArgument as error:
            if error.reason != WRONG_SHARD:
                raise
            await self._peers.fresh_topology()
        return await self._requests.send_traced(
            request, await self._requests.one_shard(request.messages)
        )

    # --- End ----------------------------------------------------------------

    async def close(self, close_s: float | None = None) -> None:
        """Sends what was gathered and waits for it; each publish gets its own outcome.

        What has none after `close_s` (None: `call_timeout`) gets Unavailable (CLIENT_CLOSED).
        """
        self._closed = True
        try:
            async with asyncio.timeout(self._peers.call_s if close_s is None else close_s):
                while self._has_work():
                    for batch in list(self._open.values()):
                        self._on_lingered(batch)
                    # Whoever waited for room gathers before the next look.
                    await asyncio.sleep(0)
                    if self._sending:
                        await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            log.warning("closed before everything published was answered")
        finally:
            await self._give_up()

    def _has_work(self) -> bool:
        gathered = any(batch.answers for batch in self._open.values())
        return bool(gathered or self._full or self._sending or self._entering)

    async def _give_up(self) -> None:
        batches = [*self._open.values(), *self._full]
        self._open.clear()
        self._full.clear()
        for batch in batches:
            if batch.timer is not None:
                batch.timer.cancel()
            for answer in batch.answers:
                _fail(answer, closed())
        sending = list(self._sending)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        self._room.refuse(closed())


def _fail(answer: asyncio.Future[Published], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # Whoever gave up waiting does not want to hear of it.


def _alone(error: InvalidArgument) -> InvalidArgument:
    """The same error for whoever published one message and knows of no batch."""
    place = PLACE.match(error.field)
    return moved(error, place[2] or "message") if place else error


def _placed(error: InvalidArgument, places: list[int]) -> InvalidArgument:
    """The same error about the message's place among all that were to be published."""
    bad = PLACE.match(error.field)
    if bad is None or int(bad[1]) >= len(places):
        return error
    return moved(error, f"messages[{places[int(bad[1])]}].{bad[2]}")
