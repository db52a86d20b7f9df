"""Redis Streams: XADD, consumer groups, XACK and XDEL in pipelines, with hiredis."""

from __future__ import annotations

from collections.abc import Sequence

import redis.asyncio

from benchmarks.suite.clients.contract import Delivery

WAIT_MS = 1000
CONNECTIONS_MAX = 32
"""Calls under way at once: single publishes wait for a connection above it, and are not refused."""


class Client:
    """One connection. A fan-out is one stream with a group for each queue: stored once."""

    def __init__(self, url: str) -> None:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, max_connections=CONNECTIONS_MAX, timeout=None
        )
        self._redis = redis.asyncio.Redis(connection_pool=pool)
        self._topic: dict[str, str] = {}
        self._alone: dict[str, bool] = {}

    async def open(self) -> None:
        await self._redis.ping()

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)

    async def prepare(self, queues: Sequence[str]) -> None:
        for queue in queues:
            await self._redis.xgroup_create(queues[0], queue, id="0", mkstream=True)
            await self._redis.hset(f"topic:{queue}", mapping={"of": queues[0], "n": len(queues)})

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        if len(payloads) == 1:
            await self._redis.xadd(queue, {"p": payloads[0]})
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            for payload in payloads:
                pipe.xadd(queue, {"p": payload})
            await pipe.execute()

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        topic = await self._topic_of(queue)
        answer = await self._redis.xreadgroup(
            queue, "worker", {topic: ">"}, count=count, block=WAIT_MS
        )
        return [(fields[b"p"], entry) for _, entries in answer or () for entry, fields in entries]

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        topic = await self._topic_of(queue)
        entries = [entry for _, entry in deliveries]
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.xack(topic, queue, *entries)
            if self._alone[queue]:
                # A work queue deletes what is done; in a fan-out no consumer knows that by itself.
                pipe.xdel(topic, *entries)
            await pipe.execute()

    async def _topic_of(self, queue: str) -> str:
        if queue not in self._topic:
            fields = await self._redis.hgetall(f"topic:{queue}")
            self._topic[queue] = fields[b"of"].decode()
            self._alone[queue] = fields[b"n"] == b"1"
        return self._topic[queue]
