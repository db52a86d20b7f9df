"""Topics of Kafka in memory: what this process sends, fetches and commits, and what is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from aiokafka import TopicPartition, errors
from aiokafka.admin import NewTopic
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.structs import RecordMetadata

from libs.events.kafka.connection import Connection
from libs.events.kafka.tasks import Tasks
from libs.events.settings import KafkaSettings

RECORD_BYTES_MAX: Final = 1 << 20
"""As aiokafka's producer and brokers have it by default."""


@dataclass
class Record:
    """A record as consumers see it."""

    topic: str
    offset: int
    value: bytes | None
    headers: list[tuple[str, bytes]]
    partition: int = 0
    timestamp: int = 0
    key: bytes | None = None


@dataclass
class Broker:
    """Topics, and what groups have committed. Consumers take topics of one partition.

    Attributes:
        partitions: Of each topic.
        refusal: What the next commits of a group raise.
        silent: Groups whose commits have no answer.
        deleted: Before which offsets records were deleted.
        listed_count: How many records of each topic it lists at most, since it is late.
        removed: Topics that it had, and whose records it refuses until they are created.
        created: What clients have asked to create, in order.
        consumers: All that were made, in order, as `producers`.
    """

    topics: dict[str, list[Record]] = field(default_factory=dict)
    committed: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)
    commits: list[tuple[str, dict[TopicPartition, int]]] = field(default_factory=list)
    refusal: dict[str, errors.KafkaError] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    deleted: dict[TopicPartition, int] = field(default_factory=dict)
    listed_count: int | None = None
    partitions: int = 1
    removed: set[str] = field(default_factory=set)
    created: list[NewTopic] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)
    producers: list[Producer] = field(default_factory=list)

    def add(
        self,
        topic: str,
        value: bytes | None,
        *headers: tuple[str, bytes],
        key: bytes | None = None,
        partition: int = 0,
    ) -> Record:
        """Append a record."""
        assert partition in range(self.partitions)
        records = self.topics.setdefault(topic, [])
        records.append(Record(topic, len(records), value, list(headers), partition, key=key))
        return records[-1]

    def remove(self, topic: str) -> None:
        """Remove a topic, as an operator does."""
        del self.topics[topic]
        self.removed.add(topic)


class Admin:
    """Creates topics."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def list_topics(self) -> list[str]:
        return list(self._broker.topics)

    async def create_topics(self, topics: Sequence[NewTopic]) -> Any:
        self._broker.created += topics
        for topic in topics:
            self._broker.removed.discard(topic.name)
            self._broker.topics[topic.name] = []
        return SimpleNamespace(topic_errors=[(topic.name, 0) for topic in topics])

    async def describe_configs(self, resources: Sequence[Any]) -> Sequence[Any]:
        """What topics were created with."""
        set_for = {topic.name: topic.topic_configs for topic in self._broker.created}
        rows = [
            (
                0,
                "",
                2,
                one.name,
                [*{"cleanup.policy": "delete", **set_for.get(one.name, {})}.items()],
            )
            for one in resources
        ]
        return [SimpleNamespace(resources=rows)]


class BrokerConnection(Connection):
    """A connection to it."""

    def __init__(self, settings: KafkaSettings, broker: Broker, topics: Iterable[str] = ()) -> None:
        """`topics` are known to exist."""
        super().__init__(settings)
        self._topics.update(topics)
        self._broker = broker
        self._producer = Producer(broker)

    async def _start_producer(self) -> Any:
        return Producer(self._broker)

    async def partitions(self, topic: str) -> list[int]:
        return list(range(self._broker.partitions))

    def consumer(self, group: str, **options: Any) -> Any:
        self._broker.consumers.append(Consumer(self._broker, group))
        return self._broker.consumers[-1]

    async def delete_records(self, before: Mapping[Any, int]) -> None:
        self._broker.deleted.update(before)

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[Any]:
        yield Admin(self._broker)


class Producer:
    """Appends what fits into a record.

    Attributes:
        fault: What each call raises.
    """

    def __init__(self, broker: Broker) -> None:
        self.fault: errors.KafkaError | None = None
        self._broker = broker
        broker.producers.append(self)

    async def stop(self) -> None: ...

    async def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int = 0,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> asyncio.Future[RecordMetadata]:
        if self.fault is not None:
            raise self.fault
        size_bytes = DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, [*headers])
        if size_bytes > RECORD_BYTES_MAX:
            raise errors.MessageSizeTooLargeError(f"{size_bytes} bytes")
        if topic in self._broker.removed:
            raise errors.UnknownTopicOrPartitionError
        record = self._broker.add(topic, value, *headers, key=key, partition=partition)
        place = TopicPartition(topic, partition)
        sent: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        sent.set_result(RecordMetadata(topic, partition, place, record.offset, None, 0, None))
        return sent


class Consumer:
    """A consumer of a group, without joining it.

    Attributes:
        fault: What each fetch raises.
    """

    def __init__(self, broker: Broker, group: str) -> None:
        self.fault: errors.KafkaError | None = None
        self._broker = broker
        self._group = group
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def subscribe(self, topics: Iterable[str] = (), *, pattern: str = "", listener: Any) -> None:
        """Take the topics that there are now, as `assign` does."""
        names = {name for name in self._broker.topics if pattern and re.match(pattern, name)}
        self.assign(TopicPartition(name, 0) for name in sorted(names | {*topics}))

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self._positions = {
            one: self._broker.committed.get((self._group, one), 0) for one in partitions
        }

    def assignment(self) -> set[TopicPartition]:
        return set(self._positions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._positions[partition] = offset

    def pause(self, *partitions: TopicPartition) -> None:
        self._paused.update(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        self._paused.difference_update(partitions)

    def paused(self) -> set[TopicPartition]:
        return set(self._paused)

    def highwater(self, partition: TopicPartition) -> int:
        return len(self._broker.topics.get(partition.topic, []))

    async def getmany(
        self, *wanted: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        if self.fault is not None:
            raise self.fault
        found: dict[TopicPartition, list[Record]] = {}
        for partition in wanted or tuple(self._positions):
            if partition in self._paused:
                continue
            # As a broker with `auto_offset_reset`, where a topic was created again.
            if self._positions[partition] > self.highwater(partition):
                self._positions[partition] = 0
            records = self._broker.topics.get(partition.topic, [])[self._positions[partition] :]
            if records:
                found[partition] = records[:max_records]
                self._positions[partition] += len(found[partition])
        if not found:
            await asyncio.sleep(timeout_ms / 1000)
        return found

    async def committed(self, partition: TopicPartition) -> int | None:
        return self._broker.committed.get((self._group, partition))

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        if self._group in self._broker.refusal:
            raise self._broker.refusal[self._group]
        if self._group in self._broker.silent:
            await asyncio.Event().wait()
        assert offsets.keys() <= self.assignment()
        self._broker.commits.append((self._group, dict(offsets)))
        for partition, offset in offsets.items():
            self._broker.committed[self._group, partition] = offset

    async def beginning_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        return {one: self._broker.deleted.get(one, 0) for one in partitions}

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        listed_count = self._broker.listed_count
        ends = {one: self.highwater(one) for one in partitions}
        if listed_count is None:
            return ends
        return {one: min(end, listed_count) for one, end in ends.items()}


@asynccontextmanager
async def tasks_of(broker: Broker, **changes: Any) -> AsyncIterator[Tasks]:
    """The tasks of the sole consumer there; names begin with `t`, its groups with `g`."""
    settings = KafkaSettings(
        brokers=("in memory",), topic_prefix="t", consumer_group="g", partitions=1, **changes
    )
    tasks = Tasks(BrokerConnection(settings, broker), is_sole_consumer=True)
    try:
        yield tasks
    finally:
        await tasks.stop()
