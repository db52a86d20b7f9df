"""The signal that ends a worker, at moments at which it hardly ever comes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator

import pytest

from slatemq._consume.processing import EXIT_STATUS, _on_signal, ending_at_sigterm


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


async def exit_status(work: Coroutine[None, None, None]) -> object:
    """With what `work` ends the program; not in a task, which would end the loop of the tests."""
    with pytest.raises(SystemExit) as caught:
        await work
    return caught.value.code


async def test_a_program_whose_work_is_just_over_ends_at_the_signal() -> None:
    async def work() -> None:
        async with ending_at_sigterm():
            _on_signal(signal.SIGTERM, None)

    assert await exit_status(work()) == EXIT_STATUS
    await asyncio.sleep(0)  # Nothing cancels what comes after it.


async def test_a_signal_that_comes_twice_at_once_ends_it_once() -> None:
    async def work() -> None:
        async with ending_at_sigterm():
            _on_signal(signal.SIGTERM, None)
            _on_signal(signal.SIGTERM, None)
            await asyncio.sleep(60)

    assert await exit_status(work()) == EXIT_STATUS


async def test_of_two_works_the_last_ends_the_program_though_the_other_was_just_over() -> None:
    begun, cancelled, may_release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def works() -> None:
        async with ending_at_sigterm():
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()
                await may_release.wait()

    async def is_just_over() -> None:
        async with ending_at_sigterm():
            await begun.wait()
            _on_signal(signal.SIGTERM, None)

    last = asyncio.create_task(exit_status(works()))
    other = asyncio.create_task(is_just_over())
    await asyncio.sleep(0)
    begun.set()
    await cancelled.wait()
    assert not other.done(), "it waits for the other to release its messages"
    may_release.set()

    assert await last == EXIT_STATUS
    with pytest.raises(asyncio.CancelledError):
        await other
