"""Open calls end when they would be refused, though nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from math import inf

import pytest

from libs.serving.requests import open_calls
from libs.serving.requests.open_calls import OpenCall, OpenCalls
from slatemq.errors import PermissionDenied, SlateMQError, Unauthenticated, Unavailable


class Rig:
    """The open calls of a port, and what decides about them.

    Attributes:
        version: Of the files.
        verdict: What a call is refused with when it is judged; None: it goes on.
        until_s: Until when it goes on.
        judged_count: How often one was judged.
    """

    def __init__(self) -> None:
        self.version = 1
        self.now_s = 0.0
        self.verdict: SlateMQError | None = None
        self.until_s = inf
        self.judged_count = 0
        self.calls = OpenCalls(lambda: self.version, lambda: self.now_s)

    async def judge(self) -> float:
        self.judged_count += 1
        if self.verdict is not None:
            raise self.verdict
        return self.until_s

    def refuse(self, verdict: SlateMQError) -> None:
        self.version += 1
        self.verdict = verdict


class Stream:
    """A stream, served as the guard serves it: it waits for a response, and sends it."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.has_response = asyncio.Event()
        self.is_sending = asyncio.Event()
        self.is_sent = asyncio.Event()
        self.is_closed = False
        self.aborted: list[SlateMQError] = []
        self.task = asyncio.create_task(self._serve())

    async def _abort(self, refusal: SlateMQError) -> None:
        self.aborted.append(refusal)

    async def _responses(self) -> AsyncGenerator[str, None]:
        try:
            while True:
                await self.has_response.wait()
                self.has_response.clear()
                yield "response"
        finally:
            await asyncio.sleep(0)
            self.is_closed = True

    async def _serve(self) -> None:
        async with aclosing(self._responses()) as responses:
            call = OpenCall(
                self._rig.judge, self._rig.version, self._rig.until_s, responses, self._abort
            )
            self._rig.calls.add(call)
            try:
                async for _ in responses:
                    self.is_sending.set()
                    await self.is_sent.wait()
                    self.is_sending.clear()
            except BaseException as error:
                self._rig.calls.remove(call)
                if (refusal := call.refusal_for(error)) is not None:
                    raise refusal from None
                raise


async def not_aborted(refusal: SlateMQError) -> None:
    raise AssertionError from refusal


async def opened(rig: Rig) -> Stream:
    stream = Stream(rig)
    await asyncio.sleep(0)
    return stream


@pytest.mark.parametrize("verdict", [Unauthenticated("removed"), PermissionDenied("forbidden")])
async def test_a_silent_stream_ends_with_what_it_is_refused_with(verdict: SlateMQError) -> None:
    rig = Rig()
    streams = [await opened(rig) for _ in range(3)]
    rig.refuse(verdict)

    await rig.calls.look()

    for stream in streams:
        with pytest.raises(type(verdict), match=str(verdict)):
            await stream.task
        assert stream.is_closed
        assert stream.task.cancelling() == 0


async def test_a_stream_that_sends_a_response_ends_after_it() -> None:
    rig = Rig()
    stream = await opened(rig)
    stream.has_response.set()
    await stream.is_sending.wait()
    rig.refuse(Unauthenticated("removed"))

    # Cancelled by now, its caller would get no status
    await rig.calls.look()
    await asyncio.sleep(0)
    assert not stream.task.done()

    stream.is_sent.set()
    while stream.is_sending.is_set():
        await asyncio.sleep(0)
    await rig.calls.look()
    with pytest.raises(Unauthenticated):
        await stream.task


async def test_a_stream_whose_caller_has_stopped_reading_ends_all_the_same() -> None:
    rig = Rig()
    stream = await opened(rig)
    stream.has_response.set()
    await stream.is_sending.wait()

    # Permitted again meanwhile, it is spared once more
    for verdict in (Unauthenticated("removed"), None, Unauthenticated("removed")):
        rig.version += 1
        rig.verdict = verdict
        await rig.calls.look()
        await asyncio.sleep(0)
        assert not stream.task.done()
    await rig.calls.look()

    with pytest.raises(asyncio.CancelledError):
        await stream.task
    assert stream.aborted == [rig.verdict]


async def test_a_call_that_waits_ends_too() -> None:
    rig = Rig()

    async def claim() -> None:
        call = OpenCall(rig.judge, rig.version, inf, None, not_aborted)
        rig.calls.add(call)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            refusal = call.refusal_for(error)
            rig.calls.remove(call)
            raise refusal or error from None

    claiming = asyncio.create_task(claim())
    await asyncio.sleep(0)
    rig.refuse(Unauthenticated("removed"))

    await rig.calls.look()

    with pytest.raises(Unauthenticated):
        await claiming


async def test_where_it_is_not_known_who_calls_the_next_look_asks_again() -> None:
    rig = Rig()
    stream = await opened(rig)
    rig.refuse(Unavailable("the keys of the issuer cannot be read now"))

    await rig.calls.look()
    rig.verdict = Unauthenticated("removed")
    await rig.calls.look()

    with pytest.raises(Unauthenticated):
        await stream.task


class Opened:
    """Calls that never end by themselves, each judged in its own way."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._tasks: list[asyncio.Task[None]] = []

    async def open(
        self, judge: Callable[[], Awaitable[float]], version: int = 1, until_s: float = inf
    ) -> asyncio.Task[None]:
        async def serve() -> None:
            call = OpenCall(judge, version, until_s, None, not_aborted)
            self._rig.calls.add(call)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                self._rig.calls.remove(call)
                raise call.refusal_for(error) or error from None

        task = asyncio.create_task(serve())
        self._tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def rig_and_calls() -> AsyncIterator[tuple[Rig, Opened]]:
    rig = Rig()
    calls = Opened(rig)
    yield rig, calls
    await calls.close()


async def test_one_that_cannot_be_judged_is_judged_again_and_no_other(
    rig_and_calls: tuple[Rig, Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, calls = rig_and_calls
    monkeypatch.setattr(open_calls, "JUDGE_S", 0.01)
    asked: list[str] = []

    async def stalled() -> float:
        asked.append("stalled")
        await asyncio.Event().wait()
        return inf

    async def cancelled() -> float:
        asked.append("cancelled")
        raise asyncio.CancelledError

    await calls.open(stalled)
    await calls.open(cancelled)
    for _ in range(3):
        await calls.open(rig.judge)
    rig.version += 1

    for _ in range(2):
        await rig.calls.look()

    assert rig.judged_count == 3
    assert asked == ["stalled", "cancelled"] * 2


async def test_a_watch_that_is_cancelled_ends_though_it_judges(
    rig_and_calls: tuple[Rig, Opened],
) -> None:
    rig, calls = rig_and_calls
    is_judged = asyncio.Event()

    async def stalled() -> float:
        is_judged.set()
        await asyncio.Event().wait()
        return inf

    await calls.open(stalled)
    rig.version += 1
    looking = asyncio.create_task(rig.calls.look())
    await is_judged.wait()

    looking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await looking


async def test_where_one_proof_ends_no_other_is_judged(
    rig_and_calls: tuple[Rig, Opened],
) -> None:
    rig, calls = rig_and_calls
    rig.until_s = 1_000
    for number in range(10):
        await calls.open(rig.judge, until_s=100 + number)

    for number in range(10):
        rig.now_s = 100 + number
        await rig.calls.look()

        assert rig.judged_count == number + 1


async def test_a_change_after_a_call_was_judged_and_before_it_is_followed_is_not_lost(
    rig_and_calls: tuple[Rig, Opened],
) -> None:
    rig, calls = rig_and_calls
    judged_version = rig.version
    rig.refuse(Unauthenticated("removed"))
    await rig.calls.look()
    task = await calls.open(rig.judge, judged_version)

    await rig.calls.look()

    with pytest.raises(Unauthenticated):
        await task


async def test_calls_are_judged_in_the_order_in_which_they_came(
    rig_and_calls: tuple[Rig, Opened],
) -> None:
    rig, calls = rig_and_calls
    judged: list[int] = []

    def judge_of(number: int) -> Callable[[], Awaitable[float]]:
        async def judge() -> float:
            judged.append(number)
            return inf

        return judge

    for number in range(20):
        await calls.open(judge_of(number))
    rig.version += 1

    await rig.calls.look()

    assert judged == list(range(20))


async def test_a_stream_ends_when_its_proof_does() -> None:
    rig = Rig()
    rig.until_s = 100
    stream = await opened(rig)
    rig.verdict = Unauthenticated("expired")

    rig.now_s = 99
    await rig.calls.look()
    assert rig.judged_count == 0
    rig.now_s = 100
    await rig.calls.look()

    with pytest.raises(Unauthenticated):
        await stream.task


async def test_nothing_is_judged_while_nothing_changes() -> None:
    rig = Rig()
    rig.until_s = 100
    streams = [await opened(rig) for _ in range(3)]

    await rig.calls.look()
    assert rig.judged_count == 0
    rig.version += 1
    for _ in range(3):
        await rig.calls.look()
    assert rig.judged_count == 3

    # A proof that was renewed counts for longer
    rig.now_s, rig.until_s = 100, 200
    for _ in range(3):
        await rig.calls.look()
    assert rig.judged_count == 6
    for stream in streams:
        stream.task.cancel()
    await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


async def test_a_call_that_its_caller_ends_meanwhile_is_just_cancelled() -> None:
    rig = Rig()
    stream = await opened(rig)
    rig.refuse(Unauthenticated("removed"))

    await rig.calls.look()
    stream.task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await stream.task
