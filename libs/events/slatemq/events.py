"""Events in SlateMQ."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import slatemq
from libs.events.deliveries import Handler, run_handler
from libs.events.retrying import Outage
from libs.events.slatemq.headers import EVENTS_HEADER
from libs.events.slatemq.queues import PREFETCH, TYPE_HEADER, Queues, finish, release
from libs.events.tasks import cut_error
from slatemq.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from slatemq.events.envelope import Event, decode_event, encode_event

log = logging.getLogger(__name__)


class Events:
    """Publishes messages, and delivers from the queue of the group."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._held: dict[str, slatemq.Received] = {}

    async def publish(self, events: Sequence[Event]) -> None:
        prefix = self._queues.settings.queue_prefix
        await self._queues.client.publish_many(
            slatemq.OutgoingMessage(
                encode_event(event), {EVENTS_HEADER: prefix, TYPE_HEADER: event.type}
            )
            for event in events
        )

    async def start(self, types: frozenset[str]) -> None:
        """Create the queue of the group, or change the types that it gets."""
        await self._queues.ensure_queue(self._queues.events, EVENTS_HEADER, types)

    async def acknowledge(self, event_id: str) -> None:
        message = self._held.pop(event_id, None)
        if message is not None:
            await finish(message.ack())

    async def stop(self) -> None:
        await release([*self._held.values()])

    async def deliver(self, types: frozenset[str], handler: Handler) -> None:
        client, outage = self._queues.client, Outage(log, "SlateMQ")
        while True:
            try:
                async with client.consume(self._queues.events, prefetch=PREFETCH) as messages:
                    async for message in messages:
                        outage.end()
                        await self._deliver_one(message, handler)
            except (Unavailable, ResourceExhausted, DeadlineExceeded) as error:
                await outage.wait(error)
            except NotFound as error:
                log.error("the queue of events was deleted: %s", error)
                await outage.wait(error)

    async def _deliver_one(self, message: slatemq.Received, handler: Handler) -> None:
        try:
            event = decode_event(message.payload)
        except InvalidArgument as error:
            why = cut_error(str(error))
            log.error("message %d is not an event: %s", message.message_id, why)
            await finish(message.fail(why))
            return
        self._held[event.id] = message
        await run_handler(handler, event)
        if self._held.pop(event.id, None) is None:
            return
        reason = "no subscriber acknowledged it"
        if message.attempts_count > self._queues.settings.max_retries:
            await finish(message.fail(reason))
        else:
            await finish(message.nack(reason, self._queues.settings.retry_delay_ms / 1000))
