"""RabbitMQ: quorum queues, persistent messages, publisher confirms, an ack for each message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aio_pika

from benchmarks.suite.clients.contract import Delivery

WAIT_S = 1.0
PREFETCH = 10_000


class Client:
    """One connection with one channel. A fan-out is an exchange with the queues bound to it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._arrived: dict[str, asyncio.Queue[aio_pika.abc.AbstractIncomingMessage]] = {}

    async def open(self) -> None:
        self._connection = await aio_pika.connect(self._url)
        self._channel = await self._connection.channel(publisher_confirms=True)
        await self._channel.set_qos(prefetch_count=PREFETCH)

    async def close(self) -> None:
        await self._connection.close()

    async def prepare(self, queues: Sequence[str]) -> None:
        exchange = await self._channel.declare_exchange(queues[0], "fanout", durable=True)
        for queue in queues:
            declared = await self._channel.declare_queue(
                queue, durable=True, arguments={"x-queue-type": "quorum"}
            )
            await declared.bind(exchange)

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        exchange = await self._channel.get_exchange(queue, ensure=False)
        mode = aio_pika.DeliveryMode.PERSISTENT
        await asyncio.gather(
            *(
                exchange.publish(aio_pika.Message(one, delivery_mode=mode), routing_key="")
                for one in payloads
            )
        )

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        arrived = self._arrived.get(queue)
        if arrived is None:
            arrived = self._arrived[queue] = asyncio.Queue()
            declared = await self._channel.get_queue(queue, ensure=False)
            await declared.consume(arrived.put)
        try:
            async with asyncio.timeout(WAIT_S):
                found = [await arrived.get()]
        except TimeoutError:
            return []
        while len(found) < count and not arrived.empty():
            found.append(arrived.get_nowait())
        return [(message.body, message) for message in found]

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        for _, message in deliveries:
            await message.ack()
