"""Redis Lists: RPUSH and BLMPOP. What is popped is gone: a plain list knows no ack."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.suite.clients import redis_client
from benchmarks.suite.clients.contract import Delivery

WAIT_S = 1


class Client(redis_client.Client):
    """One connection pool."""

    async def prepare(self, queues: Sequence[str]) -> None:
        await self._redis.delete(*queues)

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        await self._redis.rpush(queue, *payloads)

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        answer = await self._redis.blmpop(WAIT_S, 1, queue, direction="LEFT", count=count)
        return [(payload, None) for payload in answer[1]] if answer else []

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        pass
