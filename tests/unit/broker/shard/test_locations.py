"""What a broker remembers of where queues are, and for how long."""

from __future__ import annotations

import pytest

from libs.storage.database.roots import open_root
from libs.storage.errors import StoreUnavailable
from libs.storage.objects.queue_names import UNCLAIMED, QueueNames
from libs.storage.objects.small_objects import ObjectInfo, Objects
from services.broker.shard import locations
from services.broker.shard.locations import ABSENT_S, REMEMBERED_S, Locations
from tests.manual_clock import ManualSeconds


@pytest.fixture
def clock() -> ManualSeconds:
    return ManualSeconds()


@pytest.fixture
def objects() -> Objects:
    return open_root("memory:///").objects


@pytest.fixture
def names(objects: Objects) -> QueueNames:
    return QueueNames(objects)


async def stays(shard: int) -> bool:
    return False


async def move(names: QueueNames, *shards: int) -> None:
    assert await names.claim("q", shards, await names.get("q"))


async def test_an_answer_is_remembered_for_a_minute_unless_a_fresh_one_is_wanted(
    names: QueueNames, clock: ManualSeconds
) -> None:
    known = Locations(names, stays, clock)
    assert await names.claim("q", (3,), UNCLAIMED)
    assert await known.of("q") == (3,)
    await move(names, 4, 5)

    clock.now_s = REMEMBERED_S - 1
    assert await known.of("q") == (3,)
    assert await known.of("q", fresh=True) == (4, 5)
    assert await known.of("q") == (4, 5)

    await move(names, 6)
    clock.now_s += REMEMBERED_S
    assert await known.of("q") == (6,)


async def test_that_a_name_is_free_is_remembered_for_a_second(
    names: QueueNames, objects: Objects, clock: ManualSeconds
) -> None:
    known = Locations(names, stays, clock)
    for _ in range(10):
        assert await known.of("q") == ()
    assert objects.counts.requests["list"] == 1
    assert await names.claim("q", (3,), UNCLAIMED)

    clock.now_s = ABSENT_S

    assert await known.of("q") == (3,)


async def test_a_store_that_is_down_leaves_what_is_remembered(
    names: QueueNames, objects: Objects, clock: ManualSeconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Locations(names, stays, clock)
    assert await names.claim("q", (3,), UNCLAIMED)
    assert await known.of("q") == (3,)
    clock.now_s = 2 * REMEMBERED_S

    async def away(prefix: str, *_: object, **__: object) -> list[ObjectInfo]:
        raise StoreUnavailable("the store is down")

    monkeypatch.setattr(objects, "describe", away)

    assert await known.of("q") == (3,)
    with pytest.raises(StoreUnavailable):
        await known.of("q", fresh=True)
    with pytest.raises(StoreUnavailable):
        await known.of("another")


async def test_a_name_that_is_claimed_for_removed_shards_alone_is_free(names: QueueNames) -> None:
    removed = {3}

    async def is_removed(shard: int) -> bool:
        return shard in removed

    known = Locations(names, is_removed)
    assert await names.claim("q", (3, 4), UNCLAIMED)
    assert await known.of("q") == (3, 4)

    removed.add(4)

    assert await known.of("q", fresh=True) == ()


async def test_an_answer_is_read_again_once_a_shard_of_it_is_removed(names: QueueNames) -> None:
    removed = set[int]()

    async def is_removed(shard: int) -> bool:
        return shard in removed

    known = Locations(names, is_removed)
    assert await names.claim("q", (3, 4), UNCLAIMED)
    assert await known.of("q") == (3, 4)
    await move(names, 3, 5)
    assert await known.of("q") == (3, 4)

    removed.add(4)

    assert await known.of("q") == (3, 5)


async def test_an_answer_with_a_removed_shard_is_remembered_until_another_one_is_removed(
    names: QueueNames, objects: Objects
) -> None:
    removed, looks_count = {4}, 0

    async def is_removed(shard: int) -> bool:
        nonlocal looks_count
        looks_count += shard == 4
        return shard in removed

    known = Locations(names, is_removed)
    assert await names.claim("q", (3, 4, 5), UNCLAIMED)
    assert await known.of("q") == (3, 4, 5)
    before = objects.counts.requests["list"], looks_count

    for _ in range(10):
        assert await known.of("q") == (3, 4, 5)

    assert (objects.counts.requests["list"], looks_count) == before
    await move(names, 3, 4, 6)
    assert await known.of("q") == (3, 4, 5)
    removed.add(5)
    assert await known.of("q") == (3, 4, 6)


async def test_a_claim_is_read_again_whose_shard_is_removed_meanwhile(names: QueueNames) -> None:
    removed = set[int]()

    async def is_removed(shard: int) -> bool:
        if shard == 4 and not removed:
            await move(names, 3, 5)
            removed.add(4)
        return shard in removed

    known = Locations(names, is_removed)
    assert await names.claim("q", (3, 4), UNCLAIMED)

    assert await known.of("q") == (3, 5)
    assert await known.of("q") == (3, 5)


async def test_the_names_remembered_are_bounded(
    names: QueueNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locations, "NAMES_MAX", 10)
    known = Locations(names, stays)

    for number in range(30):
        await known.of(f"q-{number}")

    assert list(known._known) == [f"q-{number}" for number in range(20, 30)]
