"""Streams that wait for a message are ended when the process grows by too much meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from libs.serving import limits
from libs.serving.requests import arrivals, reading
from libs.serving.requests.arrivals import StreamReads
from libs.serving.requests.reading import Codec, RequestReader
from libs.serving.requests.shape import WALKED_BYTES_MIN
from slatemq.errors import InvalidArgument, ResourceExhausted, SlateMQError
from tests.unit.serving.test_arrivals import Memory

MESSAGE = b"x" * WALKED_BYTES_MIN


@pytest.fixture(autouse=True)
def looks_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "STREAMS_LOOK_S", 3_600.0)
    monkeypatch.setattr(arrivals, "BUSY_S", 0.0)


async def permit(request: Any) -> None:
    """Let every request pass."""


def charge(size_bytes: int) -> None:
    """Leave what cannot be read uncounted."""


class Reading:
    """Streams of a reader, its memory as the test has it."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.reader = RequestReader(limits.message_bytes_max(), refuse)
        self.held_bytes = 0
        self.freed: list[int] = []
        self.reads = StreamReads(100, 300, lambda: self.held_bytes, self.freed.append, self.memory)
        self.reader._stream_reads = self.reads
        self.tasks: list[asyncio.Task[bytes]] = []

    def begin(self, requests: AsyncIterator[bytes]) -> asyncio.Task[bytes]:
        parsed = self.reader.stream(requests, Codec(bytes), permit, charge)
        task = asyncio.create_task(anext(parsed))
        self.tasks.append(task)
        return task

    async def grow_slowly(self, growth_bytes: int, waiting: asyncio.Task[bytes]) -> None:
        """Grow until all of it counts as lasting, or this stream has been ended for it."""
        for number in range(growth_bytes + arrivals.LOOKS):
            # 100 looks: 99 at most between the first and the last
            self.memory.used_bytes += number < growth_bytes
            self.reads.look()
            await turns()
            if waiting.done():
                return


async def refuse(method: str, context: object, error: SlateMQError) -> None:
    raise AssertionError("only calls are refused so")


async def silence() -> AsyncIterator[bytes]:
    """A stream on which nothing comes."""
    await asyncio.get_running_loop().create_future()
    yield b""


async def nothing() -> AsyncIterator[bytes]:
    """A stream that ends without a message."""
    none: list[bytes] = []
    for data in none:
        yield data


async def only(message: bytes) -> AsyncIterator[bytes]:
    yield message


@pytest.fixture
async def streams() -> AsyncIterator[Reading]:
    streams = Reading()
    yield streams
    for task in streams.tasks:
        task.cancel()
    await asyncio.gather(*streams.tasks, return_exceptions=True)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_streams_that_wait_are_ended_when_the_process_grows_by_too_much(
    streams: Reading,
) -> None:
    waiting = [streams.begin(silence()) for _ in range(3)]
    await turns()
    streams.reads.look()
    streams.memory.used_bytes += 100
    streams.reads.look()
    await turns()
    assert not any(task.done() for task in waiting)

    streams.memory.used_bytes += 1
    streams.reads.look()

    for ended in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(ended, ResourceExhausted)
        assert ended.reason == "LARGE_REQUESTS"


async def test_streams_that_come_back_are_not_ended_for_growth_that_is_over(
    streams: Reading,
) -> None:
    ended = streams.begin(silence())
    await turns()
    streams.reads.look()
    streams.memory.used_bytes += 101
    streams.reads.look()
    with pytest.raises(ResourceExhausted):
        await ended

    back = streams.begin(silence())
    await turns()
    streams.reads.look()
    streams.memory.used_bytes += 100
    streams.reads.look()
    await turns()
    assert not back.done()


async def test_streams_that_wait_are_ended_when_the_process_grows_slowly_by_too_much(
    streams: Reading,
) -> None:
    waiting = [streams.begin(silence()) for _ in range(3)]
    await turns()
    streams.reads.look()
    await streams.grow_slowly(300, waiting[0])
    assert not any(task.done() for task in waiting)

    await streams.grow_slowly(1, waiting[0])

    for ended in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(ended, ResourceExhausted)
        assert ended.reason == "LARGE_REQUESTS"


@pytest.mark.parametrize("given_back", [0, 301])
async def test_memory_that_stays_without_the_ended_streams_ends_no_further_ones(
    streams: Reading, given_back: int
) -> None:
    # Given a stream that was ended for memory, and what of it was the stream's
    ended = streams.begin(silence())
    await turns()
    streams.reads.look()
    await streams.grow_slowly(301, ended)
    streams.memory.used_bytes -= given_back

    # When another waits, it is ended for as much again and no less
    back = streams.begin(silence())
    await turns()
    streams.reads.look()
    await streams.grow_slowly(300, back)
    assert not back.done()

    await streams.grow_slowly(1, back)
    assert back.done()


async def test_what_malloc_keeps_ends_no_stream(streams: Reading) -> None:
    waiting = streams.begin(silence())
    await turns()
    streams.reads.look()
    for _ in range(301):
        streams.memory.used_bytes += 1
        streams.reads.look()

    # When it is returned to the system, as the process asks for
    assert streams.freed == [301]
    streams.memory.used_bytes -= 200
    await streams.grow_slowly(199, waiting)

    assert not waiting.done()


async def test_slow_growth_ends_no_stream_that_has_just_begun_to_wait(
    streams: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "BUSY_S", 3_600.0)
    waiting = streams.begin(silence())
    await turns()
    streams.reads.look()

    await streams.grow_slowly(301, waiting)

    assert not waiting.done()


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize(("growth_bytes", "freed"), [(150, []), (151, [151])])
async def test_a_stream_that_ends_while_it_waits_gives_much_memory_back(
    streams: Reading, is_cancelled: bool, growth_bytes: int, freed: list[int]
) -> None:
    # Given a stream that has waited while the process grew
    over = asyncio.Event()

    async def until_over() -> AsyncIterator[bytes]:
        await over.wait()
        async for data in nothing():
            yield data

    waiting = streams.begin(until_over())
    await turns()
    streams.reads.look()
    streams.memory.used_bytes += growth_bytes

    # When its client ends it, or its call is cancelled
    over.set()
    if is_cancelled:
        waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    # Then memory is returned where it may have been much
    assert streams.freed == freed


async def test_a_stream_whose_message_waits_for_its_share_of_the_memory_is_ended_too(
    streams: Reading,
) -> None:
    await streams.reader._reserve(limits.REQUESTS_BYTES_MAX)
    whole = streams.begin(only(MESSAGE))
    await turns()
    streams.reads.look()
    assert not whole.done()

    streams.memory.used_bytes += 101
    streams.reads.look()

    with pytest.raises(ResourceExhausted):
        await whole
    # And its place in line is free again
    streams.reader.release(limits.REQUESTS_BYTES_MAX)
    assert await streams.begin(only(MESSAGE)) == MESSAGE


@pytest.mark.parametrize("is_granted_first", [True, False])
async def test_a_share_granted_in_the_turn_in_which_its_stream_is_ended_is_not_lost(
    streams: Reading, is_granted_first: bool
) -> None:
    # Given a message that waits for its share of the memory
    await streams.reader._reserve(limits.REQUESTS_BYTES_MAX)
    whole = streams.begin(only(MESSAGE))
    await turns()
    streams.reads.look()
    streams.memory.used_bytes += 101

    # When it gets the share, and its stream is ended, before it runs again
    if is_granted_first:
        streams.reader.release(limits.REQUESTS_BYTES_MAX)
        streams.reads.look()
    else:
        streams.reads.look()
        streams.reader.release(limits.REQUESTS_BYTES_MAX)
    (ended,) = await asyncio.gather(whole, return_exceptions=True)

    # Then either it has both or neither
    assert isinstance(ended, ResourceExhausted) or ended == MESSAGE
    held = len(MESSAGE) if ended == MESSAGE else 0
    assert streams.reader._budget.used_bytes == held
    assert not streams.reader._budget.is_full


async def test_what_is_sent_behind_a_refused_request_is_not_read_on_when_memory_is_short(
    streams: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PASS_OVER_S", 3_600.0)
    passing_over = asyncio.create_task(streams.reader.skip(silence()))
    await turns()
    streams.reads.look()
    streams.memory.used_bytes += 101

    streams.reads.look()

    await passing_over


async def test_streams_are_ended_also_as_a_pause_behind_a_refused_request_comes_to_its_end(
    streams: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a pause before a stream that waits
    monkeypatch.setattr(reading, "PASS_OVER_S", 0.01)
    passing_over = asyncio.create_task(streams.reader.skip(silence()))
    await turns()
    waiting = streams.begin(silence())
    await turns()
    streams.reads.look()
    streams.memory.used_bytes += 101

    # When memory is looked at in the turn in which its time is over
    asyncio.get_running_loop().call_later(0.01, streams.reads.look)
    time.sleep(0.02)  # noqa: ASYNC251 - a busy loop: what is due by then is due in one turn

    # Then both end
    await passing_over
    await turns()
    assert waiting.done()
    with pytest.raises(ResourceExhausted):
        await waiting


async def test_growth_by_what_the_service_holds_for_its_callers_ends_no_stream(
    streams: Reading,
) -> None:
    waiting = streams.begin(silence())
    await turns()
    streams.reads.look()
    # When deliveries take memory, and are over before the process has given it back
    streams.held_bytes = 1_000
    streams.memory.used_bytes += 100 + arrivals.HELD_FACTOR * 1_000
    streams.reads.look()
    streams.held_bytes = 0
    streams.reads.look()
    await turns()
    assert not waiting.done()

    streams.memory.used_bytes += 1
    streams.reads.look()
    with pytest.raises(ResourceExhausted):
        await waiting


async def test_a_stream_whose_message_is_being_handled_is_left_alone(streams: Reading) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield MESSAGE
        yield b"next"

    parsed = streams.reader.stream(requests(), Codec(bytes), permit, charge)
    assert await anext(parsed) == MESSAGE
    streams.reads.look()
    streams.memory.used_bytes += 101
    streams.reads.look()

    assert await anext(parsed) == b"next"
    await parsed.aclose()


async def test_a_message_on_a_stream_has_a_limit_of_its_own(streams: Reading) -> None:
    largest = b"x" * limits.STREAM_MESSAGE_BYTES_MAX
    assert await streams.begin(only(largest)) == largest

    with pytest.raises(InvalidArgument) as caught:
        await streams.begin(only(largest + b"x"))

    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert "on a stream: send it in parts, or by a call of its own" in caught.value.message


async def test_of_too_many_streams_without_a_first_request_the_oldest_end(
    streams: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "SILENT_CALLS_MAX", 3)

    async def one_then_silence() -> AsyncIterator[bytes]:
        yield MESSAGE
        await asyncio.get_running_loop().create_future()

    # Given a stream that has said something, and as many silent ones as there may be
    parsed = streams.reader.stream(one_then_silence(), Codec(bytes), permit, charge)
    assert await anext(parsed) == MESSAGE
    heard = asyncio.create_task(anext(parsed))
    streams.tasks.append(heard)
    silent = [streams.begin(silence()) for _ in range(3)]
    await turns()
    assert not any(task.done() for task in silent)

    # When two more come
    more = [streams.begin(silence()) for _ in range(2)]

    # Then the two oldest silent ones end, and no other
    for ended in silent[:2]:
        with pytest.raises(ResourceExhausted):
            await ended
    await turns()
    assert not any(task.done() for task in (heard, silent[2], *more))
