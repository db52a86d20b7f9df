"""The topics of Kafka, as its own client finds them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from libs.events.backends import open_backend
from libs.events.deliveries import group_of
from libs.events.kafka import connection
from libs.events.settings import KafkaSettings
from slatemq.events.envelope import Event, encode_event
from tests.integration.events.backends.kafka_server import HOME, kafka_server
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import created, deleted, persist
from tests.integration.events.conftest import eventually

pytestmark = pytest.mark.slow  # A real server.


async def records_of(settings: KafkaSettings, topic: str, count: int) -> list[tuple[bytes, bytes]]:
    """The first records of a topic, by key and value."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=list(settings.brokers), auto_offset_reset="earliest"
    )
    async with consumer:
        records = [await consumer.getone() for _ in range(count)]
    return [(record.key, record.value) for record in records]


async def test_each_type_has_its_topic_also_a_compacted_one_of_fewer_partitions(
    tmp_path: Path,
) -> None:
    with running(kafka_server(tmp_path)) as server:
        # Given topics that were made with one partition, one of them of a compacted type
        settings = msgspec.structs.replace(
            server.settings("slatemq"), partitions=1, compacted=("object.created",)
        )
        first = [created("a", bucket="photos"), deleted("a")]
        second = [created(f"{n}", bucket=f"bucket-{n}") for n in range(8)]
        for partitions, events in ((1, first), (6, second)):
            # When a backend whose settings say more publishes to them
            backend = open_backend("kafka")
            await backend.connect(msgspec.structs.replace(settings, partitions=partitions))
            await backend.publish_batch(events)
            await backend.close()

        # Then the topic of each type has its events: by object if compacted, else by bucket
        assert await records_of(settings, "slatemq.object.created", 9) == [
            (f"{event.data['bucket']}/{event.data['key']}".encode(), encode_event(event))
            for event in (first[0], *second)
        ]
        assert await records_of(settings, "slatemq.object.deleted", 1) == [
            (b"photos", encode_event(first[1]))
        ]


async def test_an_event_is_committed_by_the_call_that_repeats_an_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if HOME in os.environ:
        # The session outlives a start of Kafka, which takes long: else the event would come again.
        monkeypatch.setattr(connection, "SESSION_MS", 120_000)
    with running(kafka_server(tmp_path)) as server:
        # Given an event that its subscriber has, and an acknowledgement that was given up
        settings = msgspec.structs.replace(
            server.settings("slatemq"), partitions=1, retry_delay_ms=3_600_000
        )
        backend = open_backend("kafka")
        await backend.connect(settings)
        got: list[Event] = []

        async def handle(event: Event) -> None:
            got.append(event)

        event = created("once more")
        await backend.subscribe([event.type], handle)
        await backend.publish(event)
        await eventually(lambda: got)
        await asyncio.to_thread(server.kill)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):  # no broker runs
                await backend.acknowledge(event.id)

        # When it is repeated until it is answered
        await asyncio.to_thread(server.start)
        await persist(lambda: backend.acknowledge(event.id))

        # Then the group has committed the event
        place = TopicPartition(f"slatemq.{event.type}", 0)
        group = group_of(settings.consumer_group, {event.type})
        consumer = AIOKafkaConsumer(bootstrap_servers=list(settings.brokers), group_id=group)
        async with consumer:
            consumer.assign([place])
            assert await consumer.committed(place) == 1
        assert got == [event]
        await backend.close()
