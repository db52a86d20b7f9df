"""Publishing what is durable: from a source that can be read again, to a backend.

::

    source ──batches, in order──▶ publish_batch ──▶ done(position) ──▶ a durable cursor, behind
       ▲                              │ down
       └──── the same batch again ◀───┘ waits, longer each time

A batch is in memory and no more: while the backend is down nothing is read, and what waits stays
where it is durable. The cursor follows what was published, so a crash in between publishes again,
with the IDs of before. In `fire-and-forget` a batch whose publish fails is dropped, and with it all
that was committed until the next try.

No event holds up those behind it because it is too large for the backend: its headers are left out,
and without any it is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import msgspec

from libs.events.backend import QueueBackend
from libs.events.deliveries import end_task
from libs.events.refusals import TooLarge
from libs.events.retrying import Outage
from libs.events.settings import QueueSettings
from slatemq._secrets import redacted
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.events.catalogue import MessagePublished
from slatemq.events.envelope import Event, encode_event

log = logging.getLogger(__name__)

BATCH_EVENTS: Final = 128
"""Events of one publish: making them takes the event loop about 3 ms."""


class EventBatch(NamedTuple):
    """Events in order, and where the source goes on once they are published.

    Attributes:
        events: May be none, where a stretch of the source has none.
        position: Of the last thing that the batch stands for.
        began_ms: When the first one happened, in ms since the Unix epoch.
    """

    events: list[Event]
    position: int
    began_ms: int


class EventSource(Protocol):
    """What is durable and may become events."""

    def batches(self) -> AsyncGenerator[EventBatch, None]:
        """Batches from the first that is not done, without end; each call begins again there."""
        ...

    def done(self, position: int) -> None:
        """Everything up to this position needs no event any more."""

    def skip_to_end(self) -> int:
        """Give up what is not done; returns how many events that may have been."""
        ...


@dataclass
class RelayCounts:
    """What a relay has done since it began.

    Attributes:
        published: Events that the backend has; some of them twice, perhaps.
        failed: Events in publishes that failed, whether they were repeated or dropped.
        dropped: Events given up: in `fire-and-forget`, or since they are too large for the backend.
        connected: Whether the last call of the backend succeeded.
        error: What the last call that failed said.
        refusal: The setting that the backend refuses, as far as is known, and why; empty: none.
        waiting_since_ms: When the first event happened that is being published; 0: none is.
    """

    published: int = 0
    failed: int = 0
    dropped: int = 0
    connected: bool = False
    error: str = ""
    refusal: str = ""
    waiting_since_ms: int = 0


class Relay:
    """Publishes the events of one source, in their order; `run` does it.

    Attributes:
        counts: See RelayCounts.
        is_open: Whether the backend was connected to; it comes back by itself from then on.
    """

    def __init__(
        self,
        settings: QueueSettings,
        backend: QueueBackend,
        source: EventSource,
        faults: tuple[type[Exception], ...] = (),
    ) -> None:
        """Nothing is published yet.

        Args:
            settings: How to connect, and what to do about failures.
            backend: Not connected yet.
            source: What is published.
            faults: What the source may raise when it cannot be read now.
        """
        self.counts = RelayCounts()
        self.is_open = False
        self._settings = settings
        self._backend = backend
        self._source = source
        self._faults: tuple[type[Exception], ...] = (*faults, SlateMQError)
        self._keeps = settings.consistency != "fire-and-forget"
        self._connecting = asyncio.Lock()
        self._outage = Outage(log, f"the backend of events, {settings.backend},")
        self._unread = Outage(log, "the store of what is to be published")

    async def run(self) -> None:
        """Publish until cancelled.

        Raises InvalidArgument, which names the key, where the first try to connect shows that a
        setting is wrong. Nothing else ends it: what is refused later is tried again.
        """
        try:
            await self._connect()
        except InvalidArgument:
            raise
        except Exception as error:  # noqa: BLE001 - the shard serves on
            self._failed(error)
        connecting = asyncio.create_task(self._connect_when_up())
        try:
            while True:
                await self._publish_all()
        finally:
            await end_task(connecting)
            if self.is_open:
                await self._backend.close()

    async def answers(self) -> bool:
        """Whether the backend answers now, within some seconds; not before it is connected to."""
        return self.is_open and await self._backend.health_check()

    async def _connect_when_up(self) -> None:
        """Connect, however long it takes: also while nothing happens that would be published.

        What is not connected counts as down, in the process's health as well.
        """
        while not self.is_open:
            try:
                await self._connect()
            except Exception as error:  # noqa: BLE001 - the shard serves on
                self._failed(error)
                await self._outage.wait(error)

    async def _connect(self) -> None:
        async with self._connecting:
            if self.is_open:
                return
            try:
                await self._backend.connect(getattr(self._settings, self._settings.backend))
            except BaseException:
                await self._backend.close()
                raise
            self.is_open = True
            self._succeeded()

    async def _publish_all(self) -> None:
        """Publish from where the source stands, until it cannot be read."""
        try:
            async with aclosing(self._source.batches()) as batches:
                async for batch in batches:
                    self._unread.end()
                    if not await self._publish(batch):
                        return
        except self._faults as error:
            log.info("what is to be published cannot be read: %s", error)
            await self._unread.wait(error)

    async def _publish(self, batch: EventBatch) -> bool:
        """Publish a batch; False where the source goes on elsewhere."""
        self.counts.waiting_since_ms = batch.began_ms if batch.events else 0
        waiting = [batch.events] if batch.events else []
        while waiting:
            events = waiting[0]
            try:
                await self._connect()
                await self._backend.publish_batch(events)
            except TooLarge as error:
                waiting[:1] = self._smaller(events, error)
            except Exception as error:  # noqa: BLE001 - the shard serves on
                self.counts.failed += len(events)
                self._failed(error)
                await self._outage.wait(error)
                if not self._keeps:
                    self.counts.dropped += self._source.skip_to_end()
                    self.counts.waiting_since_ms = 0
                    return False
            else:
                self.counts.published += len(events)
                self._succeeded()
                del waiting[0]
        self._source.done(batch.position)
        self.counts.waiting_since_ms = 0
        return True

    def _smaller(self, events: list[Event], error: TooLarge) -> list[list[Event]]:
        """What to publish in place of events of which one is too large, part by part."""
        bytes_max = self._backend.message_bytes_max if len(events) > 1 else 0
        shorter = [
            one if len(encode_event(one)) <= bytes_max else _without_headers(one) for one in events
        ]
        if shorter != events:
            return [shorter]
        if len(events) > 1:  # which one it is shows in smaller parts
            middle = len(events) // 2
            return [events[:middle], events[middle:]]
        log.error("the event %s (%s) is given up: %s", events[0].id, events[0].type, error)
        self.counts.failed += 1
        self.counts.dropped += 1
        self.counts.error = str(error)
        return []

    def _succeeded(self) -> None:
        self._outage.end()
        self.counts.connected = True
        if self.counts.refusal:
            log.warning("the backend %s refuses no setting any more", self._settings.backend)
            self.counts.refusal = ""

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, SlateMQError):
            log.error("the backend %s failed", self._settings.backend, exc_info=error)
        self.counts.connected = False
        self.counts.error = redacted(str(error)) or type(error).__name__
        refusal = self.counts.error if isinstance(error, InvalidArgument) else ""
        if refusal and refusal != self.counts.refusal:
            log.error(
                "no events are published while the backend %s refuses this: %s",
                self._settings.backend,
                refusal,
            )
        self.counts.refusal = refusal


def _without_headers(event: Event) -> Event:
    """The event of a message without its headers; another one as it is."""
    if event.type != MessagePublished.event_type or event.data["headers_omitted"]:
        return event
    return msgspec.structs.replace(
        event, data={**event.data, "headers": {}, "headers_omitted": True}
    )
