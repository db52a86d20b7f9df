"""The backend of Kafka."""

from __future__ import annotations

import asyncio

from libs.events.composed import ComposedBackend
from libs.events.kafka.connection import Connection, translated
from libs.events.kafka.events import Events
from libs.events.kafka.tasks import Tasks
from libs.events.settings import KafkaSettings
from slatemq.errors import FailedPrecondition, InvalidArgument, SlateMQError

HEALTH_S = 5.0


class KafkaBackend(ComposedBackend):
    """Events and tasks in Kafka."""

    def __init__(self, *, is_sole_consumer: bool = False) -> None:
        """Not connected yet."""
        super().__init__(translated)
        self._is_sole_consumer = is_sole_consumer
        self._kafka_tasks: Tasks
        self._connection: Connection

    async def connect(self, config: KafkaSettings) -> None:
        """See QueueBackend. Raises InvalidArgument, Unavailable."""
        self._connection = Connection(config)
        tasks = Tasks(self._connection, is_sole_consumer=self._is_sole_consumer)
        self._kafka_tasks = tasks
        self._compose(Events(self._connection), tasks)
        try:
            with translated():
                await self._connection.open()
                await tasks.prepare()
        except FailedPrecondition as error:
            raise InvalidArgument("queue.kafka.brokers", error.message) from error
        except ValueError as error:
            raise InvalidArgument("queue.kafka.brokers", str(error)) from error

    async def disconnect(self) -> None:
        """See ComposedBackend."""
        await self._connection.close()

    async def trim_tasks(self) -> bool:
        """See QueueBackend."""
        with self._translated():
            return await self._kafka_tasks.trim()

    async def health_check(self) -> bool:
        """See QueueBackend."""
        try:
            async with asyncio.timeout(HEALTH_S):
                with translated():
                    return await self._connection.is_up()
        except (SlateMQError, TimeoutError):
            return False
