"""How many changes of queues a broker lets through."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from services.broker.shard import change_pace
from services.broker.shard.change_pace import SLOWER_MAX, ChangePace, FairLock, thread_busy_ns
from slatemq.errors import ResourceExhausted


def idle() -> int:
    """As if the loop did nothing."""
    return 0


async def test_a_few_changes_come_at_once_and_the_others_in_the_order_of_their_calls() -> None:
    pace, turns = ChangePace(per_s=200, wait_s=60, busy_ns=idle), list[int]()
    began_s = asyncio.get_running_loop().time()

    async def change(number: int) -> None:
        await pace.turn("shop")
        turns.append(number)

    await asyncio.gather(*(change(number) for number in range(20)))
    at_once = list(turns)
    await asyncio.gather(*(change(number) for number in range(20, 32)))

    assert at_once == list(range(20))
    assert turns == list(range(32))
    # The bound below does not depend on the machine: the limit is what makes it last.
    assert asyncio.get_running_loop().time() - began_s > 11 / 200


async def test_a_late_caller_does_not_pass_those_who_wait() -> None:
    # Given callers that wait, and a loop that then stands still for several turns
    pace, turns = ChangePace(per_s=20, wait_s=60, busy_ns=idle), list[int]()

    async def change(number: int) -> None:
        await pace.turn("shop")
        turns.append(number)

    waiting = [asyncio.create_task(change(number)) for number in range(4)]
    while len(turns) < 2:
        await asyncio.sleep(0)
    time.sleep(0.15)  # noqa: ASYNC251 - the event loop itself must stand still

    # When another one comes
    await change(4)
    await asyncio.gather(*waiting)

    # Then it has its turn behind the others
    assert turns == [0, 1, 2, 3, 4]


async def test_no_principal_waits_for_all_changes_of_another() -> None:
    # Given one that wants many changes
    pace, turns = ChangePace(per_s=200, wait_s=60, busy_ns=idle), list[str]()

    async def change(principal: str, number: int) -> None:
        await pace.turn(principal)
        turns.append(f"{principal}{number}")

    many = [asyncio.create_task(change("shop", number)) for number in range(60)]
    while len(turns) < 30:
        await asyncio.sleep(0)

    # When others want some, too
    few = [asyncio.create_task(change(one, at)) for one in ("bills", "news") for at in (1, 2)]
    await asyncio.gather(*many, *few)

    # Then each has every third turn
    came = [turn for turn in turns[30:] if turn.startswith(("bills", "news"))]
    assert came == ["bills1", "news1", "bills2", "news2"]
    assert turns.index("news2") - turns.index("bills1") == 4
    assert turns.index("news2") < 30 + 8
    assert [turn for turn in turns if turn.startswith("shop")] == [f"shop{at}" for at in range(60)]


async def test_a_caller_who_leaves_takes_no_turn_of_others() -> None:
    # Given three that wait for a lock, and one that has it
    lock, came = FairLock(), list[int]()

    async def hold(number: int) -> None:
        async with lock.held(f"line {number % 2}"):
            came.append(number)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(hold(number)) for number in range(4)]
    while not came:
        await asyncio.sleep(0)

    # When one leaves while it waits, and another as it gets the lock
    tasks[2].cancel()
    while came == [0] and not tasks[0].done():
        await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    # Then the others have their turns, and so have those that come
    assert came == [0, 3]
    await asyncio.wait_for(hold(4), timeout=60)
    assert came == [0, 3, 4]


async def test_a_caller_who_would_wait_too_long_is_refused_and_takes_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a clock that stands still
    now_s = [asyncio.get_running_loop().time()]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])
    pace = ChangePace(per_s=2, wait_s=0, busy_ns=idle)
    await pace.turn("shop")

    with pytest.raises(ResourceExhausted) as refusal:
        await pace.turn("shop")
    assert refusal.value.reason == "QUEUE_CHANGES"
    assert refusal.value.retry_after_ms

    now_s[0] += 0.5
    await pace.turn("shop")


async def test_where_the_loop_is_busy_it_rests_behind_each_change() -> None:
    # Given a loop with so much to do that it never rests
    pace = ChangePace(per_s=100, wait_s=60, busy_ns=time.monotonic_ns)
    await pace.turn("shop")

    # When more changes come than the limit alone holds back
    began_s = time.perf_counter()
    for _ in range(3):
        await pace.turn("shop")

    # Then each waits, and comes at last
    assert time.perf_counter() - began_s > 3 * SLOWER_MAX / 100 * 0.9


async def test_changes_wait_until_the_loop_has_rested_for_as_long_as_it_was_busy() -> None:
    # Given a loop that has worked for 10 ms since the last change, and then does nothing
    worked_ns = [0]
    pace = ChangePace(per_s=100, wait_s=60, busy_ns=lambda: worked_ns[0])
    began_s = time.perf_counter()
    await pace.turn("shop")
    worked_ns[0] = 10_000_000

    await pace.turn("shop")
    waited_s = time.perf_counter() - began_s

    assert waited_s > 0.019


@pytest.mark.parametrize("waited", ["1 5000000 9", "", None])
def test_work_counts_as_busy_and_so_does_waiting_for_a_processor_where_that_is_known(
    waited: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "schedstat"
    if waited is not None:
        file.write_text(waited)
    monkeypatch.setattr(change_pace, "_WAITED", file)

    before_ns = time.thread_time_ns()
    busy_ns = thread_busy_ns()
    after_ns = time.thread_time_ns()

    waited_ns = 5_000_000 if waited else 0
    assert before_ns <= busy_ns - waited_ns <= after_ns
