"""ActiveMQ over AMQP 1.0: a queue of durable messages, each accepted by broker and consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from proton import Message

from benchmarks.suite.clients.contract import Delivery
from libs.events.activemq.connection import Connection
from libs.events.activemq.engine import Receiver
from libs.events.settings import ActivemqSettings

WAIT_S = 1.0
PREFETCH = 1_000


class Client:
    """One connection, of the engine that our backend has, since proton's own blocks its thread."""

    def __init__(self, url: str) -> None:
        self._connection = Connection(ActivemqSettings(url=url))
        self._receivers: dict[str, Receiver] = {}
        self._consuming = asyncio.Lock()  # a receiver has one who waits

    async def open(self) -> None:
        await self._connection.engine()

    async def close(self) -> None:
        await self._connection.close()

    async def prepare(self, queues: Sequence[str]) -> None:
        """ActiveMQ makes a queue when it is first used."""
        (queue,) = queues
        await self._connection.open_sender(f"queue://{queue}")

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        messages = [Message(body=one, inferred=True, durable=True) for one in payloads]
        await self._connection.send(f"queue://{queue}", *messages)

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        async with self._consuming:
            receiver = self._receivers.get(queue)
            if receiver is None:
                receiver = await self._connection.receive(f"queue://{queue}")
                receiver.flow(PREFETCH)
                self._receivers[queue] = receiver
            try:
                async with asyncio.timeout(WAIT_S):
                    found = [await receiver.next()]
            except TimeoutError:
                return []
            while len(found) < count and receiver.peek() is not None:
                found.append(await receiver.next())
            return [(one.body, one) for one in found]

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        for _, received in deliveries:
            received.accept()
