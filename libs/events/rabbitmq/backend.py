"""The backend of RabbitMQ."""

from __future__ import annotations

from libs.events.backend import QueueBackend
from libs.events.rabbitmq.address import check_vhost
from libs.events.rabbitmq.connection import Connections, translated
from libs.events.rabbitmq.events import Events
from libs.events.rabbitmq.tasks import Tasks
from libs.events.settings import RabbitmqSettings
from libs.events.tls_faults import TlsFault


class RabbitmqBackend(QueueBackend):
    NAME = "RabbitMQ"
    _translated = staticmethod(translated)

    _connections: Connections

    async def open(self, config: RabbitmqSettings) -> None:
        self._connections = Connections(config)
        tasks = Tasks(self._connections)
        self._compose(Events(self._connections), tasks)
        async with self._opening("queue.rabbitmq.url", self._check_address):
            await self._connections.declare_all()
            if self._is_sole_consumer:  # Of others, one that only publishes must take none.
                await tasks.start()

    async def _check_address(self) -> TlsFault | None:
        await check_vhost(self._connections.address)
        return await self._connections.address.find_tls_fault()

    async def disconnect(self) -> None:
        await self._connections.close()

    async def ping(self) -> None:
        await self._connections.ping()
