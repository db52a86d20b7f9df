"""Events in Kafka."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

from aiokafka import TopicPartition
from aiokafka.partitioner import murmur2

from libs.events.deliveries import Handler, Redeliveries
from libs.events.kafka.connection import COMPACTED, JOIN_S, OPERATION_S, Connection, translated
from libs.events.kafka.offsets import Offsets
from libs.events.retrying import Outage
from libs.events.tasks import cut_error
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable
from slatemq.events.catalogue import CATALOGUE
from slatemq.events.cloud_events import subject_of
from slatemq.events.envelope import Event, decode_event, encode_event

log = logging.getLogger(__name__)

FETCH_COUNT = 100
FETCH_MS = 1_000


class Events:
    """Publishes to a topic for each type, and delivers as one consumer of a group."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._settings = connection.settings
        self._dead = f"{self._settings.topic_prefix}.dead-letter.events"
        self._consumer: Any = None
        self._offsets: Offsets
        self._held: dict[str, list[tuple[TopicPartition, int]]] = {}

    async def publish(self, events: Sequence[Event]) -> None:
        types = {event.type for event in events}
        compacted = types.intersection(self._settings.compacted)
        await self._connection.ensure_topics(map(self._topic, types - compacted))
        await self._connection.ensure_topics(map(self._topic, compacted), COMPACTED)
        await self._connection.send(map(self._record, events))

    async def start(self, types: frozenset[str]) -> None:
        """Create the topics, and join the group."""
        wanted = types or frozenset(CATALOGUE)
        compacted = wanted.intersection(self._settings.compacted)
        await self._connection.ensure_topics(map(self._topic, wanted - compacted))
        await self._connection.ensure_topics(map(self._topic, compacted), COMPACTED)
        consumer = self._connection.consumer(self._settings.consumer_group)
        self._offsets = Offsets(consumer)
        self._held.clear()
        if types:
            consumer.subscribe(sorted(map(self._topic, types)), listener=self._offsets)
        else:
            prefix = re.escape(self._settings.topic_prefix)
            pattern = rf"^{prefix}\.(?!tasks(\.retry)?$|dead-letter(\.events)?$)"
            consumer.subscribe(pattern=pattern, listener=self._offsets)
        try:
            async with asyncio.timeout(JOIN_S):
                await consumer.start()
        except BaseException:
            await consumer.stop()
            raise
        self._consumer = consumer

    async def stop(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            async with asyncio.timeout(OPERATION_S):
                await consumer.stop()

    async def deliver(self, types: frozenset[str], handler: Handler) -> None:
        outage = Outage(log, "Kafka")
        while True:
            redeliveries = Redeliveries(
                handler, self._settings.max_retries, self._settings.retry_delay_ms
            )
            try:
                with translated():
                    if self._consumer is None:
                        await self.start(types)
                    while True:
                        await self._deliver_some(redeliveries)
                        outage.end()
            except (Unavailable, FailedPrecondition, InvalidArgument) as error:
                await self._drop_consumer()
                await outage.wait(error)
            finally:
                await redeliveries.stop()

    async def acknowledge(self, event_id: str) -> None:
        places = self._held.pop(event_id, ())
        for partition, offset in places:
            self._offsets.finish(partition, offset)
        if places:
            await self._offsets.commit()

    async def _deliver_some(self, redeliveries: Redeliveries) -> None:
        fetched = await self._consumer.getmany(timeout_ms=FETCH_MS, max_records=FETCH_COUNT)
        for partition, records in fetched.items():
            for record in records:
                self._offsets.begin(partition, record.offset)
        for partition, records in fetched.items():
            for record in records:
                if self._offsets.is_open(partition, record.offset):
                    await self._deliver(partition, record, redeliveries)

    async def _deliver(
        self, partition: TopicPartition, record: Any, redeliveries: Redeliveries
    ) -> None:
        place = partition, record.offset
        try:
            event = decode_event(record.value)
        except InvalidArgument as error:
            why = cut_error(str(error))
            log.error("a record of %s is not an event: %s", partition.topic, why)
            await self._bury(place, record.value, why)
            return
        self._held.setdefault(event.id, []).append(place)

        async def bury() -> None:
            with translated():
                await self._bury(place, record.value, "no subscriber acknowledged it")
            self._held.pop(event.id, None)

        def acknowledged() -> bool:
            return event.id not in self._held or not self._offsets.is_open(*place)

        await redeliveries.deliver(event, acknowledged, bury)

    async def _bury(self, place: tuple[TopicPartition, int], value: bytes, error: str) -> None:
        await self._connection.ensure_topics([self._dead])
        await self._connection.send_strange(self._dead, value, {}, error)
        self._offsets.finish(*place)
        await self._offsets.commit()

    async def _drop_consumer(self) -> None:
        try:
            with translated():
                await self.stop()
        except (Unavailable, FailedPrecondition) as error:
            log.info("left the group without notice: %s", error)

    def _topic(self, event_type: str) -> str:
        return f"{self._settings.topic_prefix}.{event_type}"

    def _record(self, event: Event) -> dict[str, Any]:
        partition_key = key_of(event).encode()
        record = {"topic": self._topic(event.type), "value": encode_event(event)}
        if event.type not in self._settings.compacted:
            return {**record, "key": partition_key}
        # Compaction keeps the newest record of a key: of each object or queue, not of each bucket.
        partition = (murmur2(partition_key) & 0x7FFFFFFF) % self._settings.partitions
        return {**record, "key": subject_of(event).encode(), "partition": partition}


def key_of(event: Event) -> str:
    """What keeps events in order: their bucket, else queue, else first routing header, else ID."""
    data = event.data
    for name in ("bucket", "queue"):
        if name in data:
            return str(data[name])
    headers = data.get("headers")
    if isinstance(headers, dict) and headers:
        return str(next(iter(headers.values())))
    return str(data.get("message_id", event.id))
