"""The backend of ActiveMQ."""

from __future__ import annotations

from libs.events.activemq.connection import Connections, translated
from libs.events.activemq.events import Events
from libs.events.activemq.tasks import Tasks
from libs.events.backend import QueueBackend
from libs.events.settings import ActivemqSettings


class ActivemqBackend(QueueBackend):
    NAME = "ActiveMQ"
    _translated = staticmethod(translated)

    _connections: Connections

    async def open(self, config: ActivemqSettings) -> None:
        self._connections = Connections(config)
        self._compose(Events(self._connections), Tasks(self._connections))
        async with self._opening("queue.activemq.url", self._connections.find_tls_fault):
            await self._connections.prepare()

    async def disconnect(self) -> None:
        await self._connections.close()

    async def ping(self) -> None:
        await self._connections.ping()
