"""What is pushed into the queues of the backend SlateMQ, past their filters."""

from __future__ import annotations

import asyncio

import pytest

import slatemq
from libs.events.slatemq.headers import EVENTS_HEADER, TASKS_HEADER
from libs.events.tasks import WriteTask, encode_task
from slatemq.events.envelope import encode_event
from tests.integration.events.backends.test_conformance import Subscriber, a_task, created
from tests.integration.events.conftest import Rig, eventually

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_a_task_or_an_event_is_taken_by_its_header_alone(rig: Rig) -> None:
    """A policy permits to push to a queue those who may not publish with such headers."""
    consumer = await rig.backend()
    subscriber = Subscriber(consumer)
    await consumer.subscribe([], subscriber)
    prefix, group = rig.settings.queue_prefix, rig.settings.consumer_group
    task, event = a_task(), created("good")

    # Given a forged task and a forged event, and good ones behind them
    async with slatemq.connect(rig.settings.endpoint) as client:
        for queue, payload, header in (
            (f"{prefix}.tasks", encode_task(task), TASKS_HEADER),
            (f"{prefix}.events.{group}", encode_event(event), EVENTS_HEADER),
        ):
            await client.execute(
                [
                    slatemq.Push(queue, payload),
                    slatemq.Push(queue, payload, {header: "another"}),
                    slatemq.Push(queue, payload, {header: prefix}),
                ]
            )

    # Then the good ones alone come, and the others are dead letters
    taken: list[WriteTask] = []
    async with asyncio.timeout(60):
        while (await consumer.stats()).dead_letter_count < 4 or not taken:
            if (found := await consumer.dequeue_task()) is not None:
                taken.append(found)
                await consumer.complete_task(found.task_id)
    assert taken == [task]
    await eventually(lambda: subscriber.got)
    assert subscriber.got == [event]
