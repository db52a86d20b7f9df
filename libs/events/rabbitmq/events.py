"""Events in RabbitMQ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from aio_pika.abc import AbstractIncomingMessage

from libs.events.deliveries import NOT_ACKNOWLEDGED, GroupEvents, Handler, Held, group_of
from libs.events.rabbitmq.connection import (
    OPERATION_S,
    Connections,
    Deliveries,
    Names,
    acknowledge,
    close_channel,
    declare_all,
    declare_queue,
    declare_retry,
    message_of,
    retry_of,
    translated,
)
from slatemq.errors import FailedPrecondition, Unavailable
from slatemq.events.catalogue import CATALOGUE
from slatemq.events.envelope import Event, encode_event

log = logging.getLogger(__name__)

ATTEMPTS: Final = "attempts"
"""The header that counts the failed attempts of an event."""


class Events(GroupEvents[AbstractIncomingMessage]):
    """Publishes to the exchange, and delivers from the queue of the group.

    What is not acknowledged waits in a queue of its own, and not here: a delivery that is held
    takes a place of the prefetch, and after `consumer_timeout` RabbitMQ ends its channel.
    """

    def __init__(self, connections: Connections) -> None:
        settings = connections.settings
        self._connections = connections
        self._settings = settings
        self._names = Names(settings)
        place = self._names.events
        super().__init__(place, settings.max_retries, settings.retry_delay_ms, translated)
        self._queue = self._names.events
        self._deliveries: Deliveries | None = None

    async def publish(self, events: Sequence[Event]) -> None:
        # All by one channel: if that is lost, none of them overtakes one that is sent again.
        channel = await self._connections.publishing.shared_channel()
        sent = [
            self._connections.publish(
                self._names.exchange,
                event.type,
                message_of(
                    encode_event(event), self._settings, message_id=event.id, type=event.type
                ),
                is_kept=False,  # an event without subscribers
                channel=channel,
            )
            for event in events
        ]
        await asyncio.gather(*sent)

    async def start(self, types: frozenset[str]) -> None:
        """Bind the queue of the group to the types, and consume it."""
        self._queue = group_of(self._names.events, types)
        consuming = self._connections.consuming
        channel = await consuming.open_channel(self._settings.prefetch_count)
        deliveries = consuming.deliveries(channel)
        # A server that is still starting may never answer.
        async with asyncio.timeout(OPERATION_S):
            await declare_all(channel, self._settings)
            queue = await declare_queue(channel, self._queue, self._settings)
            await declare_retry(channel, self._queue, self._settings)
            self._connections.subscribed.add(self._queue)
            every = ["#"] if self._settings.exchange_type == "topic" else CATALOGUE
            for key in sorted(types or every):
                await queue.bind(self._names.exchange, key)
            await deliveries.start(queue)
        self._deliveries = deliveries

    async def _deliver_all(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        try:
            with translated():
                if self._deliveries is None or self._deliveries.is_lost:
                    await self.start(types)
                note_up()
                while self._deliveries is not None:
                    message = await self._deliveries.next()
                    if message is not None:
                        await self._deliver_one(message, message.body, types, handler)
        except Exception:
            await self._release()
            raise

    async def _release(self) -> None:
        """What was delivered comes again, also where only a dead letter was refused."""
        deliveries, self._deliveries = self._deliveries, None
        if deliveries is not None and not deliveries.is_lost:
            try:
                with translated():
                    await close_channel(deliveries.channel)
            except (Unavailable, FailedPrecondition) as error:
                log.info("the channel was lost: %s", error)

    def _is_open(self, message: AbstractIncomingMessage) -> bool:
        # What an earlier channel delivered is not held any more.
        return self._deliveries is not None and not self._deliveries.is_lost

    async def _accept(self, message: AbstractIncomingMessage) -> None:
        await acknowledge(message)

    async def _retry(
        self, event: Event, held: Held[AbstractIncomingMessage], handler: Handler
    ) -> None:
        await self._end_by(event, held, lambda: self._give_back(held.delivery))

    async def _give_back(self, message: AbstractIncomingMessage) -> None:
        """Move an event to where it waits for its next attempt, or to the dead letters."""
        attempts = _attempts_of(message) + 1
        if attempts > self._settings.max_retries:
            await self._bury(message, NOT_ACKNOWLEDGED)
            return
        properties: dict[str, Any] = {"message_id": message.message_id, "type": message.type}
        target = self._queue
        if delay_ms := self._settings.retry_delay_ms:
            target = retry_of(self._queue)
            properties["expiration"] = delay_ms / 1000
        again = message_of(message.body, self._settings, headers={ATTEMPTS: attempts}, **properties)
        await self._connections.publish("", target, again, is_kept=True)
        # After a crash here it comes again beside its copy: both have one ID.
        await acknowledge(message)

    async def _bury(self, message: AbstractIncomingMessage, error: str) -> None:
        dead = message_of(
            message.body,
            self._settings,
            message_id=message.message_id,
            headers={"kind": "event", "error": error},
        )
        names = self._names
        await self._connections.publish(names.dead_exchange, names.dead, dead, is_kept=True)
        await acknowledge(message)


def _attempts_of(message: AbstractIncomingMessage) -> int:
    """How many attempts have failed; what other programs have set there counts as none."""
    attempts = message.headers.get(ATTEMPTS)
    return attempts if isinstance(attempts, int) else 0
