"""Events in SlateMQ."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import slatemq
from libs.events.deliveries import NOT_ACKNOWLEDGED, Handler, read_event, run_handler
from libs.events.slatemq.attempts import failures_count
from libs.events.slatemq.headers import EVENTS_HEADER
from libs.events.slatemq.queues import (
    PREFETCH,
    TYPE_HEADER,
    Queues,
    finish,
    release,
    undecrypted,
)
from slatemq.errors import FailedPrecondition, NotFound, SlateMQError
from slatemq.events.envelope import Event, encode_event
from slatemq.models import now_ms

log = logging.getLogger(__name__)


class Events:
    """Publishes messages, and delivers from the queue of the group."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._held: dict[str, slatemq.Received] = {}
        self._seen_ms = now_ms()  # when the queue was there last

    async def publish(self, events: Sequence[Event]) -> None:
        prefix = self._queues.settings.queue_prefix
        await self._queues.client.publish_many(
            slatemq.OutgoingMessage(
                encode_event(event), {EVENTS_HEADER: prefix, TYPE_HEADER: event.type}
            )
            for event in events
        )

    async def start(self, types: frozenset[str]) -> None:
        """Create the queue of the group."""
        self._queues.events = self._queues.events_of(types)
        await self._queues.ensure_queue(self._queues.events, EVENTS_HEADER, types)
        self._seen_ms = now_ms()

    async def acknowledge(self, event_id: str) -> None:
        message = self._held.get(event_id)
        if message is None:
            return
        await finish(message.ack())
        if self._held.get(event_id) is message:  # else it was delivered again meanwhile
            del self._held[event_id]

    async def stop(self) -> None:
        await release([*self._held.values()])

    async def deliver(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        consumer = self._queues.client.consume(self._queues.events, prefetch=PREFETCH)
        try:
            async with consumer as messages:
                async for message in messages:
                    note_up()
                    self._seen_ms = now_ms()  # it may be deleted while the handler works
                    try:
                        await self._deliver_one(message, handler)
                    except SlateMQError:
                        message.drop_lease()  # no call repeats it: it comes again after that
                        raise
        except NotFound:
            events = self._queues.events
            await self._queues.create_again(events, EVENTS_HEADER, types, self._seen_ms)
            self._seen_ms = now_ms()

    async def _deliver_one(self, message: slatemq.Received, handler: Handler) -> None:
        if not await self._queues.takes(message, EVENTS_HEADER):
            return
        fault = undecrypted(message)
        if isinstance(fault, FailedPrecondition):
            log.warning("an event cannot be decrypted: %s", fault.message)
            has_retries_left = await self._has_retries_left(message)
            await self._queues.end_attempt(
                message, fault.message, has_retries_left=has_retries_left
            )
            return
        if fault is not None:
            log.error("a damaged event goes to the dead letters: %s", fault.message)
        event = fault.message if fault else read_event(self._queues.events, message.payload)
        if isinstance(event, str):
            await finish(message.fail(event))
            return
        self._held[event.id] = message
        await run_handler(handler, event)
        has_retries_left = event.id not in self._held or await self._has_retries_left(message)
        if self._held.pop(event.id, None) is None:
            return
        await self._queues.end_attempt(message, NOT_ACKNOWLEDGED, has_retries_left=has_retries_left)

    async def _has_retries_left(self, message: slatemq.Received) -> bool:
        """Its broker is asked only where so many attempts were made that all may have failed."""
        max_retries = self._queues.settings.max_retries
        if message.attempts_count <= max_retries:
            return True
        try:
            return await failures_count(self._queues.client, message) < max_retries
        except NotFound:  # its lease has ended, and it is done
            return True
