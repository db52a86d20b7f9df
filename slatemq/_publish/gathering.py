"""Single messages: gathered into requests while others are under way, and sent in the background.

::

    publish ──▶ open request of its shard ──ripe, nothing under way there──▶ stream ──▶ answers
                     │ full                                                     │ error, no answer
                     └──────────▶ sealed, several at a time ──▶ stream          ▼
                                                                a call, repeated as long as it takes

So publishes one after the other do not wait, and concurrent ones share requests without a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from contextvars import copy_context
from typing import TYPE_CHECKING

from slatemq._byte_budget import ByteBudget
from slatemq._cancelling import end_all
from slatemq._checks import moved
from slatemq._publish.published import Published
from slatemq._publish.sending import REPEAT_S_MAX, Request, Sender, StreamAttempt
from slatemq._publish.streams import BYTES_MAX, PublishStream
from slatemq._publish.wire import Runs, size_of
from slatemq._rpc.peers import Peers, closed
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.models import BatchSettings, OutgoingMessage

if TYPE_CHECKING:
    from slatemq.otel import Telemetry


log = logging.getLogger(__name__)


class _Open(Request["asyncio.Future[Published]"]):
    """A request that is being gathered.

    `ripe`: its oldest message has waited for long enough. `until`: when sending it is given up, by
    the loop's time. `context`: that of its oldest message, whose trace its call is in.
    """

    __slots__ = ("context", "ripe", "size", "timer", "until")

    def __init__(self, shard: int | None, before: Runs | None) -> None:
        super().__init__(shard, Runs(before), [])
        self.size = 0
        self.timer: asyncio.Handle | None = None
        self.ripe = False
        self.until = 0.0
        self.context = copy_context()


class Gatherer:
    """Gathers single publishes; sends them in the background."""

    def __init__(
        self,
        peers: Peers,
        settings: BatchSettings,
        sender: Sender,
        telemetry: Telemetry | None = None,
    ) -> None:
        settings.check()
        self._peers = peers
        self._settings = settings
        self._sender = sender
        self._telemetry = telemetry
        self._outstanding = ByteBudget(settings.outstanding_bytes_max)
        self._open: dict[int | None, _Open] = {}
        self._last: Runs | None = None
        self._full: deque[_Open] = deque()
        self._streamed = 0
        self._sending: set[asyncio.Task[None]] = set()
        self._entering = 0
        self._changed: asyncio.Future[None] | None = None
        self._closed = False
        self._given_up = False

    async def publish(self, message: OutgoingMessage) -> Published:
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
        if message.dedupe_key or not self._outstanding.try_reserve(size):
            self._entering += 1
            try:
                shard = await self._sender.shards.of_key(message.dedupe_key)
                await self._outstanding.reserve(size)
            finally:
                self._entering -= 1
                self._wake()
        try:
            answer = self._gather(message, traced, size, shard)
        except InvalidArgument:
            self._outstanding.release(size)
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
        if batch is not None and batch.owners and batch.size + size > settings.payload_bytes_max:
            self._seal(batch)
            batch = None
        if batch is None:
            batch = self._open[shard] = _Open(shard, self._last)
            self._last = batch.runs
        if traced is not None:
            batch.runs.extend(traced)
        else:
            batch.runs.add(message, "")
        answer: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        batch.owners.append(answer)
        batch.size += size
        if len(batch.owners) >= settings.messages_max or batch.size >= settings.payload_bytes_max:
            self._seal(batch)
            self._send()
        elif batch.timer is None and not batch.ripe:
            loop = asyncio.get_running_loop()
            if settings.linger_s:
                batch.timer = loop.call_later(settings.linger_s, self._on_lingered, batch)
            else:  # Callers that are ready now still join.
                batch.timer = loop.call_soon(self._on_lingered, batch)
        return answer

    def _seal(self, batch: _Open) -> None:
        del self._open[batch.shard]
        self._full.append(batch)
        if batch.timer is not None:
            batch.timer.cancel()
            batch.timer = None

    def _on_lingered(self, batch: _Open) -> None:
        batch.timer = None
        batch.ripe = True
        self._send()

    # --- Sending ------------------------------------------------------------

    def _send(self) -> None:
        """Sends what may be sent; the open requests go on growing meanwhile."""
        while self._streamed + len(self._sending) < self._settings.requests_max:
            if self._full:
                batch = self._full.popleft()
                stream = self._sender.streams.for_shard(batch.shard)
            else:
                for batch in self._open.values():
                    if batch.ripe and batch.owners:
                        stream = self._sender.streams.for_shard(batch.shard)
                        if stream is None or not stream.in_flight_count:
                            break
                else:
                    return
                self._seal(batch)
                self._full.pop()
            self._dispatch(batch, stream)

    def _dispatch(self, batch: _Open, stream: PublishStream | None) -> None:
        loop = asyncio.get_running_loop()
        batch.until = loop.time() + min(self._peers.call_s, REPEAT_S_MAX)
        if stream is None or batch.size > BYTES_MAX:
            self._call(batch, None)
            return
        self._streamed += 1

        def done(outcome: list[Published] | StreamAttempt) -> None:
            self._streamed -= 1
            if not isinstance(outcome, StreamAttempt):
                _succeed(batch, outcome)
                self._outstanding.release(batch.size)
            elif self._given_up:
                self._end(batch, closed())
            else:
                self._call(batch, outcome)
            self._on_changed()

        self._sender.stream(batch, stream, batch.until, done)

    def _call(self, batch: _Open, tried: StreamAttempt | None) -> None:
        task = asyncio.create_task(self._send_by_calls(batch, tried), context=batch.context)
        self._sending.add(task)
        task.add_done_callback(self._on_sent)

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._on_changed()

    def _on_changed(self) -> None:
        self._send()
        self._wake()

    def _wake(self) -> None:
        """Have `close` look again."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _send_by_calls(self, batch: _Open, tried: StreamAttempt | None) -> None:
        problem: Exception = closed()
        try:
            await self._send_part(batch, batch.until, tried)
        except Exception as error:
            problem = error
            if not isinstance(error, SlateMQError):
                log.exception("a request could not be sent")
        finally:
            self._end(batch, problem)

    async def _send_part(
        self,
        request: Request[asyncio.Future[Published]],
        until: float,
        tried: StreamAttempt | None = None,
    ) -> None:
        """Sends a request without the messages that are refused; in parts where keys moved."""
        while request.owners:
            left = max(until - asyncio.get_running_loop().time(), 0.001)
            try:
                _succeed(request, await self._sender.send(request, left, tried))
                return
            except InvalidArgument as error:
                parts = await self._sender.split(request, error)
                if not parts:
                    # The server refuses whole requests: one bad message must not fail the others.
                    bad = request.runs.places_of(error.field)
                    if bad is None:
                        raise
                    _leave_out(request, *bad, error)
                    tried = None
                    continue
            outcomes = await asyncio.gather(
                *(self._send_part(part, until) for part in parts), return_exceptions=True
            )
            for part, problem in zip(parts, outcomes, strict=True):
                if problem is not None:
                    _fail(part, problem)
            return

    def _end(self, batch: _Open, problem: Exception) -> None:
        """Fails what has no answer yet."""
        _fail(batch, problem)
        self._outstanding.release(batch.size)

    # --- End ----------------------------------------------------------------

    async def close(self, close_s: float | None = None) -> None:
        """Sends what was gathered and waits for it; each publish gets its own outcome.

        What has none after `close_s` (None: `call_timeout`) gets Unavailable (CLIENT_CLOSED).
        """
        self._closed = True
        try:
            async with asyncio.timeout(self._peers.call_s if close_s is None else close_s):
                while self._has_work():
                    changed = self._changed = asyncio.get_running_loop().create_future()
                    for batch in list(self._open.values()):
                        self._on_lingered(batch)
                    # Callers that waited for room gather before the next look.
                    await asyncio.sleep(0)
                    if self._streamed or self._sending or self._entering:
                        await changed
        except TimeoutError:
            log.warning("closed before everything published was answered")
        finally:
            await self._give_up()

    def _has_work(self) -> bool:
        gathered = any(batch.owners for batch in self._open.values())
        return bool(gathered or self._full or self._streamed or self._sending or self._entering)

    async def _give_up(self) -> None:
        self._given_up = True
        batches = [*self._open.values(), *self._full]
        self._open.clear()
        self._full.clear()
        for batch in batches:
            if batch.timer is not None:
                batch.timer.cancel()
            _fail(batch, closed())
        await end_all(self._sending)
        await self._sender.streams.close()
        self._outstanding.refuse(closed())


def _succeed(request: Request[asyncio.Future[Published]], answers: Iterable[Published]) -> None:
    for owner, answer in zip(request.owners, answers, strict=True):
        if not owner.done():
            owner.set_result(answer)


def _fail(request: Request[asyncio.Future[Published]], error: BaseException) -> None:
    for owner in request.owners:
        if not owner.done():
            owner.set_exception(error)
            owner.exception()  # A caller that was cancelled does not read it.


def _leave_out(
    request: Request[asyncio.Future[Published]], bad: range, part: str, error: InvalidArgument
) -> None:
    """Fails messages that the server refuses, with the error of a publish of one message."""
    refused = Request(None, Runs(), request.owners[bad.start : bad.stop])
    _fail(refused, moved(error, f"message.{part}"))
    request.keep(place for place in range(len(request.runs)) if place not in bad)
