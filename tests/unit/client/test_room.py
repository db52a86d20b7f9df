import asyncio

import pytest

from slatemq._publish.gathering import ByteSemaphore
from slatemq.errors import Unavailable


async def turns(room: ByteSemaphore, *sizes: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(room.take(size)) for size in sizes]
    await asyncio.sleep(0)
    return tasks


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_line_is_served_in_order_and_a_large_one_is_not_overtaken() -> None:
    room = ByteSemaphore(100)
    assert room.try_take(60)
    large, small = await turns(room, 90, 10)

    # There would be room for the small one, but it came later
    assert not room.try_take(10)
    await settle()
    assert not small.done()

    room.release(60)
    await settle()
    assert large.done()
    assert small.done()


async def test_one_that_is_larger_than_the_room_is_let_in_alone() -> None:
    room = ByteSemaphore(100)
    assert room.try_take(10)
    assert not room.try_take(1000)
    (huge,) = await turns(room, 1000)
    room.release(10)
    await settle()
    assert huge.done()
    assert not room.try_take(1)


async def test_who_gives_up_lets_the_next_in() -> None:
    room = ByteSemaphore(100)
    assert room.try_take(60)
    large, small = await turns(room, 90, 10)
    large.cancel()
    await settle()
    assert small.done()


async def test_who_gives_up_when_just_let_in_gives_the_room_back() -> None:
    room = ByteSemaphore(100)
    assert room.try_take(100)
    first, second = await turns(room, 100, 100)
    room.release(100)  # The first is let in, but has not run since.
    first.cancel()
    await settle()
    assert first.cancelled()
    assert second.done()


async def test_everybody_in_the_line_can_be_sent_away() -> None:
    room = ByteSemaphore(10)
    assert room.try_take(10)
    waiting = await turns(room, 5, 5)
    room.refuse(Unavailable("closed"))
    for task in waiting:
        with pytest.raises(Unavailable):
            await task
    room.release(10)
    assert room.try_take(10)
