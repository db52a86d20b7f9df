"""What other programs put into the places of tasks."""

from __future__ import annotations

from typing import Any

import aio_pika
from aiokafka import AIOKafkaProducer
from redis import asyncio as aioredis

import slatemq
from libs.events.settings import (
    ActivemqSettings,
    KafkaSettings,
    RabbitmqSettings,
    RedisSettings,
    SlatemqSettings,
)
from libs.events.slatemq.headers import TASKS_HEADER


async def enqueue_raw(settings: Any, raw: bytes) -> None:
    """Put something into the place of the tasks of a backend, beside all that knows of tasks."""
    match settings:
        case RedisSettings():
            await _into_redis(settings, raw)
        case RabbitmqSettings():
            async with await aio_pika.connect(settings.url) as connection:
                channel = await connection.channel()
                message = aio_pika.Message(raw)
                await channel.default_exchange.publish(message, f"{settings.queue_prefix}.tasks")
        case KafkaSettings():
            async with AIOKafkaProducer(bootstrap_servers=list(settings.brokers)) as producer:
                await producer.send_and_wait(f"{settings.topic_prefix}.tasks", raw)
        case SlatemqSettings():
            async with slatemq.connect(settings.endpoint) as client:
                await client.publish(raw, {TASKS_HEADER: settings.queue_prefix})
        case ActivemqSettings():
            await _into_activemq(settings, raw)


async def _into_redis(settings: RedisSettings, raw: bytes) -> None:
    key = f"{settings.stream_prefix}:tasks"
    async with aioredis.Redis.from_url(settings.url) as client:
        if settings.task_structure == "lists":
            await client.rpush(key, raw)
        else:
            await client.xadd(key, {"task": raw})


async def _into_activemq(settings: ActivemqSettings, raw: bytes) -> None:
    from libs.events.activemq.connection import Connections, message_of

    connection = Connections(settings)
    await connection.send(connection.addresses.tasks, message_of(raw, "raw"))
    await connection.close()
