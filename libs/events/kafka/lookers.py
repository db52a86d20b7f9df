"""How far groups are in topics, without being one of their members."""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka import TopicPartition

from libs.events.kafka.connection import OPERATION_S, Connection


class Lookers:
    """One consumer for each group that is looked at: it reads offsets, and no record."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._consumers: dict[str, Any] = {}
        self._turn = asyncio.Lock()

    async def ranges(self, topic: str, group: str) -> dict[TopicPartition, tuple[int, int]]:
        """For each partition what the group has committed, or its beginning, and its end."""
        async with self._turn:
            try:
                async with asyncio.timeout(OPERATION_S):
                    return await self._ranges(await self._consumer(group), topic)
            except BaseException:
                await self._drop(group)
                raise

    async def close(self) -> None:
        async with self._turn:
            for group in list(self._consumers):
                await self._drop(group)

    async def _ranges(self, consumer: Any, topic: str) -> dict[TopicPartition, tuple[int, int]]:
        numbers = await self._connection.partitions(topic)
        partitions = [TopicPartition(topic, number) for number in numbers]
        begins = await consumer.beginning_offsets(partitions)
        ends = await consumer.end_offsets(partitions)
        committed = {one: await consumer.committed(one) for one in partitions}
        return {one: (max(begins[one], committed[one] or 0), ends[one]) for one in partitions}

    async def _consumer(self, group: str) -> Any:
        if group not in self._consumers:
            consumer = self._connection.consumer(group)
            self._consumers[group] = consumer
            await consumer.start()
        return self._consumers[group]

    async def _drop(self, group: str) -> None:
        consumer = self._consumers.pop(group, None)
        if consumer is not None:
            await consumer.stop()
