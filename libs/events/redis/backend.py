"""The backend of Redis."""

from __future__ import annotations

import asyncio
from typing import Any

from libs.events.backend import QueueBackend
from libs.events.redis.connection import (
    OPERATION_S,
    make_consumer_name,
    open_client,
    translated,
)
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.delayed_tasks import TaskReading
from libs.events.redis.event_stream import EventStream
from libs.events.redis.list_tasks import ListTasks
from libs.events.redis.stream_tasks import StreamTasks
from libs.events.settings import RedisSettings
from slatemq.errors import FailedPrecondition, InvalidArgument


class RedisBackend(QueueBackend):
    NAME = "Redis"
    _translated = staticmethod(translated)

    _client: Any

    async def connect(self, config: RedisSettings) -> None:
        client: Any = open_client(config)
        consumer = make_consumer_name()
        dead = DeadLetters(client, config.stream_prefix)
        reading = TaskReading(self._is_sole_consumer, self._gather_ms / 1000)
        kind = ListTasks if config.task_structure == "lists" else StreamTasks
        tasks = kind(client, config, consumer, dead, reading)
        self._client = client
        self._compose(EventStream(client, config, consumer, dead), tasks)
        try:
            with translated():
                await client.ping()
                await tasks.connect()
        except FailedPrecondition as error:
            key = "url" if error.reason == "LOGIN" else "stream_prefix"
            raise InvalidArgument(f"queue.redis.{key}", error.message) from error

    async def disconnect(self) -> None:
        async with asyncio.timeout(OPERATION_S):
            await self._client.aclose()

    async def ping(self) -> None:
        await self._client.ping()
