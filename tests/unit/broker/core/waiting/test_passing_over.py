"""Messages that cannot be had now, more than memory holds, hold up no others."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from functools import partial
from itertools import cycle

import pytest

from libs.storage.records.queues import AvailableMessage
from services.broker.core.leases import Lease
from services.broker.core.queue import Choice, Selector
from services.broker.core.waiting import available, lane, lane_budget
from services.broker.core.waiting.scan import Passing
from services.broker.shard import loading
from tests.parts_beyond import parts_beyond
from tests.unit.broker.core.shards import Rig
from tests.unit.broker.core.stored import stored_queue


class UpTo(Selector):
    """Takes at most so many messages, of those that are not down, and whose kind is not."""

    def __init__(self, limit: int, down: Container[int], reads_on: Callable[[], bool]) -> None:
        self.passing: Passing = Passing(self._cause, down.__contains__, reads_on)
        self._limit = limit
        self._down = down

    def _cause(self, item: AvailableMessage) -> int | None:
        causes = (item.message_id % 3, -item.message_id)
        return next((cause for cause in causes if cause in self._down), None)

    def choose(self, item: AvailableMessage) -> Choice:
        if not self.passing.wants(item):
            return Choice.SKIP
        self._limit -= 1
        return Choice.TAKE if self._limit >= 0 else Choice.STOP


class Passed(Rig):
    """A queue whose messages are of three kinds: kinds that are down, and messages (-ID)."""

    def __init__(self) -> None:
        super().__init__()
        self.down: set[int] = set()
        self.reads_on: Callable[[], bool] = lambda: True
        self.create()

    def is_down(self, message_id: int) -> bool:
        return message_id % 3 in self.down or -message_id in self.down

    async def take(self, limit: int) -> list[Lease]:
        """One claim."""
        queue = self.queue()

        def command() -> list[Lease]:
            selector = UpTo(limit, self.down, self.reads_on)
            return self.shard.leases.claim(queue, selector, 60_000, "w", self.now_ms).leases()

        return await self.run(command)

    async def take_all(self) -> list[Lease]:
        """Claims until none comes: of less urgent messages, one needs a claim of its own."""
        found: list[Lease] = []
        while more := await self.take(5):
            found += more
        return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds a few messages of a lane, and reads fewer."""
    monkeypatch.setattr(lane, "CACHED_MAX", 16)
    monkeypatch.setattr(lane, "PINNED_MAX", 4)
    monkeypatch.setattr(available, "READY_BUCKET_MAX", 3)
    monkeypatch.setattr(available, "TIMED_BUCKET_MAX", 3)
    monkeypatch.setattr(loading, "LOAD_MESSAGES", 4)
    monkeypatch.setattr(lane_budget, "SPARED", 0)
    monkeypatch.setattr(lane_budget, "COUNTED_FROM", 1)


def cached(rig: Rig) -> int:
    return max(one.cached_count for one in rig.queue().waiting.lanes())


@pytest.mark.usefixtures("small")
async def test_messages_behind_many_that_are_passed_over_are_claimed() -> None:
    rig = Passed()
    for first in range(0, 300, 3):
        await rig.route([first, first + 300, first + 600])
        rig.commit()
    await rig.route([1001, 1004])
    await rig.route([1007], priority=9)
    rig.commit()
    await rig.restart()
    rig.down = {0}

    assert [one.message_id for one in await rig.take(5)] == [1001, 1004]
    assert [one.message_id for one in await rig.take(5)] == [1007]
    assert await rig.take(5) == []
    assert cached(rig) < 20
    rig.down.clear()
    assert len(await rig.take_all()) == 300


@pytest.fixture
def parts(small: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first order of each part that was read behind what is passed over."""
    return parts_beyond(monkeypatch)


async def many_down() -> Passed:
    """A queue with many messages of a kind that is down, and far behind these one of each other."""
    rig = Passed()
    for first in range(0, 600, 6):
        await rig.route([first, first + 3])
        rig.commit()
    await rig.route([1001])
    rig.commit()
    await rig.route([1003])
    rig.commit()
    await rig.restart()
    rig.down = {0}
    return rig


async def test_only_what_can_be_had_again_is_read_again(parts: list[int]) -> None:
    rig = await many_down()
    rig.down |= {1, 2, -1003, -5000}
    assert await rig.take(1) == []
    count = len(parts)
    assert count > 10

    rig.down.remove(-5000)
    assert await rig.take(1) == []
    assert len(parts) == count
    rig.down.remove(1)  # The one of this kind is down for itself.
    assert await rig.take(1) == []
    rig.down.remove(-1003)
    assert [one.message_id for one in await rig.take(1)] == [1003]
    rig.down.remove(2)
    assert [one.message_id for one in await rig.take(1)] == [1001]

    assert len(parts) <= count + 3
    rig.down.remove(0)
    assert len(await rig.take_all()) == 200


async def test_a_walk_that_reads_no_further_goes_on_there_the_next_time(parts: list[int]) -> None:
    rig = await many_down()
    rig.reads_on = partial(next, cycle([True, False]))

    walks = 0
    while not (taken := await rig.take(1)):
        walks += 1
        assert len(parts) == walks

    assert [one.message_id for one in taken] == [1001]
    assert sorted(set(parts)) == parts
    assert walks > 10


async def test_less_urgent_messages_wait_until_all_before_them_were_looked_at(
    parts: list[int],
) -> None:
    rig = await many_down()
    await rig.route([1007], priority=9)
    rig.reads_on = partial(next, cycle([True, False]))

    taken: list[int] = []
    while len(taken) < 3:
        taken += [one.message_id for one in await rig.take(1)]

    assert taken == [1001, 1003, 1007]
    assert len(parts) > 10


@pytest.mark.usefixtures("small")
async def test_what_expired_behind_others_leaves_the_store_with_the_next_commit() -> None:
    rig = Passed()
    await rig.route(range(0, 300, 3))
    await rig.route([1001, 1004], deadline_ms=rig.now_ms + 10)
    rig.commit()
    await rig.restart()
    rig.down = {0}
    rig.now_ms += 10

    assert await rig.take(5) == []
    rig.commit()

    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    assert len(stored.waiting) == 100
    assert rig.queue().waiting.expired_count == 2


@pytest.mark.usefixtures("small")
async def test_more_buckets_than_are_pinned_come_of_one_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "LOAD_MESSAGES", 40)
    rig = Passed()
    await rig.route(range(0, 300, 3))
    behind = list(range(1001, 1061, 3))
    for message_id in behind:
        await rig.route([message_id])
        rig.commit()
    await rig.restart()
    rig.down = {0}

    assert [one.message_id for one in await rig.take_all()] == behind


@pytest.mark.usefixtures("small")
async def test_what_was_read_behind_others_and_not_taken_is_read_again() -> None:
    rig = Passed()
    await rig.route(range(0, 300, 3))
    for first in range(1001, 1100, 9):
        await rig.route([first, first + 1, first + 2])  # 1002, 1011, … are passed over, too
        rig.commit()
    await rig.restart()
    rig.down = {0}

    taken = []
    while found := await rig.take(1):
        taken += [one.message_id for one in found]
        rig.commit()

    assert taken == [one for first in range(1001, 1100, 9) for one in (first, first + 2)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(30))
async def test_each_message_comes_once_whatever_is_passed_over(seed: int) -> None:
    dice = random.Random(seed)
    rig = Passed()
    waiting, delayed, held = set[int](), set[int](), list[Lease]()
    next_id = 1
    for _ in range(120):
        rig.shard.lanes.bytes_max = dice.choice([0, 1 << 20])
        match dice.randrange(11):
            case 0 | 1 | 2:
                ids = range(next_id, next_id + dice.randint(1, 12))
                next_id = ids.stop
                due_ms = rig.now_ms + dice.randint(1, 40) if dice.random() < 0.3 else 0
                await rig.route(ids, visible_at_ms=due_ms, priority=dice.choice([0, 0, 0, 7]))
                waiting.update(ids)
                delayed |= set(ids) if due_ms else set()
            case 3:
                rig.commit()
            case 4:
                rig.down.add(dice.choice([dice.randrange(3), -dice.randint(1, next_id)]))
            case 5 if rig.down and dice.random() < 0.5:
                rig.down.remove(dice.choice(sorted(rig.down)))
            case 6 | 9 | 10:
                taken = await rig.take(dice.randint(1, 4))
                if not taken:
                    assert all(map(rig.is_down, waiting - delayed))
                held += taken
                waiting.difference_update(one.message_id for one in taken)
            case 7:
                dice.shuffle(held)
                given = [held.pop() for _ in range(len(held) // 2)]
                waiting.update(one.message_id for one in given)
                rig.release(given)
            case 8 if dice.random() < 0.3:
                rig.commit()
                await rig.restart()
                held = []  # Those of another process are not released.
        rig.now_ms += 3
        assert rig.queue().waiting.ready_count + rig.queue().waiting.timed_count == len(waiting)
    rig.now_ms += 100
    seen = await rig.take_all()
    assert {one.message_id for one in seen} == {one for one in waiting if not rig.is_down(one)}
    rig.down.clear()
    seen += await rig.take_all()
    assert sorted(one.message_id for one in seen) == sorted(waiting)
    assert not any(one.count for one in rig.queue().waiting.lanes())
