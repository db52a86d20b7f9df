"""Events in Kafka."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

from aiokafka import TopicPartition
from aiokafka.partitioner import murmur2

from libs.events.deliveries import GroupEvents, Handler, group_of
from libs.events.kafka.connection import COMPACTED, JOIN_S, OPERATION_S, Connection, translated
from libs.events.kafka.offsets import Offsets
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable
from slatemq.events.catalogue import CATALOGUE
from slatemq.events.cloud_events import subject_of
from slatemq.events.envelope import Event, encode_event

log = logging.getLogger(__name__)

FETCH_COUNT = 100
FETCH_MS = 1_000

RETRIED_MAX = 500
"""Events that wait for another attempt, each in memory, before those behind them wait, too."""

_NO_EVENTS: Final = r"(?:ingest-\d+\.)?(?:tasks(?:\.retry)?|dead-letter(?:\.events)?)"
"""The topics of a prefix that have no events: those of each ingest, too."""

_NOT_ROUTING: Final = ("traceparent", "tracestate", "slatemq-")
"""How names of headers begin that tracing or SlateMQ has set."""


def _check_types(field: str, types: Set[str]) -> None:
    """Raise InvalidArgument for a type whose topic would be one of tasks or of dead letters."""
    for one in sorted(types):
        if re.fullmatch(_NO_EVENTS, one):
            raise InvalidArgument(
                field, f"cannot be {one!r} on Kafka: that topic has tasks or dead letters"
            )


class Delivery(NamedTuple):
    """A record of a partition, as delivered to this consumer."""

    partition: TopicPartition
    offset: int
    value: bytes


class Events(GroupEvents[Delivery]):
    """Publishes to a topic for each type, and delivers as one consumer of a group."""

    def __init__(self, connection: Connection) -> None:
        settings = connection.settings
        place = f"{settings.topic_prefix}.*"
        super().__init__(place, settings.max_retries, settings.retry_delay_ms, translated)
        self._connection = connection
        self._settings = settings
        self._dead = f"{self._settings.topic_prefix}.dead-letter.events"
        self._consumer: Any = None
        self._offsets: Offsets

    async def publish(self, events: Sequence[Event]) -> None:
        types = {event.type for event in events}
        _check_types("type", types)
        await self._ensure_topics(types)
        partitions = {
            event_type: await self._connection.partitions(self._topic(event_type))
            for event_type in types & {*self._settings.compacted}
        }
        await self._connection.send(self._record(event, partitions) for event in events)

    async def _ensure_topics(self, types: Set[str]) -> None:
        compacted = types & {*self._settings.compacted}
        await self._connection.ensure_topics(map(self._topic, types - compacted))
        await self._connection.ensure_topics(map(self._topic, compacted), COMPACTED)

    async def start(self, types: frozenset[str]) -> None:
        """Create the topics, and join the group."""
        _check_types("event_types", types)
        await self._ensure_topics(types or frozenset(CATALOGUE))
        consumer = self._connection.consumer(group_of(self._settings.consumer_group, types))
        self._offsets = Offsets(consumer)
        if types:
            consumer.subscribe(sorted(map(self._topic, types)), listener=self._offsets)
        else:
            prefix = re.escape(self._settings.topic_prefix)
            pattern = rf"^{prefix}\.(?!{_NO_EVENTS}$)"
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

    async def _deliver_all(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        try:
            if self._consumer is None:
                await self.start(types)
            while True:
                await self._deliver_some(handler)
                note_up()
        except Exception:
            await self._drop_consumer()
            raise

    async def _deliver_some(self, handler: Handler) -> None:
        # A paused consumer goes on to poll: else its group would take it for dead.
        if len(self._retrying) >= RETRIED_MAX:
            self._consumer.pause(*self._consumer.assignment())
        elif paused := self._consumer.paused():
            self._consumer.resume(*paused)
        fetched = await self._consumer.getmany(timeout_ms=FETCH_MS, max_records=FETCH_COUNT)
        deliveries = [
            Delivery(partition, record.offset, record.value)
            for partition, records in fetched.items()
            for record in records
        ]
        for delivery in deliveries:
            self._offsets.begin(delivery.partition, delivery.offset)
        for delivery in deliveries:
            if self._is_open(delivery):
                await self._deliver_one(delivery, delivery.value, frozenset(), handler)

    def _is_open(self, delivery: Delivery) -> bool:
        return self._offsets.is_open(delivery.partition, delivery.offset)

    async def _accept(self, delivery: Delivery) -> None:
        await self._offsets.end(delivery.partition, delivery.offset)

    async def _bury(self, delivery: Delivery, error: str) -> None:
        await self._connection.ensure_topics([self._dead])
        await self._connection.send_strange(self._dead, delivery.value, {}, error)
        await self._accept(delivery)

    async def _drop_consumer(self) -> None:
        try:
            with translated():
                await self.stop()
        except (Unavailable, FailedPrecondition) as error:
            log.info("left the group without notice: %s", error)

    def _topic(self, event_type: str) -> str:
        return f"{self._settings.topic_prefix}.{event_type}"

    def _record(self, event: Event, partitions: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """The record of an event; `partitions` has those of the topic of each compacted type."""
        partition_key = key_of(event).encode()
        record = {"topic": self._topic(event.type), "value": encode_event(event)}
        if event.type not in partitions:
            return {**record, "key": partition_key}
        # Compaction keeps the newest record of a key: of each object or queue, not of each bucket.
        numbers = partitions[event.type]
        partition = numbers[(murmur2(partition_key) & 0x7FFFFFFF) % len(numbers)]
        return {**record, "key": subject_of(event).encode(), "partition": partition}


def key_of(event: Event) -> str:
    """What keeps events in order: their bucket, else queue, else a routing header, else ID.

    Of the headers that is `queue`, else the first by name: logs keep no other order. A trace is
    new for each message, so it routes none.
    """
    data = event.data
    for name in ("bucket", "queue"):
        if name in data:
            return str(data[name])
    headers = data.get("headers")
    if isinstance(headers, dict):
        routing = [name for name in headers if not name.startswith(_NOT_ROUTING)]
        if routing:
            return str(headers["queue" if "queue" in routing else min(routing)])
    return str(data.get("message_id", event.id))
