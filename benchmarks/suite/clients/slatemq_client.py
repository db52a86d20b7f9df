"""SlateMQ through its own Python client."""

from __future__ import annotations

from collections.abc import Sequence

import slatemq
from benchmarks.suite.clients.contract import Delivery
from slatemq.client import Client as SlateMQ
from slatemq.models import OutgoingMessage


class Client:
    """One connection to a stack; `url` is host:port of any of its services."""

    def __init__(self, url: str) -> None:
        self._client: SlateMQ = slatemq.connect(url)

    async def open(self) -> None:
        await self._client.__aenter__()

    async def close(self) -> None:
        await self._client.__aexit__(None, None, None)

    async def prepare(self, queues: Sequence[str]) -> None:
        for queue in queues:
            await self._client.create_queue(queue, filter=f'headers["topic"] == "{queues[0]}"')

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        headers = {"topic": queue}
        if len(payloads) == 1:
            await self._client.publish(payloads[0], headers)
            return
        await self._client.publish_many([OutgoingMessage(one, headers) for one in payloads])

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        claimed = await self._client.claim(queue, count, wait=1)
        return [(message.payload, message.lease_token) for message in claimed]

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        for error in await self._client.ack([token for _, token in deliveries]):
            if error is not None:
                raise error
