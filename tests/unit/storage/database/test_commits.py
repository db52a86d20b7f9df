from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.storage.database.commits import GroupCommit
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import Fenced, StoreFailed, Unstorable
from libs.storage.layout.own_keys import (
    CLOCK_KEY,
)
from libs.storage.layout.primitives import RowChange
from libs.storage.records.states import decode_clock
from tests.manual_clock import ManualClock
from tests.unit.storage.database.commit_loop import HeldSync, Rows, Stack, committing


async def test_an_answer_comes_only_after_its_row_is_durable() -> None:
    order = random.Random(1)
    async with committing() as stack:

        async def client(number: int) -> None:
            for step in range(20):
                key = b"%d-%d" % (number, step)
                await stack.set(key)
                assert await stack.database.get(key, durable=True) == b"v"
                if order.random() < 0.3:
                    await asyncio.sleep(0)

        await asyncio.gather(*(client(number) for number in range(25)))
        assert sum(len(keys) for _, keys in stack.rows.taken) == 500
        assert len(stack.rows.taken) < 500  # they shared commits


async def test_commits_become_durable_in_order_and_hooks_run_before_the_answers() -> None:
    seen: list[str] = []
    async with committing() as stack:
        stack.commits.on_durable(lambda number: seen.append(f"hook {number}"))

        async def client(number: int) -> None:
            for step in range(10):
                await stack.set(b"%d-%d" % (number, step))
                taken_by = next(
                    commit for commit, keys in stack.rows.taken if b"%d-%d" % (number, step) in keys
                )
                assert f"hook {taken_by}" in seen

        await asyncio.gather(*(client(number) for number in range(8)))
        assert seen == [f"hook {number}" for number in range(1, len(seen) + 1)]


async def test_nothing_is_answered_while_the_disk_has_not_synced() -> None:
    sync = HeldSync()
    async with committing(sync) as stack:
        first = asyncio.create_task(stack.set(b"first"))
        await sync.until_waiting()
        second = asyncio.create_task(stack.set(b"second"))
        reader = asyncio.create_task(stack.commits.durable())
        for _ in range(200):
            await asyncio.sleep(0)
        assert not first.done()
        assert not second.done()
        assert not reader.done()
        assert stack.commits.uncommitted_bytes > 0

        sync.open.set()
        await asyncio.gather(first, second, reader)
        assert stack.commits.uncommitted_bytes == 0
        assert stack.commits.overdue_ms() == 0


async def test_at_most_two_commits_are_in_flight_and_the_third_gathers() -> None:
    sync = HeldSync()
    async with committing(sync) as stack:
        waiters = []
        for number in range(6):
            waiters.append(asyncio.create_task(stack.set(b"%d" % number)))
            await sync.until_waiting()
            for _ in range(300):
                await asyncio.sleep(0)
        assert [keys for _, keys in stack.rows.taken] == [[b"0"], [b"1"]]
        assert len(stack.rows.waiting) == 4

        sync.open.set()
        await asyncio.gather(*waiters)
        assert [keys for _, keys in stack.rows.taken] == [
            [b"0"],
            [b"1"],
            [b"2", b"3", b"4", b"5"],
        ]


async def test_a_read_waits_for_the_commit_it_could_have_seen_and_for_no_other() -> None:
    async with committing() as stack:
        await asyncio.wait_for(stack.commits.durable(), 60)  # nothing applied: nothing to wait for
        assert stack.rows.taken == []
        await stack.set(b"k")
        await asyncio.wait_for(stack.commits.durable(), 60)
        assert len(stack.rows.taken) == 1


async def test_a_dirty_mark_without_a_change_makes_no_commit() -> None:
    numbers: list[int] = []
    async with committing() as stack:
        stack.commits.on_durable(numbers.append)
        stack.commits.mark_dirty()
        await asyncio.wait_for(stack.commits.durable(), 60)
        assert numbers == []
        assert await stack.database.get(CLOCK_KEY) is None
        await stack.set(b"k")
        assert numbers == [1]


async def test_an_empty_commit_still_waits_for_the_one_before_it() -> None:
    sync = HeldSync()
    async with committing(sync) as stack:
        first = asyncio.create_task(stack.set(b"first"))
        await sync.until_waiting()
        stack.commits.mark_dirty()
        empty = asyncio.create_task(stack.commits.durable())
        for _ in range(300):
            await asyncio.sleep(0)
        assert not empty.done()

        sync.open.set()
        await asyncio.gather(first, empty)


async def test_a_waiter_that_is_cancelled_disturbs_no_other() -> None:
    sync = HeldSync()
    async with committing(sync) as stack:
        leaving = asyncio.create_task(stack.set(b"k"))
        staying = asyncio.create_task(stack.commits.durable())
        await sync.until_waiting()
        also_staying = asyncio.create_task(stack.commits.durable())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        sync.open.set()
        await asyncio.gather(staying, also_staying)
        assert await stack.database.get(b"k", durable=True) == b"v"


async def test_each_commit_keeps_the_clock() -> None:
    async with committing() as stack:
        await stack.set(b"k")
        stack.clock.advance(1234)
        await stack.set(b"k")
        kept = await stack.database.get(CLOCK_KEY, durable=True)
        assert kept is not None
        assert decode_clock(kept) == stack.clock.now_ms()


async def test_closing_makes_durable_what_was_still_waiting() -> None:
    async with committing() as stack:
        for number in range(50):
            stack.rows.set(b"%d" % number, b"v")
        stack.commits.mark_dirty()
        await stack.commits.close()
        await stack.running
        assert await stack.database.get(b"49", durable=True) == b"v"


async def test_closing_an_idle_loop_ends_it() -> None:
    async with committing() as stack:
        await asyncio.sleep(0)
        await asyncio.wait_for(stack.commits.close(), 60)
        await asyncio.wait_for(stack.running, 60)


async def test_being_fenced_fails_every_waiter_and_ends_the_loop() -> None:
    async with committing() as stack:
        await stack.set(b"kept")
        usurper = await stack.root.database("ingest/0", Kind.INGEST)

        waiters = [asyncio.create_task(stack.set(b"lost%d" % number)) for number in range(10)]
        results = await asyncio.gather(*waiters, return_exceptions=True)

        assert [type(result) for result in results] == [Fenced] * 10
        assert isinstance(stack.commits.failed, Fenced)
        with pytest.raises(Fenced):
            await stack.running
        stack.commits.mark_dirty()
        with pytest.raises(Fenced):
            await stack.commits.durable()
        assert await usurper.get(b"kept", durable=True) == b"v"
        assert await usurper.get(b"lost0") is None
        await usurper.close()


async def test_a_disk_that_fails_to_sync_fails_all_that_is_in_flight_and_gathering() -> None:
    sync = HeldSync()
    async with committing(sync) as stack:
        waiters = []
        for number in range(4):
            waiters.append(asyncio.create_task(stack.set(b"%d" % number)))
            await sync.until_waiting()
            for _ in range(100):
                await asyncio.sleep(0)
        sync.error = OSError(5, "Input/output error")
        sync.open.set()

        results = await asyncio.gather(*waiters, return_exceptions=True)

        assert [type(result) for result in results] == [StoreFailed] * 4
        assert "Input/output error" in str(results[0])
        commits_made = len(stack.rows.taken)
        with pytest.raises(StoreFailed):
            await stack.running
        sync.error = None
        stack.rows.set(b"later", b"v")
        stack.commits.mark_dirty()
        with pytest.raises(StoreFailed):
            await stack.commits.durable()
        assert len(stack.rows.taken) == commits_made


async def test_a_source_that_breaks_ends_the_loop_like_a_failed_commit() -> None:
    class Broken:
        async def drain(self, batch: Batch) -> None:
            raise RuntimeError("half-way")

    root = open_root("memory:///")
    database = await root.database("ingest/0", Kind.INGEST)
    commits = GroupCommit(database, ManualClock(), Broken())
    running = asyncio.create_task(commits.run())
    commits.mark_dirty()
    with pytest.raises(StoreFailed, match="half-way"):
        await commits.durable()
    with pytest.raises(StoreFailed):
        await running
    await database.close()


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_record_that_cannot_be_encoded_is_named_to_the_waiters_of_its_commit_alone(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = HeldSync()
    async with committing(sync) as stack:
        # Given a commit that is written
        first = asyncio.create_task(stack.set(b"first"))
        await sync.until_waiting()

        def unstorable() -> Iterator[RowChange]:
            yield b"second", b"v"
            stack.rows.set(b"third", b"v")  # While the second one is written.
            stack.commits.mark_dirty()
            if (newest := stack.commits.newest()) is not None:
                third.append(newest)
            raise Unstorable("record x: too wide")

        async def drain(batch: Batch) -> None:
            if not is_late:
                raise Unstorable("record x: too wide")
            batch.put_later(unstorable(), 1)

        # When one fails behind it, as it is drained or written
        third: list[asyncio.Future[None]] = []
        answered: list[asyncio.Task[None]] = []
        first.add_done_callback(answered.append)
        monkeypatch.setattr(stack.rows, "drain", drain)
        second = asyncio.create_task(stack.set(b"second"))
        second.add_done_callback(answered.append)

        # Then its waiters are answered first, and they alone get what cannot be encoded
        await asyncio.wait([first, second])
        assert answered == [second, first]
        results = await asyncio.gather(second, first, *third, return_exceptions=True)
        assert [type(result) for result in results] == [Unstorable, *[StoreFailed] * (1 + is_late)]
        assert "record x" in str(results[1])
        sync.open.set()
        with pytest.raises(Unstorable, match="record x"):
            await stack.running


async def test_what_changes_while_a_commit_gathers_is_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with committing() as stack:
        # Given a clock that stands still, and a commit that gathers
        loop = asyncio.get_running_loop()
        now_s = [loop.time()]
        monkeypatch.setattr(loop, "time", lambda: now_s[0])
        stack.commits.gather_ms = 500
        first = asyncio.create_task(stack.set(b"first"))
        for _ in range(100):  # without gathering, it would have been drained
            await asyncio.sleep(0)

        # When something changes before its time is over
        second = asyncio.create_task(stack.set(b"second"))
        await asyncio.sleep(0)
        now_s[0] += 0.5

        await asyncio.gather(first, second)
        assert stack.rows.taken == [(1, [b"first", b"second"])]


async def test_an_interval_gathers_more_into_each_commit() -> None:
    async with committing(interval_ms=30) as stack:
        began_s = time.monotonic()
        for number in range(40):
            waiter = asyncio.create_task(stack.set(b"%d" % number))
            await asyncio.sleep(0.002)
        await waiter
        assert len(stack.rows.taken) <= (time.monotonic() - began_s) / 0.03 + 2


async def test_rows_survive_on_a_disk(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    stack = Stack(root, await root.database("ingest/0", Kind.INGEST))
    await asyncio.gather(*(stack.set(b"%d" % number) for number in range(100)))
    await stack.commits.close()
    await stack.running
    await stack.database.close()

    again = await root.database("ingest/0", Kind.INGEST)
    found = await again.get_many([b"%d" % number for number in range(100)], durable=True)
    assert found == [b"v"] * 100
    await again.close()


async def test_a_hook_that_breaks_lets_no_answer_through() -> None:
    async with committing() as stack:

        def breaking(number: int) -> None:
            raise RuntimeError(f"after commit {number}")

        stack.commits.on_durable(breaking)
        with pytest.raises(StoreFailed, match="after commit 1"):
            await stack.set(b"k")
        with pytest.raises(StoreFailed):
            await stack.running


async def test_a_loop_that_is_stopped_leaves_no_caller_waiting() -> None:
    sync = HeldSync()
    async with committing(sync) as stack:
        waiter = asyncio.create_task(stack.set(b"k"))
        await sync.until_waiting()
        stack.running.cancel()
        with pytest.raises(StoreFailed, match="stopped"):
            await waiter
        with pytest.raises(asyncio.CancelledError):
            await stack.running
        stack.running = asyncio.create_task(stack.commits.run())


async def test_ownership_is_proven_by_a_commit_of_its_own_that_no_hook_hears_of() -> None:
    heard: list[int] = []
    sync = HeldSync()
    async with committing(sync) as stack:
        stack.commits.on_durable(heard.append)
        proving = asyncio.create_task(stack.commits.prove_ownership())
        await sync.until_waiting()
        assert not proving.done()
        sync.open.set()
        await proving
        assert await stack.database.get(CLOCK_KEY, durable=True) is not None
        assert heard == []
        # And commits go on behind it
        await stack.set(b"key")
        assert len(heard) == 1


async def test_a_commit_under_way_proves_nothing_to_those_who_ask_later() -> None:
    sync = HeldSync()
    async with committing(sync) as stack:
        changing = asyncio.create_task(stack.set(b"key"))
        await sync.until_waiting()
        taken_before = len(stack.rows.taken)
        proving = asyncio.create_task(stack.commits.prove_ownership())
        sync.open.set()
        await asyncio.gather(changing, proving)
        assert len(stack.rows.taken) > taken_before


async def test_who_was_replaced_proves_nothing(tmp_path: Path) -> None:
    root = open_root((tmp_path / "data").as_uri())
    first = await root.database("ingest/0", Kind.INGEST)
    commits = GroupCommit(first, ManualClock(), Rows())
    running = asyncio.create_task(commits.run())
    await commits.prove_ownership()
    second = await root.database("ingest/0", Kind.INGEST)
    with pytest.raises(Fenced):
        await commits.prove_ownership()
    with pytest.raises(Fenced):
        await running
    await first.close()
    await second.close()
