"""Events in SlateMQ whose acknowledgement has no answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from libs.events.settings import SlatemqSettings
from libs.events.slatemq.events import Events
from slatemq.errors import Unavailable
from slatemq.events.catalogue import QueueDeleted, make_event
from slatemq.events.envelope import Event, encode_event

EVENT = make_event(
    QueueDeleted(queue="orders"), source="broker-0", request_id="", at_ms=1_771_761_600_000
)


class Message:
    """A message with the event; its broker does not answer at first."""

    payload = encode_event(EVENT)
    attempts_count = 1

    def __init__(self) -> None:
        self.acks: list[bool] = []

    async def ack(self) -> None:
        self.acks.append(len(self.acks) > 0)
        if not self.acks[-1]:
            raise Unavailable("the broker does not answer")


async def takes(message: Any, header: str) -> bool:
    return True


async def test_an_event_is_acknowledged_by_the_call_that_repeats_one_in_an_outage() -> None:
    queues: Any = SimpleNamespace(settings=SlatemqSettings(), events="events", takes=takes)
    events = Events(queues)
    message: Any = Message()

    async def handle(event: Event) -> None:
        with pytest.raises(Unavailable):
            await events.acknowledge(event.id)
        await events.acknowledge(event.id)

    await events._deliver_one(message, handle)
    assert message.acks == [False, True]
