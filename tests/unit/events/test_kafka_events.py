"""Events in Kafka: by which key each goes, and into which partition."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiokafka import TopicPartition, errors
from aiokafka.partitioner import DefaultPartitioner

from libs.events.kafka.connection import translated
from libs.events.kafka.events import FETCH_COUNT, RETRIED_MAX, Events, key_of
from libs.events.refusals import TooLarge
from libs.events.settings import KafkaSettings
from libs.storage.records.metadata import decode_log_entry, encode_headers, encode_log_columns
from slatemq.errors import InvalidArgument
from slatemq.events.catalogue import CATALOGUE, ObjectCreated, make_event
from slatemq.events.envelope import Event, encode_event
from tests.integration.waiting import WAIT_SECONDS
from tests.unit.events.kafka_in_memory import RECORD_BYTES_MAX, Broker, BrokerConnection

SETTINGS = KafkaSettings(topic_prefix="t", partitions=6, compacted=("object.created",))
RETRIED = KafkaSettings(topic_prefix="t", partitions=1, max_retries=3, retry_delay_ms=3_600_000)
EVENT_ID = "evt_01KJ2KH1G0J9FEYRWH6ATYF8WE"
TRACE = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "a=b", "slatemq-x": "y"}
BUCKETS = [f"bucket-{n}" for n in range(20)]


def created(bucket: str, key: str = "cat.jpg") -> Event:
    data = ObjectCreated(bucket=bucket, key=key, size=1, etag="", content_type="")
    return make_event(data, source="ingest-0", request_id="", at_ms=1_771_761_600_000)


def stored(**headers: str) -> dict[str, str]:
    """Headers as they come back from a log."""
    (message,) = decode_log_entry(
        encode_log_columns(7, 0, [0], [0], [encode_headers(headers)], [0])
    )
    return dict(message.headers)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"bucket": "photos", "queue": "orders", "key": "cat.jpg"}, "photos"),
        ({"queue": "orders", "message_id": 7, "headers": {"region": "eu"}}, "orders"),
        ({"message_id": 7, "headers": stored(region="eu", plan="gold")}, "gold"),
        ({"message_id": 7, "headers": stored(region="eu", plan="gold", queue="orders")}, "orders"),
        ({"message_id": 7, "headers": stored(**TRACE, user="ann")}, "ann"),
        ({"message_id": 7, "headers": stored(**TRACE)}, "7"),
        ({"message_id": 7, "headers": {}}, "7"),
        ({"job": "retention"}, EVENT_ID),
    ],
)
def test_the_key_of_an_event_is_its_bucket_else_queue_else_header_else_id(
    data: dict[str, Any], key: str
) -> None:
    assert key_of(msgspec.structs.replace(created("any"), id=EVENT_ID, data=data)) == key


@pytest.mark.parametrize("partitions", [1, 2, 6, 9])
async def test_a_compacted_type_goes_into_the_partitions_that_its_topic_has(
    partitions: int,
) -> None:
    # Given a topic with other partitions than those of the settings
    broker = Broker(partitions=partitions)
    events = Events(BrokerConnection(SETTINGS, broker, topics=["t.object.created"]))

    # When events of several buckets are published
    await events.publish([created(bucket) for bucket in BUCKETS])

    # Then each is in the partition of its bucket, as those of other types are, by its object
    numbers = list(range(partitions))
    partitioner = DefaultPartitioner()
    assert [(record.key, record.partition) for record in broker.topics["t.object.created"]] == [
        (f"{bucket}/cat.jpg".encode(), partitioner(bucket.encode(), numbers, numbers))
        for bucket in BUCKETS
    ]


async def test_a_subscriber_of_all_types_gets_what_is_in_topics_of_events_alone() -> None:
    # Given tasks and dead letters of the backend and of ingests, and behind them an event of a type
    # that another program has
    broker = Broker()
    event = msgspec.structs.replace(created("photos"), type="tasks.retry.later")
    for prefix in ("t", "t.ingest-0", "t.ingest-12"):
        for name in ("tasks", "tasks.retry", "dead-letter", "dead-letter.events"):
            broker.add(f"{prefix}.{name}", b"no event")
    broker.add("t.tasks.retry.later", encode_event(event))
    known = [f"t.{name}" for name in CATALOGUE]
    settings = KafkaSettings(topic_prefix="t")
    events = Events(BrokerConnection(settings, broker, [*known, "t.dead-letter.events"]))

    # When it subscribes
    got = asyncio.Queue[Event]()

    async def handler(event: Event) -> None:
        await events.acknowledge(event.id)
        await got.put(event)

    delivering = asyncio.create_task(events.deliver(frozenset(), handler, lambda: None))
    try:
        async with asyncio.timeout(60):
            assert await got.get() == event
    finally:
        delivering.cancel()
        await asyncio.wait([delivering])

    # Then nothing else has been taken, nor reported as what is not an event
    assert [dict(offsets) for _, offsets in broker.commits] == [
        {TopicPartition("t.tasks.retry.later", 0): 1}
    ]
    assert len(broker.topics["t.dead-letter.events"]) == 1


NOT_OF_EVENTS = [
    f"{ingest}{name}"
    for ingest in ("", "ingest-0.")
    for name in ("tasks", "tasks.retry", "dead-letter", "dead-letter.events")
]


@pytest.mark.parametrize("name", NOT_OF_EVENTS)
async def test_a_type_whose_topic_has_tasks_or_dead_letters_is_refused(name: str) -> None:
    broker = Broker()
    events = Events(BrokerConnection(KafkaSettings(topic_prefix="t"), broker))
    wrong = msgspec.structs.replace(created("photos"), type=name)

    with pytest.raises(InvalidArgument) as refused:
        await events.publish([created("photos"), wrong])
    assert refused.value.field == "type"
    with pytest.raises(InvalidArgument) as refused:
        await events.start(frozenset([name]))
    assert refused.value.field == "event_types"

    assert (broker.topics, broker.consumers) == ({}, [])


async def test_a_type_that_is_not_compacted_goes_by_its_key_alone() -> None:
    broker = Broker()
    settings = KafkaSettings(topic_prefix="t")
    events = Events(BrokerConnection(settings, broker, topics=["t.object.created"]))
    await events.publish([created("photos")])
    (record,) = broker.topics["t.object.created"]
    assert record.key == b"photos"


async def test_an_event_of_too_many_bytes_is_refused_as_too_large() -> None:
    broker = Broker()
    settings = KafkaSettings(topic_prefix="t")
    events = Events(BrokerConnection(settings, broker, topics=["t.object.created"]))
    with pytest.raises(TooLarge), translated():
        await events.publish([created("photos", "k" * RECORD_BYTES_MAX)])


@pytest.mark.parametrize(
    ("before", "now", "effect"),
    [
        ((), ("object.created",), "nothing is compacted"),
        (("object.created",), (), "keep only the newest event of each"),
        (("object.created",), ("object.created",), ""),
        ((), (), ""),
    ],
)
async def test_compacted_that_a_topic_was_not_created_with_is_warned_of(
    before: tuple[str, ...], now: tuple[str, ...], effect: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a topic that was created with a setting, and a process with this or another one
    broker = Broker()
    for compacted in (before, now):
        assert not caplog.messages
        settings = KafkaSettings(topic_prefix="t", compacted=compacted)
        events = Events(BrokerConnection(settings, broker))
        await events.publish([created("photos")])
        await events.publish([created("photos")])

    # Then the log has it once, with its effect, where it is another one
    assert len(caplog.messages) == (1 if effect else 0)
    assert all("t.object.created has cleanup.policy=" in line for line in caplog.messages)
    assert all(effect in line for line in caplog.messages)
    assert len(broker.topics["t.object.created"]) == 4


async def test_a_removed_topic_is_created_with_our_settings_by_a_later_publish() -> None:
    # Given events in a topic that was created, and removed on the brokers
    broker = Broker()
    settings = KafkaSettings(topic_prefix="t", partitions=6)
    events = Events(BrokerConnection(settings, broker))
    await events.publish([created("photos")])
    broker.remove("t.object.created")

    # When more are published, then they are refused, and the next try creates it
    with pytest.raises(errors.UnknownTopicOrPartitionError):
        await events.publish([created("photos")])
    await events.publish([created("photos")])
    assert [(one.name, one.num_partitions) for one in broker.created] == [
        ("t.object.created", 6)
    ] * 2
    assert len(broker.topics["t.object.created"]) == 1


async def test_a_subscriber_that_refuses_all_holds_a_bounded_number_of_events() -> None:
    # Given more events than may be retried, and a subscriber that refuses each
    broker = Broker()
    connection = BrokerConnection(RETRIED, broker, map("t.{}".format, CATALOGUE))
    events = Events(connection)
    count = RETRIED_MAX + 3 * FETCH_COUNT
    await events.publish([created("photos", str(number)) for number in range(count)])
    got: list[Event] = []
    polls = asyncio.Event()

    def note_up() -> None:
        if len(got) >= RETRIED_MAX and events._consumer.paused():
            polls.set()

    async def refuse(event: Event) -> None:
        got.append(event)
        raise RuntimeError("refused")

    # When it has got so many, then those behind wait at the broker
    delivering = asyncio.create_task(events.deliver(frozenset(), refuse, note_up))
    async with asyncio.timeout(WAIT_SECONDS):
        await polls.wait()
    assert RETRIED_MAX <= len(got) < RETRIED_MAX + FETCH_COUNT

    # And come once these are acknowledged
    async def acknowledge(event: Event) -> None:
        got.append(event)
        await events.acknowledge(event.id)

    delivering.cancel()
    await asyncio.wait([delivering])
    got.clear()
    delivering = asyncio.create_task(events.deliver(frozenset(), acknowledge, lambda: None))
    async with asyncio.timeout(WAIT_SECONDS):
        while len(got) < 3 * FETCH_COUNT:
            await asyncio.sleep(0)
    delivering.cancel()
    await asyncio.wait([delivering])


async def test_an_event_whose_acknowledgement_was_refused_can_be_acknowledged_again() -> None:
    # Given an event, and brokers that refuse the commit of its acknowledgement
    broker = Broker()
    connection = BrokerConnection(RETRIED, broker, map("t.{}".format, CATALOGUE))
    events = Events(connection)
    await events.publish([created("photos")])
    got = asyncio.Queue[Event]()
    delivering = asyncio.create_task(events.deliver(frozenset(), got.put, lambda: None))
    async with asyncio.timeout(WAIT_SECONDS):
        event = await got.get()
    group = RETRIED.consumer_group
    broker.refusal[group] = errors.KafkaTimeoutError()
    for _ in range(2):
        with pytest.raises(errors.KafkaTimeoutError):
            await events.acknowledge(event.id)
        await asyncio.sleep(0)

    # When they take it again, then the next call acknowledges it, and another one does nothing
    del broker.refusal[group]
    for _ in range(2):
        await events.acknowledge(event.id)
    place = TopicPartition("t.object.created", 0)
    assert broker.commits == [(group, {place: 1})]
    delivering.cancel()
    await asyncio.wait([delivering])
