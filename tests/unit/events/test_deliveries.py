"""Events that no subscriber acknowledges, whose dead letters the server refuses for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

from libs.events.deliveries import GroupEvents, Handler, run_handler
from slatemq.errors import Unavailable
from slatemq.events.catalogue import QueueDeleted, make_event
from slatemq.events.envelope import Event, encode_event
from tests.integration.waiting import WAIT_SECONDS

EVENT = make_event(
    QueueDeleted(queue="orders"), source="broker-0", request_id="", at_ms=1_771_761_600_000
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


async def test_a_handler_whose_library_raises_cancelled_error_has_failed() -> None:
    async def cancelled(event: Event) -> None:
        raise asyncio.CancelledError

    assert await run_handler(cancelled, EVENT) is False
