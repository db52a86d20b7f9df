"""Single messages: gathered into requests while others are under way, and sent in the background.

::

    publish ──▶ open request of its shard ──ripe, nothing under way there──▶ stream ──▶ answers
                     │ full                                                     │ error, no answer
                     └──────────▶ sealed, several at once ──▶ stream            ▼
                                                                a call, repeated as long as it takes

So whoever publishes one after the other waits for nobody, and many at once share requests without
waiting for a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from slatemq._publish.published import Published
from slatemq._publish.requests import REPEAT_S_MAX, WRONG_SHARD, PublishRequests, StreamAttempt
from slatemq._publish.streams import BYTES_MAX, PublishStream, PublishStreams
from slatemq._publish.wire import Runs, moved, size_of
from slatemq._rpc.byte_semaphore import ByteSemaphore
from slatemq._rpc.peers import Peers, closed
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.models import BatchSettings, OutgoingMessage

if TYPE_CHECKING:
    from slatemq.otel import Telemetry

log = logging.getLogger(__name__)


class _Batch:
    """A request that is being gathered, and who waits for which of its messages.

    `shard` None: any. `ripe`: its oldest message has waited for long enough. `until`: how long it
    is sent at most, by the loop's time.
    """

    __slots__ = ("answers", "request_id", "ripe", "runs", "shard", "size", "timer", "until")

    def __init__(self, shard: int | None, before: Runs | None = None) -> None:
        self.shard = shard
        self.request_id = ""
        self.runs = Runs(before)
        self.answers: list[asyncio.Future[Published]] = []
        self.size = 0
        self.timer: asyncio.Handle | None = None
        self.ripe = False
        self.until = 0.0


class Gatherer:
    """Gathers single publishes; sends them in the background."""

    def __init__(
        self,
        peers: Peers,
        settings: BatchSettings,
        requests: PublishRequests,
        telemetry: Telemetry | None = None,
    ) -> None:
        """Publish through these peers."""
        settings.check()
        self._peers = peers
        self._settings = settings
        self._requests = requests
        self._telemetry = telemetry
        self._streams = PublishStreams(peers, requests)
        self._room = ByteSemaphore(settings.outstanding_bytes_max)
        self._open: dict[int | None, _Batch] = {}
        self._last: Runs | None = None
        self._full: deque[_Batch] = deque()
        self._streamed = 0
        self._sending: set[asyncio.Task[None]] = set()
        self._entering = 0
        self._changed: asyncio.Future[None] | None = None
        self._closed = False
        self._given_up = False

    async def publish(self, message: OutgoingMessage) -> Published:
        """Publishes one message; returns its ID when it is durable."""
        if self._telemetry is None:
            return await self._publish(message)
        runs = Runs()
        runs.add(message, "")
        with self._telemetry.publishing(runs, is_batch=False):
            return await self._publish(message, runs)

    async def _publish(self, message: OutgoingMessage, traced: Runs | None = None) -> Published:
        """`traced`: the message in its wire form, where that has more headers."""
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
            answer = self._gather(message, traced, size, shard)
        except InvalidArgument:
            self._room.give_back(size)
            raise
        # A caller that gives up does not take its message back: it is on its way.
        return await answer

    def _gather(
        self,
        message: OutgoingMessage,
        traced: Runs | None,
        size: int,
        shard: int | None,
    ) -> asyncio.Future[Published]:
        """Adds it to the open request of the shard, or begins another one."""
        settings = self._settings
        batch = self._open.get(shard)
        if batch is not None and batch.answers and batch.size + size > settings.payload_bytes_max:
            self._seal(batch)
            batch = None
        if batch is None:
            batch = self._open[shard] = _Batch(shard, self._last)
            self._last = batch.runs
        if traced is not None:
            batch.runs.extend(traced)
        else:
            batch.runs.add(message, "")
        answer: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        batch.answers.append(answer)
        batch.size += size
        if len(batch.answers) >= settings.messages_max or batch.size >= settings.payload_bytes_max:
            self._seal(batch)
            self._send()
        elif batch.timer is None and not batch.ripe:
            loop = asyncio.get_running_loop()
            if settings.linger_s:
                batch.timer = loop.call_later(settings.linger_s, self._on_lingered, batch)
            else:  # Whoever is ready now still joins.
                batch.timer = loop.call_soon(self._on_lingered, batch)
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

    # --- Sending ------------------------------------------------------------

    def _send(self) -> None:
        """Sends what may be sent; the open requests go on growing meanwhile."""
        while self._streamed + len(self._sending) < self._settings.requests_max:
            if self._full:
                batch = self._full.popleft()
                stream = self._streams.at_hand(batch.shard)
            else:
                for batch in self._open.values():
                    if batch.ripe and batch.answers:
                        stream = self._streams.at_hand(batch.shard)
                        if stream is None or not stream.under_way:
                            break
                else:
                    return
                self._seal(batch)
                self._full.pop()
            self._dispatch(batch, stream)

    def _dispatch(self, batch: _Batch, stream: PublishStream | None) -> None:
        loop = asyncio.get_running_loop()
        batch.until = loop.time() + min(self._peers.call_s, REPEAT_S_MAX)
        if stream is None or batch.size > BYTES_MAX:
            self._call(batch, None)
            return
        batch.request_id = self._requests.new_id()
        self._requests.turn()
        self._streamed += 1
        shard, began_s = stream.shard, loop.time()

        def answered(answers: list[Published] | SlateMQError) -> None:
            self._streamed -= 1
            if not isinstance(answers, SlateMQError):
                self._requests.answered(shard)
                self._succeed(batch, answers)
                self._room.give_back(batch.size)
            elif self._given_up:
                self._end(batch, closed())
            else:
                self._call(batch, StreamAttempt(shard, answers, began_s))
            self._on_changed()

        stream.send(batch.runs.encoded(batch.request_id), answered, batch.until)

    def _call(self, batch: _Batch, tried: StreamAttempt | None) -> None:
        task = asyncio.create_task(self._send_batch(batch, tried))
        self._sending.add(task)
        task.add_done_callback(self._on_sent)

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._on_changed()

    def _on_changed(self) -> None:
        self._send()
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _succeed(self, batch: _Batch, answers: list[Published]) -> None:
        for answer, one in zip(batch.answers, answers, strict=True):
            if not answer.done():
                answer.set_result(one)

    def _end(self, batch: _Batch, problem: Exception) -> None:
        for answer in batch.answers:
            _fail(answer, problem)
        self._room.give_back(batch.size)

    async def _send_batch(self, batch: _Batch, tried: StreamAttempt | None) -> None:
        """Sends a request; without the messages that are refused, as often as it takes."""
        loop = asyncio.get_running_loop()
        problem: Exception = closed()
        try:
            while batch.answers:
                try:
                    left = max(batch.until - loop.time(), 0.001)
                    request_id = batch.request_id or self._requests.new_id()
                    send = await self._requests.send(
                        batch.runs, request_id, batch.shard, left, tried
                    )
                except InvalidArgument as error:
                    if error.reason == WRONG_SHARD and await self._send_elsewhere(batch):
                        return
                    # The server refuses whole requests: one bad message must not take others along.
                    bad = batch.runs.places_of(error.field)
                    if bad is None:
                        raise
                    _leave_out(batch, *bad, error)
                    tried = None
                    continue
                self._succeed(batch, send)
                return
        except Exception as error:
            problem = error
            if not isinstance(error, SlateMQError):
                log.exception("a request could not be sent")
        finally:
            self._end(batch, problem)

    async def _send_elsewhere(self, batch: _Batch) -> bool:
        """Sends messages whose keys fall to other shards by now; whether there are such."""
        by_shard = await self._requests.places(batch.runs)
        if list(by_shard) == [batch.shard]:
            return False
        parts = []
        for shard, places in by_shard.items():
            part = _Batch(shard)  # Of no size: the batch itself gives back the room.
            part.runs = batch.runs.only(places)
            part.answers = [batch.answers[place] for place in places]
            part.until = batch.until
            parts.append(part)
        await asyncio.gather(*(self._send_batch(part, None) for part in parts))
        return True

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
                    if self._streamed or self._sending:
                        self._changed = asyncio.get_running_loop().create_future()
                        await self._changed
        except TimeoutError:
            log.warning("closed before everything published was answered")
        finally:
            await self._give_up()

    def _has_work(self) -> bool:
        gathered = any(batch.answers for batch in self._open.values())
        return bool(gathered or self._full or self._streamed or self._sending or self._entering)

    async def _give_up(self) -> None:
        self._given_up = True
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
        await self._streams.close()
        self._room.refuse(closed())


def _fail(answer: asyncio.Future[Published], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # Whoever gave up waiting does not want to hear of it.


def _leave_out(batch: _Batch, bad: range, part: str, error: InvalidArgument) -> None:
    """Fails messages that the server refuses, in the words of a caller that sent one message."""
    for answer in batch.answers[bad.start : bad.stop]:
        _fail(answer, moved(error, f"message.{part}"))
    del batch.answers[bad.start : bad.stop]
    kept = [at for at in range(len(batch.runs)) if at not in bad]
    batch.runs = batch.runs.only(kept)
    batch.request_id = ""  # Other content; the refused one stored nothing.
