"""Exchanges of each type, durable and not; and what the server has otherwise than the settings."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import aio_pika
import msgspec
import pytest

from libs.events.backend import BackendStats
from libs.events.backends import open_backend
from libs.events.deliveries import group_of
from libs.events.settings import RabbitmqSettings
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.events.envelope import Event, decode_event, encode_event
from tests.integration.events.backends.rabbitmq_server import RabbitmqServer
from tests.integration.events.backends.test_conformance import (
    Subscriber,
    a_task,
    created,
    deleted,
    eventually_stats,
)
from tests.integration.events.conftest import EVENTUALLY_S, eventually, in_group, next_task

pytestmark = pytest.mark.slow  # A real server.


def settings_of(rabbitmq: RabbitmqServer, **changes: Any) -> RabbitmqSettings:
    """Settings with names that nothing else uses."""
    settings = rabbitmq.settings(f"t{uuid.uuid4().hex[:8]}")
    return msgspec.structs.replace(settings, **changes)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("exchange_type", ["topic", "direct", "fanout"])
async def test_an_exchange_of_any_type_carries_events_by_type_and_tasks(
    rabbitmq: RabbitmqServer, exchange_type: str, durable: bool
) -> None:
    settings = settings_of(rabbitmq, exchange_type=exchange_type, durable=durable)
    one, every = open_backend("rabbitmq"), open_backend("rabbitmq")
    await one.connect(settings)
    await every.connect(in_group(settings, f"{settings.queue_prefix}-every"))

    # Given a group for one type, and one for all
    of_one, of_every = Subscriber(one), Subscriber(every)
    await one.subscribe(["object.deleted"], of_one)
    await every.subscribe([], of_every)

    # When events of two types are published, then each group gets its own
    events = [created("a"), deleted("a"), created("b"), deleted("b")]
    await one.publish_batch(events)
    await eventually(lambda: len(of_every.got) >= 4 and len(of_one.got) >= 2)
    assert of_every.got == events
    assert of_one.got == [events[1], events[3]]

    # And a task comes again when it fails, and is a dead letter at last
    poison = a_task(max_retries=1)
    await one.enqueue_task(poison)
    for attempts in range(2):
        task = await next_task(one)
        assert task.attempts == attempts
        await one.fail_task(task.task_id, "no room")
    await eventually_stats(one, lambda stats: stats == BackendStats(0, 1))
    for backend in (one, every):
        await backend.close()


async def test_a_refused_event_is_no_delivery_while_it_waits_for_its_next_attempt(
    rabbitmq: RabbitmqServer,
) -> None:
    # Given a consumer that holds one delivery at a time, and attempts that are an hour apart
    settings = settings_of(rabbitmq, prefetch_count=1, retry_delay_ms=3_600_000)
    backend = open_backend("rabbitmq")
    await backend.connect(settings)
    got = list[Event]()

    async def handle(event: Event) -> None:
        if event == poison:
            raise RuntimeError("poison")
        got.append(event)
        await backend.acknowledge(event.id)

    # When one event is refused, then the one behind it is delivered
    await backend.subscribe([], handle)
    poison, good = created("poison"), created("good")
    await backend.publish_batch([poison, good])
    await eventually(lambda: got == [good])

    # And the refused one is in the queue that the page names, with how often it was refused
    async with await aio_pika.connect(settings.url) as connection:
        channel = await connection.channel()
        waiting = await channel.get_queue(f"{settings.queue_prefix}.events.retry")
        message = await waiting.get(timeout=EVENTUALLY_S)
        assert message is not None
        assert (message.headers["attempts"], message.type) == (1, poison.type)
        assert decode_event(message.body) == poison
    await backend.close()


async def test_failed_attempts_of_an_event_count_whichever_consumer_made_them(
    rabbitmq: RabbitmqServer,
) -> None:
    # Given an event that another consumer has refused as often as it is tried again
    settings = settings_of(rabbitmq)
    backend = open_backend("rabbitmq")
    await backend.connect(settings)
    handled = list[Event]()

    async def refuse(event: Event) -> None:
        handled.append(event)
        raise RuntimeError("refused")

    await backend.subscribe([], refuse)
    event = created("refused")
    async with await aio_pika.connect(settings.url) as connection:
        channel = await connection.channel()
        headers = {"attempts": settings.max_retries}
        message = aio_pika.Message(encode_event(event), headers=headers)
        await channel.default_exchange.publish(message, f"{settings.queue_prefix}.events")

    # When it is refused once more, then it is a dead letter
    await eventually_stats(backend, lambda stats: stats == BackendStats(0, 1))
    assert handled == [event]
    await backend.close()


@pytest.mark.parametrize(
    ("key", "value"), [("exchange_type", "direct"), ("exchange_type", "fanout"), ("durable", False)]
)
async def test_a_setting_that_differs_from_what_the_server_has_is_named(
    rabbitmq: RabbitmqServer, key: str, value: object
) -> None:
    # Given what was made by a backend before
    settings = settings_of(rabbitmq)
    before = open_backend("rabbitmq")
    await before.connect(settings)
    await before.close()

    # When a setting changes, then the next one is refused by its key
    changed = open_backend("rabbitmq")
    with pytest.raises(InvalidArgument) as refused:
        await changed.connect(msgspec.structs.replace(settings, **{key: value}))
    await changed.close()
    assert refused.value.field == f"queue.rabbitmq.{key}"


async def test_dead_letters_are_in_the_exchange_and_the_queue_that_the_page_names(
    rabbitmq: RabbitmqServer,
) -> None:
    # Given a queue that another program has bound to the exchange of dead letters
    settings = settings_of(rabbitmq, exchange="slatemq", queue_prefix="slatemq")
    backend = open_backend("rabbitmq")
    await backend.connect(settings)
    async with await aio_pika.connect(settings.url) as connection:
        channel = await connection.channel()
        own = await channel.declare_queue(exclusive=True)
        await own.bind("slatemq.dead-letters")
        # And one that another instance has bound to what an earlier version called so
        other = await channel.declare_queue(exclusive=True)
        await other.bind(await channel.declare_exchange("slatemq.dead-letter", "fanout"))

        # When a task fails
        task = a_task(max_retries=0)
        await backend.enqueue_task(task)
        await next_task(backend)
        await backend.fail_task(task.task_id, "no room")

        # Then it is there, and in the queue of dead letters
        for queue in (own, await channel.get_queue("slatemq.dead-letter")):
            dead = await queue.get(timeout=60)
            assert (dead.message_id, dead.headers["error"]) == (task.task_id, "no room")
        # And not with the other instance
        assert await other.get(fail=False) is None
    await backend.close()


async def test_an_exchange_that_the_server_has_lost_is_declared_by_the_publish_that_misses_it(
    rabbitmq: RabbitmqServer, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a publisher whose exchange is gone, as after a restart without `durable`
    settings = settings_of(rabbitmq, durable=False)
    backend = open_backend("rabbitmq")
    await backend.connect(settings)
    await backend.publish(created("before"))
    async with await aio_pika.connect(settings.url) as connection:
        channel = await connection.channel()
        await channel.exchange_delete(settings.exchange)

    # When a batch is published, then it is refused, and a later try succeeds
    events = [created(f"{n}") for n in range(100)]
    refusals = 0
    async with asyncio.timeout(EVENTUALLY_S):
        while True:
            try:
                await backend.publish_batch(events)
                break
            except SlateMQError:
                refusals += 1
                await asyncio.sleep(0.1)
    lost = [one for one in caplog.messages if "has lost the exchange" in one]
    assert 1 <= len(lost) <= refusals

    # And events reach subscribers
    subscriber = Subscriber(backend)
    await backend.subscribe([], subscriber)
    await backend.publish_batch(events)
    await eventually(lambda: len(subscriber.got) >= len(events))
    assert subscriber.got == events
    await backend.close()


async def test_an_event_comes_again_though_the_server_has_lost_where_it_would_wait(
    rabbitmq: RabbitmqServer,
) -> None:
    settings = settings_of(rabbitmq, retry_delay_ms=1)
    backend = open_backend("rabbitmq")
    await backend.connect(settings)
    attempts = list[str]()

    async def accept_second(event: Event) -> None:
        attempts.append(event.id)
        if len(attempts) > 1:
            await backend.acknowledge(event.id)

    # Given a subscriber whose queue for refused events was deleted
    await backend.subscribe(["object.created"], accept_second)
    group = group_of(f"{settings.queue_prefix}.events", frozenset(["object.created"]))
    async with await aio_pika.connect(settings.url) as connection:
        channel = await connection.channel()
        await channel.queue_delete(f"{group}.retry")

    # When it refuses an event, then that comes again
    event = created("again")
    await backend.publish(event)
    await eventually(lambda: attempts == [event.id, event.id])
    await backend.close()
