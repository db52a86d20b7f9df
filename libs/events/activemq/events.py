"""Events in ActiveMQ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libs.events.activemq.connection import Connections, message_of, translated
from libs.events.activemq.engine import Received, Receiver
from libs.events.deliveries import GroupEvents, Handler
from slatemq.events.envelope import Event, encode_event


class Events(GroupEvents[Received]):
    """Publishes to the virtual topic, and delivers from the queue of the group."""

    def __init__(self, connections: Connections) -> None:
        settings = connections.settings
        self._connections = connections
        self._settings = settings
        self._addresses = connections.addresses
        place = self._addresses.group
        super().__init__(place, settings.max_retries, settings.retry_delay_ms, translated)
        self._receiver: Receiver | None = None

    async def publish(self, events: Sequence[Event]) -> None:
        await self._connections.send(
            self._addresses.events,
            *(message_of(encode_event(event), event.id, type=event.type) for event in events),
        )

    async def start(self, types: frozenset[str]) -> None:
        """Consume the queue of the group, which the server creates."""
        receiver = await self._connections.receive(self._addresses.group_of(types))
        receiver.flow(self._settings.prefetch_count)
        self._receiver = receiver

    async def _deliver_all(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        if self._receiver is None or self._receiver.is_lost:
            await self.start(types)
        note_up()
        try:
            while self._receiver is not None:
                message = await self._receiver.next()
                await self._deliver_one(message, message.body, types, handler)
        except Exception:
            await self._release()
            raise

    async def _release(self) -> None:
        """What was delivered comes again, also where only a dead letter was refused."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await receiver.close()

    def _is_open(self, message: Received) -> bool:
        return not message.is_lost

    async def _accept(self, message: Received) -> None:
        message.accept()

    async def _bury(self, message: Received, error: str) -> None:
        dead = message_of(message.body, message.id, kind="event", error=error)
        await self._connections.send(self._addresses.dead, dead)
        message.accept()
