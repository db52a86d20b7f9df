"""The backend of ActiveMQ."""

from __future__ import annotations

import asyncio

from libs.events.activemq.connection import Connection, translated
from libs.events.activemq.events import Events
from libs.events.activemq.tasks import Tasks
from libs.events.composed import ComposedBackend
from libs.events.settings import ActivemqSettings
from slatemq.errors import FailedPrecondition, InvalidArgument, SlateMQError

HEALTH_S = 3.0


class ActivemqBackend(ComposedBackend):
    """Events and tasks in ActiveMQ."""

    def __init__(self) -> None:
        """Not connected yet."""
        super().__init__(translated)
        self._connection: Connection

    async def connect(self, config: ActivemqSettings) -> None:
        """See QueueBackend. Raises InvalidArgument, Unavailable."""
        self._connection = Connection(config)
        self._compose(Events(self._connection), Tasks(self._connection))
        try:
            with translated():
                await self._connection.prepare()
        except FailedPrecondition as error:
            raise InvalidArgument("queue.activemq.url", error.message) from error

    async def disconnect(self) -> None:
        """See ComposedBackend."""
        await self._connection.close()

    async def health_check(self) -> bool:
        """See QueueBackend."""
        try:
            async with asyncio.timeout(HEALTH_S):
                with translated():
                    receiver = await self._connection.receive(
                        self._connection.addresses.dead, browse=True
                    )
                    await receiver.close()
        except (SlateMQError, TimeoutError):
            return False
        return True
