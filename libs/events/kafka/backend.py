"""The backend of Kafka."""

from __future__ import annotations

from libs.events.backend import QueueBackend
from libs.events.kafka.connection import Connection, translated
from libs.events.kafka.events import Events
from libs.events.kafka.tasks import Tasks
from libs.events.settings import KafkaSettings


class KafkaBackend(QueueBackend):
    NAME = "Kafka"
    _translated = staticmethod(translated)
    HEALTH_S = 5.0

    _kafka_tasks: Tasks
    _connection: Connection

    async def open(self, config: KafkaSettings) -> None:
        self._connection = Connection(config)
        tasks = Tasks(self._connection, is_sole_consumer=self._is_sole_consumer)
        self._kafka_tasks = tasks
        self._compose(Events(self._connection), tasks)
        async with self._opening("queue.kafka.brokers", self._connection.check_tls):
            await self._connection.open()
            await tasks.prepare()

    async def disconnect(self) -> None:
        await self._connection.close()

    async def trim_tasks(self) -> bool:
        with self._calling():
            return await self._kafka_tasks.trim()

    async def ping(self) -> None:
        await self._connection.ping()
