"""Events that no subscriber acknowledges, whose dead letters the server refuses for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libs.events.deliveries import GroupEvents, Handler, run_handler
from libs.events.rabbitmq.connection import Connections
from libs.events.rabbitmq.events import Events
from libs.events.settings import ActivemqSettings, RabbitmqSettings
from slatemq.errors import Unavailable
from slatemq.events.catalogue import QueueDeleted, make_event
from slatemq.events.envelope import Event, encode_event
from tests.integration.waiting import WAIT_SECONDS

EVENT = make_event(
    QueueDeleted(queue="orders"), source="broker-0", request_id="", at_ms=1_771_761_600_000
)

OTHER = make_event(
    QueueDeleted(queue="bills"), source="broker-0", request_id="", at_ms=1_771_761_600_000
)


class RefusingGroup(GroupEvents[str]):
    """Delivers one event, and refuses its dead letter as often as `refusals` says."""

    def __init__(self, refusals: int) -> None:
        super().__init__("the test", 1, 0, nullcontext)
        self.refusals = refusals
        self.buried = asyncio.Event()

    async def _deliver_all(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        await self._deliver_one("delivery", encode_event(EVENT), types, handler)
        await asyncio.Event().wait()

    async def _accept(self, delivery: str) -> None:
        raise AssertionError("no subscriber acknowledged it")

    async def _bury(self, delivery: str, error: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("the server refuses it")
        self.buried.set()


async def test_an_event_whose_dead_letter_is_refused_becomes_one_later() -> None:
    handled: list[Event] = []

    async def refuse(event: Event) -> None:
        handled.append(event)
        raise RuntimeError("refused")

    group = RefusingGroup(refusals=2)
    delivering = asyncio.create_task(group.deliver(frozenset(), refuse, lambda: None))
    async with asyncio.timeout(WAIT_SECONDS):
        await group.buried.wait()
    assert handled == [EVENT, EVENT]
    delivering.cancel()
    await asyncio.wait([delivering])


class Twice(GroupEvents[str]):
    """Delivers two copies of one event, the second one while the first becomes a dead letter."""

    def __init__(self) -> None:
        super().__init__("the test", 1, 0, nullcontext)
        self.ended = list[str]()
        self.buries = asyncio.Event()
        self.may_bury = asyncio.Event()
        self.delivered = asyncio.Event()

    async def _deliver_all(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        await self._deliver_one("first", encode_event(EVENT), types, handler)
        await self.buries.wait()
        await self._deliver_one("second", encode_event(EVENT), types, handler)
        self.delivered.set()
        await asyncio.Event().wait()

    async def _accept(self, delivery: str) -> None:
        self.ended.append(f"accepted {delivery}")

    async def _bury(self, delivery: str, error: str) -> None:
        self.buries.set()
        await self.may_bury.wait()
        self.ended.append(f"buried {delivery}")


async def test_each_copy_of_an_event_that_is_not_acknowledged_becomes_a_dead_letter() -> None:
    async def ignore(event: Event) -> None:
        pass

    group = Twice()
    delivering = asyncio.create_task(group.deliver(frozenset(), ignore, lambda: None))
    async with asyncio.timeout(WAIT_SECONDS):
        await group.delivered.wait()
        group.may_bury.set()
        while group._retrying:
            await asyncio.sleep(0.01)
    assert group.ended == ["buried first", "buried second"]
    assert not group._held
    delivering.cancel()
    await asyncio.wait([delivering])


async def test_a_handler_whose_library_raises_cancelled_error_has_failed() -> None:
    async def cancelled(event: Event) -> None:
        raise asyncio.CancelledError

    assert await run_handler(cancelled, EVENT) is False


class Arriving:
    """Two deliveries of RabbitMQ; the channel is lost as the second one arrives."""

    def __init__(self, *bodies: bytes) -> None:
        self.is_lost = False
        self._messages = [SimpleNamespace(body=body, message_id="1", headers={}) for body in bodies]

    async def next(self) -> Any:
        message = self._messages.pop(0)
        self.is_lost = not self._messages
        return message


async def test_an_event_whose_channel_is_lost_becomes_no_dead_letter() -> None:
    class Group(Events):
        async def _bury(self, message: Any, error: str) -> None:
            buried.append(error)
            raise Unavailable("the channel is lost")

    # Given an event that is refused for the last time, and a channel that is lost at the next one
    buried: list[str] = []
    group = Group(Connections(RabbitmqSettings(max_retries=0, retry_delay_ms=0)))
    group._deliveries = cast("Any", Arriving(encode_event(EVENT), encode_event(OTHER)))
    works = asyncio.Event()

    async def handle(event: Event) -> None:
        if event == OTHER:
            works.set()
            await asyncio.Event().wait()
        raise RuntimeError("refused")

    # When its handler takes long, then the first one is the server's again
    delivering = asyncio.create_task(group.deliver(frozenset(), handle, lambda: None))
    async with asyncio.timeout(WAIT_SECONDS):
        await works.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert buried == []
    delivering.cancel()
    await asyncio.wait([delivering])


async def test_deliveries_of_activemq_that_end_give_back_what_they_hold() -> None:
    pytest.importorskip("proton", reason="requirements/activemq.txt is not installed")
    from libs.events.activemq.connection import Connections
    from libs.events.activemq.engine import ConnectionLost
    from libs.events.activemq.events import Events as ActivemqEvents

    class Receiver:
        """Gives out what is not an event."""

        is_lost = False

        def flow(self, credit: int) -> None: ...

        async def next(self) -> Any:
            return SimpleNamespace(body=b"no event", id="1", is_lost=False)

        async def close(self) -> None:
            self.is_lost = True

    class Refusing(Connections):
        """Refuses each dead letter, and stays open."""

        async def receive(self, address: str, browse: bool = False) -> Any:
            receivers.append(Receiver())
            return receivers[-1]

        async def send(self, address: str, *messages: Any) -> None:
            raise ConnectionLost("the server did not accept a message")

    receivers: list[Receiver] = []
    group = ActivemqEvents(Refusing(ActivemqSettings()))
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            await group.deliver(frozenset(), cast("Handler", None), lambda: None)
    assert [one.is_lost for one in receivers] == [True, True]


class Acknowledged(GroupEvents[str]):
    """Delivers one event, and is asked to accept it as often as `refusals` says and once more."""

    def __init__(self, refusals: int) -> None:
        super().__init__("the test", 1, 0, nullcontext)
        self.refusals = refusals
        self.ended = list[str]()
        self.accepts = asyncio.Event()
        self.may_accept = asyncio.Event()
        self.is_lost = False

    async def _deliver_all(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        await self._deliver_one("delivery", encode_event(EVENT), types, handler)
        await asyncio.Event().wait()

    def _is_open(self, delivery: str) -> bool:
        return not self.is_lost

    async def _accept(self, delivery: str) -> None:
        self.accepts.set()
        await self.may_accept.wait()
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("the server refuses it")
        self.ended.append(f"accepted {delivery}")

    async def _bury(self, delivery: str, error: str) -> None:
        self.ended.append(f"buried {delivery}")


@pytest.mark.parametrize("refusals", [0, 1])
async def test_an_event_is_not_delivered_again_while_it_is_being_acknowledged(
    refusals: int,
) -> None:
    # Given a handler that returns before the server has answered its acknowledgement
    group = Acknowledged(refusals)
    acknowledging: list[asyncio.Task[None]] = []
    count = 0

    async def handle(event: Event) -> None:
        nonlocal count
        count += 1
        acknowledging.append(asyncio.create_task(group.acknowledge(event.id)))
        await group.accepts.wait()

    delivering = asyncio.create_task(group.deliver(frozenset(), handle, lambda: None))
    async with asyncio.timeout(WAIT_SECONDS):
        await group.accepts.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert count == 1

        # When that is answered, then it is delivered again only if it was refused
        group.may_accept.set()
        while group._held or group._retrying:
            await asyncio.sleep(0)
    assert count == 1 + refusals
    assert group.ended == ["accepted delivery"]
    delivering.cancel()
    await asyncio.wait([delivering])
    await asyncio.gather(*acknowledging, return_exceptions=True)


async def test_an_acknowledgement_of_what_is_lost_is_refused_once() -> None:
    # Given a delivery that is lost as its handler, which tries for ever, acknowledges it
    group = Acknowledged(refusals=1)
    group.may_accept.set()
    refused = 0
    done = asyncio.Event()

    async def persist(event: Event) -> None:
        nonlocal refused
        group.is_lost = True
        while True:
            try:
                await group.acknowledge(event.id)
            except Unavailable:
                refused += 1
            else:
                break
        done.set()

    # Then it gets to know that, and goes on
    delivering = asyncio.create_task(group.deliver(frozenset(), persist, lambda: None))
    async with asyncio.timeout(WAIT_SECONDS):
        await done.wait()
    assert (refused, group.ended) == (1, [])
    delivering.cancel()
    await asyncio.wait([delivering])
