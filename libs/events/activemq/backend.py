"""The backend of ActiveMQ."""

from __future__ import annotations

from libs.events.activemq.connection import Connection, translated
from libs.events.activemq.events import Events
from libs.events.activemq.tasks import Tasks
from libs.events.backend import QueueBackend
from libs.events.settings import ActivemqSettings
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable


class ActivemqBackend(QueueBackend):
    NAME = "ActiveMQ"
    _translated = staticmethod(translated)

    _connection: Connection

    async def open(self, config: ActivemqSettings) -> None:
        self._connection = Connection(config)
        self._compose(Events(self._connection), Tasks(self._connection))
        try:
            with translated():
                await self._connection.prepare()
        except FailedPrecondition as error:
            raise InvalidArgument("queue.activemq.url", error.message) from error
        except Unavailable:
            if fault := await self._connection.find_tls_fault():
                raise InvalidArgument("queue.activemq.url", fault.description) from None
            raise

    async def disconnect(self) -> None:
        await self._connection.close()

    async def ping(self) -> None:
        receiver = await self._connection.receive(self._connection.addresses.dead, browse=True)
        await receiver.close()
