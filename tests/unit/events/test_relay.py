"""Events that are too large for their backend: what a relay publishes instead, and gives up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from libs.events.refusals import TooLarge
from libs.events.relay import EventBatch, Relay
from libs.events.settings import Consistency, QueueSettings
from slatemq.events.catalogue import EventData, MessagePublished, QueueCreated, make_event
from slatemq.events.envelope import Event, encode_event
from tests.integration.waiting import WAIT_SECONDS

BYTES_MAX = 2_000


class Source:
    """Has batches, and ends when all are done."""

    def __init__(self, *batches: Sequence[Event]) -> None:
        self._batches = [EventBatch([*one], at, 1) for at, one in enumerate(batches, 1)]
        self.position = 0
        self.is_done = asyncio.Event()

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        for batch in self._batches[self.position :]:
            yield batch
        self.is_done.set()
        await asyncio.Event().wait()

    def done(self, position: int) -> None:
        self.position = position

    def skip_to_end(self) -> int:
        raise AssertionError("nothing is given up because a backend is down")


class SmallBackend:
    """Refuses events over a bound, and batches with one of them."""

    def __init__(self, message_bytes_max: float) -> None:
        self.message_bytes_max = message_bytes_max
        self.published: list[list[Event]] = []
        self.refused_count = 0

    async def connect(self, config: Any) -> None: ...

    async def close(self) -> None: ...

    async def publish_batch(self, events: Sequence[Event]) -> None:
        if any(len(encode_event(one)) > BYTES_MAX for one in events):
            self.refused_count += 1
            raise TooLarge("too large")
        self.published.append([*events])


def event_of(at: int, data: EventData) -> Event:
    return make_event(data, source="ingest-0", request_id="", at_ms=1_771_761_600_000 + at)


def published(at: int, header_bytes: int = 10) -> Event:
    headers = {"h": "x" * header_bytes}
    return event_of(at, MessagePublished(message_id=at, headers=headers, size=1))


def created(at: int, filter_bytes: int) -> Event:
    data = QueueCreated(
        queue="q", filter="x" * filter_bytes, priority="", max_attempts=1, revision=1
    )
    return event_of(at, data)


async def relay(
    backend: SmallBackend, *batches: Sequence[Event], consistency: Consistency = "write-through"
) -> Relay:
    """A relay that has published all batches."""
    source, given = Source(*batches), QueueSettings(enabled=True, consistency=consistency)
    made: Any = backend
    relaying = Relay(given, made, source)
    running = asyncio.create_task(relaying.run())
    async with asyncio.timeout(WAIT_SECONDS):
        await source.is_done.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert source.position == len(batches)
    return relaying


@pytest.mark.parametrize("consistency", ["write-through", "fire-and-forget"])
@pytest.mark.parametrize("known", [BYTES_MAX, 10 * BYTES_MAX, math.inf])
async def test_an_event_that_is_too_large_goes_without_its_headers_and_holds_up_no_other(
    known: float, consistency: Any
) -> None:
    large = {3, 7}
    events = [published(at, 3_000 if at in large else 10) for at in range(10)]
    backend = SmallBackend(known)
    relaying = await relay(backend, events[:9], events[9:], consistency=consistency)

    result = [event for some in backend.published for event in some]
    assert [event.id for event in result] == [event.id for event in events]
    for at, event in enumerate(result):
        assert event.data["headers_omitted"] == (at in large)
        assert event.data["headers"] == ({} if at in large else {"h": "x" * 10})
    assert (relaying.counts.published, relaying.counts.dropped) == (10, 0)


async def test_where_the_bound_is_known_a_batch_is_refused_once() -> None:
    backend = SmallBackend(BYTES_MAX)
    await relay(backend, [published(at, 3_000) for at in range(9)])
    assert (backend.refused_count, len(backend.published)) == (1, 1)


@pytest.mark.parametrize("known", [BYTES_MAX, math.inf])
async def test_an_event_that_is_too_large_without_headers_is_given_up_and_counted(
    known: float, caplog: pytest.LogCaptureFixture
) -> None:
    events = [published(0), created(1, 3_000), created(2, 100)]
    backend = SmallBackend(known)
    relaying = await relay(backend, events, [created(3, 3_000)])

    assert [one for some in backend.published for one in some] == [events[0], events[2]]
    assert (relaying.counts.published, relaying.counts.dropped) == (2, 2)
    assert relaying.counts.error == "too large"
    assert relaying.counts.refusal == ""
    errors = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert len(errors) == 2
    assert events[1].id in errors[0]
