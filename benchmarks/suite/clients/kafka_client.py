"""A Kafka broker: one topic for each queue, all in-sync replicas, offsets that are committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks.suite.clients.contract import Delivery

WAIT_MS = 1000


class Client:
    """One producer, and one consumer of the queue that is consumed first."""

    def __init__(self, url: str) -> None:
        self._brokers = url.removeprefix("kafka://")
        self._consumer: AIOKafkaConsumer | None = None
        self._consuming = asyncio.Lock()

    async def open(self) -> None:
        self._producer = AIOKafkaProducer(bootstrap_servers=self._brokers, acks="all")
        await self._producer.start()

    async def close(self) -> None:
        await self._producer.stop()
        if self._consumer is not None:
            await self._consumer.stop()

    async def prepare(self, queues: Sequence[str]) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._brokers)
        await admin.start()
        try:
            topics = [NewTopic(queue, num_partitions=1, replication_factor=1) for queue in queues]
            await admin.create_topics(topics)
        finally:
            await admin.close()

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        await asyncio.gather(*(self._producer.send_and_wait(queue, one) for one in payloads))

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        async with self._consuming:
            consumer = self._consumer or await self._begin(queue)
            arrived = await consumer.getmany(timeout_ms=WAIT_MS, max_records=count)
        return [
            (record.value, (partition, record.offset))
            for partition, records in arrived.items()
            for record in records
        ]

    async def _begin(self, queue: str) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._brokers, group_id=queue, enable_auto_commit=False
        )
        await consumer.start()
        partition = TopicPartition(queue, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        self._consumer = consumer
        return consumer

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        assert self._consumer is not None, "consumed before"
        await self._consumer.commit({place: offset + 1 for _, (place, offset) in deliveries})
