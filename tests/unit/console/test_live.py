"""What the console remembers of the instance while someone looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from opentelemetry.metrics import NoOpMeter

from services.console import live
from services.console.clients import Clients, OpenInstance
from services.console.live import SAMPLES_KEPT, History, Watch, Watches, event, together
from slatemq import Counts
from slatemq._admin.instance import Status
from slatemq._admin.rates import UNKNOWN, QueueRates
from slatemq.errors import Unauthenticated, Unavailable

DURATIONS = NoOpMeter("console").create_histogram("durations")

WAIT_S = 60.0
LONG_S = 3_600.0


class Instance:
    """An instance, and the clients of it, that answers what a test has it answer, when it does."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[Status | Exception] = asyncio.Queue()
        self._waits = asyncio.Event()

    async def of(self, _: str) -> Instance:
        return self

    async def status(self, **_: object) -> Status:
        if self._answers.empty():
            self._waits.set()
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answer(self, answer: Status | Exception) -> None:
        self._waits.clear()
        self._answers.put_nowait(answer)

    async def until_asked(self) -> None:
        """Until it is asked for one more answer than it has."""
        async with asyncio.timeout(WAIT_S):
            await self._waits.wait()

    @property
    def clients(self) -> Clients:
        return cast("Clients", self)


@asynccontextmanager
async def watching(instance: Instance) -> AsyncIterator[Watches]:
    watches = Watches(instance.clients, DURATIONS)
    try:
        yield watches
    finally:
        await watches.close()


async def page(watches: Watches) -> Watch:
    """What a page gets."""
    return await asyncio.wait_for(watches.of(""), WAIT_S)


def up(broker: int = 0) -> Status:
    return Status([], [], [], [broker])


def test_charts_have_the_rates_of_each_sample_that_has_some() -> None:
    history = History()
    history.add(Counts(available_count=10), UNKNOWN)
    history.add(Counts(available_count=30, in_flight_count=4), QueueRates(22.0, 5.0, 10.0, 0.0))
    assert history.rates.in_per_s == 22.0

    # The broker was restarted: its totals begin again.
    history.add(Counts(available_count=30), UNKNOWN)

    assert list(history.depth) == [10, 34, 30]
    assert (list(history.arrived), list(history.finished)) == ([22.0], [10.0])
    assert history.rates.in_per_s is None


def test_a_history_is_bounded() -> None:
    history = History()
    for second in range(3 * SAMPLES_KEPT):
        history.add(Counts(available_count=second), QueueRates(1.0, 1.0, 1.0, 1.0))

    assert len(history.depth) == len(history.arrived) == SAMPLES_KEPT
    assert history.depth[-1] == 3 * SAMPLES_KEPT - 1


def test_all_queues_together_have_the_oldest_age() -> None:
    counts = together(
        [Counts(available_count=1, oldest_claimable_age_ms=5), Counts(failed_count=2),
         Counts(delayed_count=3, oldest_claimable_age_ms=9)]
    )  # fmt: skip

    assert (counts.available_count, counts.delayed_count, counts.failed_count) == (1, 3, 2)
    assert counts.oldest_claimable_age_ms == 9


def test_an_event_has_each_line_of_its_text() -> None:
    assert event("update", "a\nb\r\nc") == b"event: update\ndata: a\ndata: b\ndata: c\n\n"


@pytest.mark.parametrize("error", [Unavailable("down"), Unauthenticated("who?"), OpenInstance()])
async def test_no_page_is_empty_before_the_instance_has_answered(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    instance = Instance()
    async with watching(instance) as watches:
        instance.answer(error)
        with pytest.raises(type(error)):
            await page(watches)

        # Given that it is being asked again, a page waits for the answer.
        await instance.until_asked()
        waiting = asyncio.create_task(page(watches))
        await asyncio.sleep(0)
        instance.answer(error)
        with pytest.raises(type(error)):
            await waiting

        await instance.until_asked()
        waiting = asyncio.create_task(page(watches))
        await asyncio.sleep(0)
        instance.answer(up(7))
        assert (await waiting).status.unlisted_brokers == [7]


async def test_what_a_try_met_is_said_at_once_until_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", LONG_S)
    instance = Instance()
    async with watching(instance) as watches:
        instance.answer(Unavailable("down"))
        for _ in range(2):
            with pytest.raises(Unavailable, match="down"):
                await page(watches)


async def test_a_try_that_took_long_and_failed_is_soon_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    monkeypatch.setattr(live, "SAMPLE_SHARE", 1e12)
    instance = Instance()
    async with watching(instance) as watches:
        instance.answer(Unavailable("down"))
        with pytest.raises(Unavailable):
            await page(watches)
        await instance.until_asked()


async def test_an_error_that_nothing_foresees_is_logged_and_ends_no_sampling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    instance = Instance()
    async with watching(instance) as watches:
        instance.answer(RuntimeError("boom"))
        with pytest.raises(Unavailable, match="its log says why"):
            await page(watches)
        (record,) = caplog.records
        assert record.exc_info is not None
        assert str(record.exc_info[1]) == "boom"

        await instance.until_asked()
        instance.answer(up(7))
        assert (await page(watches)).status.unlisted_brokers == [7]


async def test_an_open_page_is_drawn_with_each_sample_and_says_when_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    monkeypatch.setattr(live, "SAMPLE_SHARE", 0)
    instance = Instance()
    async with watching(instance) as watches:
        instance.answer(up(1))
        watch = await page(watches)
        stream = watches.stream(watch, lambda seen: str(seen.status.unlisted_brokers))

        async def next_event() -> bytes:
            return await asyncio.wait_for(anext(stream), WAIT_S)

        for answer, text in ((up(2), b"event: update\ndata: [2]\n\n"),
                             (Unavailable("down"), b"event: gone\ndata: down\n\n")):  # fmt: skip
            await instance.until_asked()
            drawn = asyncio.create_task(next_event())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            instance.answer(answer)
            assert await drawn == text
        with pytest.raises(StopAsyncIteration):
            await next_event()
        assert (watches.streams_count, watch.streams_count) == (0, 0)
