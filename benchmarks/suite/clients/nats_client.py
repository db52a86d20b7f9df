"""NATS JetStream: file storage, a durable push consumer per queue, an ack for each message.

A push consumer with a group: a pull through nats-py waits until its batch is full, which costs a
second wherever less is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import nats
import nats.js.api
from nats.aio.msg import Msg

from benchmarks.suite.clients.contract import Delivery

WAIT_S = 1.0
ACK_PENDING_MAX = 10_000


class Client:
    """One connection. A fan-out is one stream with a consumer for each queue: stored once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._arrived: dict[str, asyncio.Queue[Msg]] = {}

    async def open(self) -> None:
        self._connection = await nats.connect(self._url, pending_size=64 << 20)
        self._jetstream = self._connection.jetstream(publish_async_max_pending=100_000, timeout=60)

    async def close(self) -> None:
        await self._connection.flush()
        await self._connection.close()

    async def prepare(self, queues: Sequence[str]) -> None:
        retention = (
            nats.js.api.RetentionPolicy.WORK_QUEUE
            if len(queues) == 1
            else nats.js.api.RetentionPolicy.INTEREST
        )
        await self._jetstream.add_stream(
            name=queues[0],
            subjects=[queues[0]],
            storage=nats.js.api.StorageType.FILE,
            retention=retention,
        )
        for queue in queues:
            await self._jetstream.add_consumer(
                queues[0],
                durable_name=queue,
                ack_policy=nats.js.api.AckPolicy.EXPLICIT,
                max_ack_pending=ACK_PENDING_MAX,
                deliver_subject=f"to.{queue}",
                deliver_group=queue,
            )

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        if len(payloads) == 1:
            await self._jetstream.publish(queue, payloads[0])
            return
        answers = [await self._jetstream.publish_async(queue, one) for one in payloads]
        await asyncio.gather(*answers)

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        arrived = self._arrived.get(queue)
        if arrived is None:
            arrived = self._arrived[queue] = asyncio.Queue()
            await self._connection.subscribe(f"to.{queue}", queue=queue, cb=arrived.put)
        try:
            async with asyncio.timeout(WAIT_S):
                found = [await arrived.get()]
        except TimeoutError:
            return []
        while len(found) < count and not arrived.empty():
            found.append(arrived.get_nowait())
        return [(message.data, message) for message in found]

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        for _, message in deliveries:
            await message.ack()
