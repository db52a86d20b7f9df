"""NATS JetStream: file storage, a durable pull consumer per queue, an ack for each message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import nats
import nats.js.api

from benchmarks.suite.clients.contract import Delivery

WAIT_S = 1.0
FETCH_MAX = 1000


class Client:
    """One connection. A fan-out is one stream with a consumer for each queue: stored once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pulls: dict[str, nats.js.JetStreamContext.PullSubscription] = {}

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
                max_ack_pending=100_000,
                metadata={"topic": queues[0]},
            )

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        if len(payloads) == 1:
            await self._jetstream.publish(queue, payloads[0])
            return
        answers = [await self._jetstream.publish_async(queue, one) for one in payloads]
        await asyncio.gather(*answers)

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        pull = self._pulls.get(queue)
        if pull is None:
            stream = await self._stream_of(queue)
            pull = await self._jetstream.pull_subscribe_bind(durable=queue, stream=stream)
            self._pulls[queue] = pull
        try:
            messages = await pull.fetch(min(count, FETCH_MAX), timeout=WAIT_S)
        except TimeoutError:
            return []
        return [(message.data, message) for message in messages]

    async def _stream_of(self, queue: str) -> str:
        for info in await self._jetstream.streams_info():
            for consumer in await self._jetstream.consumers_info(info.config.name):
                if consumer.name == queue:
                    return str(info.config.name)
        raise LookupError(queue)

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        for _, message in deliveries:
            await message.ack()
