"""The backend of RabbitMQ."""

from __future__ import annotations

from libs.events.backend import QueueBackend
from libs.events.rabbitmq.address import check_vhost
from libs.events.rabbitmq.connection import Connections, translated
from libs.events.rabbitmq.events import Events
from libs.events.rabbitmq.tasks import Tasks
from libs.events.settings import RabbitmqSettings
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable


class RabbitmqBackend(QueueBackend):
    NAME = "RabbitMQ"
    _translated = staticmethod(translated)

    _connections: Connections

    async def open(self, config: RabbitmqSettings) -> None:
        self._connections = Connections(config)
        tasks = Tasks(self._connections)
        self._compose(Events(self._connections), tasks)
        try:
            with translated():
                await self._connections.declare_all()
                if self._is_sole_consumer:  # Of others, one that only publishes must take none.
                    await tasks.start()
        except FailedPrecondition as error:
            raise InvalidArgument("queue.rabbitmq.url", error.message) from error
        except Unavailable:
            await self._check_address()
            raise

    async def _check_address(self) -> None:
        """Raise InvalidArgument where the server is not down, but the URL is wrong."""
        address = self._connections.address
        await check_vhost(address)
        if fault := await address.find_tls_fault():
            raise InvalidArgument("queue.rabbitmq.url", fault.description)

    async def disconnect(self) -> None:
        await self._connections.close()

    async def ping(self) -> None:
        await self._connections.ping()
