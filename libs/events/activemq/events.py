"""Events in ActiveMQ."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from libs.events.activemq.connection import Connection, message_of, translated
from libs.events.activemq.links import Received, Receiver
from libs.events.deliveries import Handler, Redeliveries
from libs.events.retrying import Outage
from libs.events.tasks import cut_error
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable
from slatemq.events.envelope import Event, decode_event, encode_event

log = logging.getLogger(__name__)


class Events:
    """Publishes to the virtual topic, and delivers from the queue of the group."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._settings = connection.settings
        self._addresses = connection.addresses
        self._held: dict[str, list[Received]] = {}
        self._receiver: Receiver | None = None

    async def publish(self, events: Sequence[Event]) -> None:
        await self._connection.send(
            self._addresses.events,
            *(message_of(encode_event(event), event.id, type=event.type) for event in events),
        )

    async def start(self, types: frozenset[str]) -> None:
        """Consume the queue of the group, which the server creates."""
        receiver = await self._connection.receive(self._addresses.group)
        receiver.flow(self._settings.prefetch_count)
        self._receiver = receiver

    async def deliver(self, types: frozenset[str], handler: Handler) -> None:
        outage = Outage(log, "ActiveMQ")
        while True:
            redeliveries = Redeliveries(
                handler, self._settings.max_retries, self._settings.retry_delay_ms
            )
            try:
                with translated():
                    if self._receiver is None or self._receiver.is_lost:
                        await self.start(types)
                    outage.end()
                    while self._receiver is not None:
                        await self._deliver(await self._receiver.next(), types, redeliveries)
            except (Unavailable, FailedPrecondition) as error:
                await outage.wait(error)
            finally:
                await redeliveries.stop()
                self._held.clear()

    async def acknowledge(self, event_id: str) -> None:
        for message in self._held.pop(event_id, ()):
            message.accept()

    async def stop(self) -> None:
        """Nothing to do: what was not accepted goes back with the connection."""

    async def _deliver(
        self, message: Received, types: frozenset[str], redeliveries: Redeliveries
    ) -> None:
        try:
            event = decode_event(message.body)
        except InvalidArgument as error:
            why = cut_error(str(error))
            log.error("a message of %s is not an event: %s", self._addresses.group, why)
            await self._bury(message, why)
            return
        if types and event.type not in types:
            message.accept()
            return
        self._held.setdefault(event.id, []).append(message)

        async def bury() -> None:
            with translated():
                await self._bury(message, "no subscriber acknowledged it")
            self._held.pop(event.id, None)

        await redeliveries.deliver(event, lambda: event.id not in self._held, bury)

    async def _bury(self, message: Received, error: str) -> None:
        dead = message_of(message.body, message.id, kind="event", error=error)
        await self._connection.send(self._addresses.dead, dead)
        message.accept()
