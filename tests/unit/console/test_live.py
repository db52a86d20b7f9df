"""What the console remembers of the instance while someone looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
from opentelemetry.metrics import NoOpMeter
from starlette.requests import Request
from starlette.types import Message

from services.console import live
from services.console.clients import Clients, OpenInstance
from services.console.live import SAMPLES_KEPT, History, Watch, Watches, event
from services.console.pages.overview import live_response
from services.console.sessions import Session, SessionSeal
from slatemq import Caller, Counts
from slatemq._admin.instance import Status
from slatemq._admin.queue_models import queue_of, sum_of_counts
from slatemq._admin.rates import UNKNOWN, QueueRates
from slatemq._patterns import Pattern
from slatemq.errors import Unauthenticated, Unavailable
from slatemq.models import ServiceStatus
from slatemq.v1.queue_pb2 import Queue

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

    def kept(self, _: str) -> AbstractContextManager[None]:
        return nullcontext()

    async def get_callers(self) -> dict[int, Caller]:
        return {0: Caller("operator", ["inspect", "operate"], ["*"])}

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


class Tenants:
    """An instance that shows each token what matches its pattern, and the clients of it.

    Attributes:
        patterns: Of the queues that each token may inspect; a token without one is refused.
        looks: The tokens that looked at the instance, in order.
        failing: Those that cannot.
    """

    def __init__(self, **patterns: str) -> None:
        self.patterns = patterns
        self.looks: list[str] = []
        self.failing: set[str] = set()

    async def of(self, token: str) -> Tenant:
        return Tenant(self, token)

    def kept(self, _: str) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def clients(self) -> Clients:
        return cast("Clients", self)


class Tenant(NamedTuple):
    tenants: Tenants
    token: str

    async def get_callers(self) -> dict[int, Caller]:
        pattern = self.tenants.patterns.get(self.token)
        if pattern is None:
            raise Unauthenticated(f"{self.token} has been revoked")
        return {0: Caller(self.token, ["inspect"], [pattern])}

    async def status(self, **_: object) -> Status:
        self.tenants.looks.append(self.token)
        if self.token in self.tenants.failing:
            raise Unauthenticated(f"{self.token} was revoked just now")
        pattern = Pattern([self.tenants.patterns[self.token]])
        names = [name for name in ("a-1", "a-2", "b-1") if pattern.matches(name)]
        broker = ServiceStatus("broker", 0, "", True)
        return Status([broker], [], [queue_of(Queue(queue_id=name)) for name in names], [])


async def until_refused(watch: Watch) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            await watch.next_sample()


def names(watch: Watch) -> list[str]:
    return [queue.queue_id for queue in watch.status.queues]


@asynccontextmanager
async def watching(instance: Instance | Tenants) -> AsyncIterator[Watches]:
    watches = Watches(instance.clients, DURATIONS)
    try:
        yield watches
    finally:
        await watches.close()


async def page(watches: Watches, token: str = "") -> Watch:
    """What a page gets."""
    return await asyncio.wait_for(watches.of(token), WAIT_S)


async def open_page(watches: Watches, statuses: list[int] | None) -> None:
    """Answer a browser with a live page; `statuses` gets the HTTP status. None: it has gone."""

    async def send(message: Message) -> None:
        if statuses is None:
            raise BrokenPipeError
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Message:
        return await asyncio.Future()

    console = SimpleNamespace(watches=watches, seal=SessionSeal(600))
    app = SimpleNamespace(state=SimpleNamespace(console=console))
    scope = {"type": "http", "app": app, "state": {"session": Session("ops")}}
    response = await live_response(Request(scope), lambda seen: str(names(seen)))
    await response(scope, receive, send)


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
    counts = sum_of_counts(
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


async def test_a_sample_that_waited_for_a_silent_process_is_soon_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    monkeypatch.setattr(live, "SAMPLE_SHARE", 1e12)
    monkeypatch.setattr(live, "SILENCE_PAUSE_S", 0.0)
    down = ServiceStatus("broker", 0, "", False)
    for silent in (up(7), Status([down], [], [], [])):
        instance = Instance()
        async with watching(instance) as watches:
            instance.answer(silent)
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


async def test_one_look_serves_all_who_may_see_no_more() -> None:
    tenants = Tenants(a="a-*", ops="*", b="b-*", other_ops="*")
    async with watching(tenants) as watches:
        seen = await asyncio.gather(*(page(watches, token) for token in tenants.patterns))

    assert [names(watch) for watch in seen] == [
        ["a-1", "a-2"], ["a-1", "a-2", "b-1"], ["b-1"], ["a-1", "a-2", "b-1"]
    ]  # fmt: skip
    assert tenants.looks == ["ops"]


async def test_tokens_that_see_different_queues_take_samples_of_their_own() -> None:
    tenants = Tenants(a="a-*", b="b-*", one="a-1")
    async with watching(tenants) as watches:
        seen = await asyncio.gather(*(page(watches, token) for token in tenants.patterns))

    assert [names(watch) for watch in seen] == [["a-1", "a-2"], ["b-1"], ["a-1"]]
    assert sorted(tenants.looks) == ["a", "b"]


async def test_who_comes_later_does_not_wait_for_the_next_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", LONG_S)
    tenants = Tenants(ops="*", a="a-*")
    async with watching(tenants) as watches:
        await page(watches, "ops")
        assert names(await page(watches, "a")) == ["a-1", "a-2"]
        assert watches.viewers_count == 2

    assert tenants.looks == ["ops", "ops"]


async def test_a_token_that_is_refused_sees_nothing_of_the_looks_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    monkeypatch.setattr(live, "SAMPLE_SHARE", 0)
    tenants = Tenants(ops="*", a="*")
    async with watching(tenants) as watches:
        _, watch = await asyncio.gather(page(watches, "ops"), page(watches, "a"))
        assert len(names(watch)) == 3

        # When it may see less, then it does
        tenants.patterns["a"] = "b-*"
        async with asyncio.timeout(WAIT_S):
            while names(watch) != ["b-1"]:
                await watch.next_sample()

        # And when it is revoked
        del tenants.patterns["a"]
        with pytest.raises(Unauthenticated, match="a has been revoked"):
            await until_refused(watch)
        assert len(names(await page(watches, "ops"))) == 3


async def test_a_sample_that_fails_for_one_token_is_taken_with_the_others() -> None:
    tenants = Tenants(ops="*", a="a-*", b="b-*")
    tenants.failing.add("ops")
    async with watching(tenants) as watches:
        ops, a, b = await asyncio.gather(
            *(page(watches, token) for token in tenants.patterns), return_exceptions=True
        )

    assert isinstance(ops, Unauthenticated)
    assert isinstance(a, Watch)
    assert isinstance(b, Watch)
    assert (names(a), names(b)) == (["a-1", "a-2"], ["b-1"])
    assert tenants.looks == ["ops", "a", "b"]


async def test_sampling_ends_a_minute_after_the_last_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    monkeypatch.setattr(live, "SAMPLE_SHARE", 0)
    tenants = Tenants(ops="*", a="a-*")
    async with watching(tenants) as watches:
        await asyncio.gather(page(watches, "ops"), page(watches, "a"))
        monkeypatch.setattr(live, "IDLE_S", 0.0)
        async with asyncio.timeout(WAIT_S):
            while watches.viewers_count:
                await asyncio.sleep(0)

        # And whoever comes back is sampled for again
        looks_count = len(tenants.looks)
        assert names(await page(watches, "a")) == ["a-1", "a-2"]
        assert tenants.looks[looks_count] == "a"


async def test_a_page_whose_browser_has_not_read_for_a_minute_is_still_sampled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    monkeypatch.setattr(live, "SAMPLE_SHARE", 0)
    tenants = Tenants(ops="*")
    async with watching(tenants) as watches:
        watch = await page(watches, "ops")
        with watches.place(watch):
            stream = watches.stream(watch, lambda seen: str(names(seen)))
            first = await asyncio.wait_for(anext(stream), WAIT_S)

            # Given that some samples are taken while the stream waits for its browser
            monkeypatch.setattr(live, "IDLE_S", 0.0)
            looks_count = len(tenants.looks)
            async with asyncio.timeout(WAIT_S):
                while watches.viewers_count and len(tenants.looks) < looks_count + 3:
                    await asyncio.sleep(0)

            assert watches.viewers_count == 1
            assert await asyncio.wait_for(anext(stream), WAIT_S) == first
            await stream.aclose()

        # And no longer once it is closed
        async with asyncio.timeout(WAIT_S):
            while watches.viewers_count:
                await asyncio.sleep(0)


async def test_a_stream_ends_in_time_although_no_sample_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = Instance()
    async with watching(instance) as watches:
        instance.answer(up())
        watch = await page(watches)
        monkeypatch.setattr(live, "STREAM_S", 0.1)

        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(watches.stream(watch, str)), WAIT_S)


async def test_pages_opened_at_once_get_no_more_places_than_there_are() -> None:
    opened_count = live.PERSON_STREAMS_MAX + 3
    async with watching(Tenants(ops="*")) as watches:
        statuses: list[int] = []
        pages = [asyncio.create_task(open_page(watches, statuses)) for _ in range(opened_count)]
        async with asyncio.timeout(WAIT_S):
            while len(statuses) < opened_count:
                await asyncio.sleep(0)

        assert statuses.count(200) == watches.streams_count == live.PERSON_STREAMS_MAX
        assert statuses.count(429) == 3

        # And each is given back, also where the browser has gone before the first event
        for each in pages:
            each.cancel()
        await asyncio.gather(*pages, return_exceptions=True)
        with pytest.raises(BrokenPipeError):
            await open_page(watches, None)
        assert (watches.streams_count, (await page(watches, "ops")).streams_count) == (0, 0)
