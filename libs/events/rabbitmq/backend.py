"""The backend of RabbitMQ."""

from __future__ import annotations

from libs.events.backend import QueueBackend
from libs.events.rabbitmq.connection import Connection, close_channel, declare_all, translated
from libs.events.rabbitmq.events import Events
from libs.events.rabbitmq.tasks import Tasks
from libs.events.settings import RabbitmqSettings
from slatemq.errors import FailedPrecondition, InvalidArgument


class RabbitmqBackend(QueueBackend):
    NAME = "RabbitMQ"
    _translated = staticmethod(translated)

    _connection: Connection

    async def connect(self, config: RabbitmqSettings) -> None:
        if not config.url.startswith(("amqp://", "amqps://")):
            raise InvalidArgument("queue.rabbitmq.url", "must begin with amqp:// or amqps://")
        self._connection = Connection(config)
        self._compose(Events(self._connection), Tasks(self._connection))
        try:
            with translated():
                channel = await self._connection.open_channel()
                await declare_all(channel, config)
                await close_channel(channel)
        except FailedPrecondition as error:
            raise InvalidArgument("queue.rabbitmq.url", error.message) from error
        except ValueError as error:
            raise InvalidArgument("queue.rabbitmq.url", str(error)) from error

    async def disconnect(self) -> None:
        await self._connection.close()

    async def ping(self) -> None:
        await close_channel(await self._connection.open_channel())
