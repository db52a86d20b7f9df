"""The backend of Redis."""

from __future__ import annotations

import asyncio
from typing import Any

from libs.events.backend import QueueBackend
from libs.events.redis.connection import (
    HELLO,
    OPERATION_S,
    context_of,
    make_consumer_name,
    open_client,
    translated,
)
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.delayed_tasks import TaskReading
from libs.events.redis.event_stream import EventStream
from libs.events.redis.list_tasks import ListTasks, forget_consumers, processing_keys
from libs.events.redis.permissions import check_commands
from libs.events.redis.stream_tasks import StreamTasks
from libs.events.settings import RedisSettings
from libs.events.tls_faults import TlsFault, find_tls_fault
from slatemq.errors import InvalidArgument


class RedisBackend(QueueBackend):
    NAME = "Redis"
    _translated = staticmethod(translated)

    _client: Any

    async def open(self, config: RedisSettings) -> None:
        client: Any = open_client(config)
        consumer = make_consumer_name()
        dead = DeadLetters(client, config.stream_prefix)
        reading = TaskReading(self._is_sole_consumer, self._gather_ms / 1000)
        kind = ListTasks if config.task_structure == "lists" else StreamTasks
        tasks = kind(client, config, consumer, dead, reading)
        self._client = client
        self._compose(EventStream(client, config, consumer, dead), tasks)
        async with self._opening("queue.redis.url", self._find_tls_fault):
            await client.ping()
            await check_commands(client, config, has_tasks=self._is_sole_consumer)
            await self._check_keys(config)
            await tasks.connect()

    async def _check_keys(self, config: RedisSettings) -> None:
        """Raise InvalidArgument where a key is of another type than this backend makes it."""
        prefix, structure = config.stream_prefix, config.task_structure
        await self._check_structure(f"{prefix}:tasks", structure)
        kinds = {"events": b"stream", "dead-letter": b"stream", "tasks": structure[:-1].encode()}
        kinds |= {"tasks:delayed": b"zset", "tasks:consumers": b"zset"}
        for name, kind in kinds.items():
            found = await self._client.type(f"{prefix}:{name}")
            if found not in (kind, b"none"):
                raise InvalidArgument(
                    "queue.redis.stream_prefix",
                    f"the key {prefix}:{name} is a {found.decode()}, not a {kind.decode()}",
                )
        if structure == "streams" and self._is_sole_consumer:
            await forget_consumers(self._client, f"{prefix}:tasks")

    async def _check_structure(self, key: str, wanted: str) -> None:
        """Raise InvalidArgument where there are tasks, perhaps, in the other structure."""
        other, keys = "streams", [key]
        if wanted == "streams":
            # What is in work is in no other key while nothing waits.
            other, keys = "lists", [*await processing_keys(self._client, key), key]
        for one in keys:
            if f"{(await self._client.type(one)).decode()}s" == other:
                raise InvalidArgument(
                    "queue.redis.task_structure",
                    f"the key {one} has tasks as {other}: let them be applied with {other}, then "
                    f"remove it (DEL {one}), and start again with {wanted}",
                )

    async def _find_tls_fault(self) -> TlsFault | None:
        pool = self._client.connection_pool
        facts = pool.connection_kwargs
        host, port = facts.get("host", "localhost"), facts.get("port", 6379)
        return await find_tls_fault(host, port, context_of(pool), HELLO)

    async def disconnect(self) -> None:
        async with asyncio.timeout(OPERATION_S):
            await self._client.aclose()

    async def ping(self) -> None:
        await self._client.ping()
