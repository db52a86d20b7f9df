"""Deliveries of a backend that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from libs.events.backend import QueueBackend
from libs.events.deliveries import Handler
from slatemq.errors import Unavailable
from slatemq.events.catalogue import QueueDeleted, make_event
from slatemq.events.envelope import Event
from tests.integration.waiting import WAIT_SECONDS

EVENT = make_event(
    QueueDeleted(queue="orders"), source="broker-0", request_id="", at_ms=1_771_761_600_000
)


class FailingCarrier:
    """Has no server: raises each of some errors once, then delivers an event."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        self._errors = [*errors]

    async def start(self, types: frozenset[str]) -> None:
        """Nothing to create."""

    async def deliver(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        if self._errors:
            raise self._errors.pop(0)
        await handler(EVENT)
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Nothing is held."""


class Backend(QueueBackend):
    NAME = "the test"
    _translated = staticmethod(nullcontext)

    async def open(self, config: Any) -> None:
        self._compose(config, config)

    async def disconnect(self) -> None:
        """Nothing is open."""

    async def ping(self) -> None:
        """It is up."""


async def test_deliveries_go_on_after_an_error_that_no_code_expects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Given deliveries that meet an outage, then a fault of this program or of a library
    backend = Backend()
    await backend.connect(FailingCarrier([Unavailable("down"), AttributeError("a fault")]))
    got: asyncio.Queue[Event] = asyncio.Queue()

    # When a handler subscribes, then it gets the event all the same
    await backend.subscribe([], got.put)
    async with asyncio.timeout(WAIT_SECONDS):
        assert await got.get() == EVENT

    # And the fault alone is logged
    (logged,) = caplog.records
    assert "AttributeError: a fault" in caplog.text
    assert "the test" in logged.message
    await backend.close()
