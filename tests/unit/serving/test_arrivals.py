"""Which requests may arrive at once: few while they are large, many while they are small."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from libs.serving.requests import arrivals
from libs.serving.requests.arrivals import Arrival, Arrivals


class Memory:
    """The memory of a process, as a test has it."""

    def __init__(self) -> None:
        self.used_bytes = 1_000

    def __call__(self) -> int:
        return self.used_bytes


async def nothing() -> None:
    pass


async def started(*tasks: asyncio.Task[Arrival]) -> list[bool]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


@pytest.fixture
def slow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks happen when a test asks for them, and find everything slow."""
    monkeypatch.setattr(arrivals, "LOOK_S", 3_600.0)
    monkeypatch.setattr(arrivals, "SLOW_S", -1.0)
    monkeypatch.setattr(arrivals, "LINE_S", 3_600.0)
    monkeypatch.setattr(arrivals, "STALLED_S", -1.0)
    monkeypatch.setattr(arrivals, "MORE_S", 0.0)
    monkeypatch.setattr(arrivals, "SMALL_BYTES", 0)


@pytest.mark.usefixtures("slow_at_once")
async def test_few_arrive_at_once_and_the_next_when_one_is_there() -> None:
    arriving = Arrivals(2, 100, Memory())
    tasks = [asyncio.create_task(arriving.begin(nothing)) for _ in range(4)]
    assert await started(*tasks) == [True, True, False, False]

    arriving.end(tasks[0].result())

    assert await started(*tasks) == [True, True, True, False]
    arriving.end(tasks[0].result())  # Once is enough
    assert await started(*tasks) == [True, True, True, False]
    await cancel(*tasks)


@pytest.mark.usefixtures("slow_at_once")
async def test_more_arrive_while_they_take_no_memory() -> None:
    memory = Memory()
    arriving = Arrivals(2, 100, memory)
    tasks = [asyncio.create_task(arriving.begin(nothing)) for _ in range(20)]
    await started(*tasks)

    arriving.look()
    assert sum(await started(*tasks)) == 4
    arriving.look()
    assert sum(await started(*tasks)) == 8

    # And no more once they do
    memory.used_bytes += 101
    for task in tasks[:8]:
        task.result().is_whole = True
    arriving.look()
    assert sum(await started(*tasks)) == 8
    for task in tasks[:7]:
        arriving.end(task.result())
    assert sum(await started(*tasks)) == 9
    await cancel(*tasks)


@pytest.mark.usefixtures("slow_at_once")
async def test_no_more_arrive_while_one_that_is_whole_waits_for_its_turn() -> None:
    arriving = Arrivals(2, 100, Memory())
    tasks = [asyncio.create_task(arriving.begin(nothing)) for _ in range(6)]
    await started(*tasks)
    tasks[0].result().is_whole = True

    arriving.look()
    assert sum(await started(*tasks)) == 2

    # Nor where more were let in before
    tasks[0].result().is_whole = False
    arriving.look()
    assert sum(await started(*tasks)) == 4
    tasks[1].result().is_whole = True
    arriving.look()
    arriving.end(tasks[0].result())
    assert sum(await started(*tasks)) == 4
    await cancel(*tasks)


@pytest.mark.usefixtures("slow_at_once")
async def test_those_let_in_as_small_are_refused_when_they_turn_out_to_be_large() -> None:
    memory = Memory()
    arriving = Arrivals(2, 100, memory)
    refused: list[int] = []

    async def refuse() -> None:
        refused.append(1)

    tasks = [asyncio.create_task(arriving.begin(refuse)) for _ in range(8)]
    await started(*tasks)
    arriving.look()
    arriving.look()
    assert await started(*tasks) == [True] * 8

    memory.used_bytes += 8 * 100 + 1
    arriving.look()
    await started(*tasks)

    assert [task.result().is_refused for task in tasks] == [False] * 2 + [True] * 6
    assert len(refused) == 6


@pytest.mark.usefixtures("slow_at_once")
async def test_one_that_stalls_is_refused_when_others_wait_and_memory_is_short() -> None:
    memory = Memory()
    arriving = Arrivals(2, 100, memory)
    refused: list[int] = []

    async def refuse() -> None:
        refused.append(1)

    first = await arriving.begin(refuse)
    whole = await arriving.begin(refuse)
    whole.is_whole = True
    arriving.look()
    memory.used_bytes += 101
    arriving.look()
    assert refused == []

    waiting = asyncio.create_task(arriving.begin(nothing))
    await started(waiting)
    arriving.look()

    assert await started(waiting) == [True]
    assert refused == [1]
    assert first.is_refused
    assert not whole.is_refused


async def test_one_that_waits_too_long_or_gives_up_takes_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arriving = Arrivals(1, 0, Memory())
    first = await arriving.begin(nothing)
    gives_up = asyncio.create_task(arriving.begin(nothing))
    await started(gives_up)
    await cancel(gives_up)
    monkeypatch.setattr(arrivals, "LINE_S", 0.0)
    with pytest.raises(TimeoutError):
        await arriving.begin(nothing)

    arriving.end(first)

    monkeypatch.setattr(arrivals, "LINE_S", 3_600.0)
    async with asyncio.timeout(60):
        arriving.end(await arriving.begin(nothing))


async def cancel(*tasks: asyncio.Task[Arrival]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.usefixtures("slow_at_once")
async def test_of_too_many_calls_without_their_request_the_oldest_are_refused() -> None:
    refused: list[int] = []
    arriving = Arrivals(10, 100, Memory(), slow_max=3)
    began = []
    for number in range(6):

        async def refuse(number: int = number) -> None:
            refused.append(number)

        began.append(await arriving.begin(refuse))
    began[0].is_whole = True  # it waits for its share of the memory

    arriving.look()
    await started()

    assert refused == [1, 2, 3]
    arriving.look()
    await started()
    assert refused == [1, 2, 3]
