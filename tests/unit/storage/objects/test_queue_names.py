"""A queue's name and the broker shards that may use it."""

import asyncio
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from libs.storage.errors import CorruptRecord
from libs.storage.objects.queue_names import UNCLAIMED, NameClaim, QueueNames, named_shards


async def test_a_claim_names_its_shards_in_their_order_until_the_name_is_free(
    tmp_path: Path,
) -> None:
    names = QueueNames(open_root(tmp_path.as_uri()).objects)
    assert await names.get("orders") == UNCLAIMED

    assert await names.claim("orders", (3,), UNCLAIMED)
    assert await names.get("orders") == NameClaim(1, (3,), (1,))
    assert await names.claim("orders", (7, 3), NameClaim(1, (3,), (1,)))
    assert await names.get("orders") == NameClaim(2, (7, 3), (2, 2))
    await names.free("orders", NameClaim(2, (7, 3), (2, 2)))
    assert await names.get("orders") == NameClaim(3, (), ())


async def test_a_partition_that_moves_leaves_the_places_of_the_others(tmp_path: Path) -> None:
    names = QueueNames(open_root(tmp_path.as_uri()).objects)
    assert await names.claim("orders", (7, 3), UNCLAIMED)
    begun = await names.get("orders")

    assert await names.place("orders", 1, 5, begun)
    assert await names.get("orders") == NameClaim(2, (7, 5), (1, 2))
    # Of two that move at the same time, the later one reads again, and its own place is unchanged
    assert not await names.place("orders", 0, 4, begun)
    moved = await names.get("orders")
    assert moved.place_of(0) == begun.place_of(0)
    assert await names.place("orders", 0, 4, moved)
    assert await names.get("orders") == NameClaim(3, (4, 5), (3, 2))
    # A move that is cancelled places the partition where it was
    assert await names.place("orders", 1, 5, await names.get("orders"))
    assert (await names.get("orders")).place_of(1) == (5, 4)
    assert (await names.get("orders")).place_of(2) == (None, 4)


async def test_objects_that_are_no_claims_are_passed_over(tmp_path: Path) -> None:
    objects = open_root(tmp_path.as_uri()).objects
    names = QueueNames(objects)
    assert await names.claim("orders", (3,), UNCLAIMED)
    (folder,) = await names.numbers()
    for path in ("queue-names/README", f"{folder}/.DS_Store", f"{folder}/notes.json"):
        await objects.put(path, b"x")

    assert await names.numbers() == {folder: 1}
    assert [found async for _, _, found in names.valid()] == [("orders", NameClaim(1, (3,), (1,)))]
    assert await names.claim("orders", (7,), await names.get("orders"))
    assert await names.get("orders") == NameClaim(2, (7,), (2,))


@pytest.mark.parametrize("shards", ["null", "3", '"3"', "[3, 3]", "[-1]", "[true]", "[1.0]", "{}"])
def test_a_claim_that_names_no_list_of_shards_is_damaged(tmp_path: Path, shards: str) -> None:
    names = QueueNames(open_root(tmp_path.as_uri()).objects)
    assert asyncio.run(names.claim("orders", (3,), UNCLAIMED))
    (path,) = tmp_path.glob("queue-names/*/*.json")
    path.write_text(path.read_text().replace("[3]", shards))

    with pytest.raises(CorruptRecord, match="queue name"):
        asyncio.run(names.get("orders"))


@pytest.mark.parametrize("since", ["null", "3", "[]", "[2]", "[0]", "[1, 1]", "[true]", '["1"]'])
def test_a_claim_that_does_not_say_since_when_is_damaged(tmp_path: Path, since: str) -> None:
    names = QueueNames(open_root(tmp_path.as_uri()).objects)
    assert asyncio.run(names.claim("orders", (3,), UNCLAIMED))
    (path,) = tmp_path.glob("queue-names/*/*.json")
    path.write_text(path.read_text().replace("[1]", since))

    with pytest.raises(CorruptRecord, match="queue name"):
        asyncio.run(names.get("orders"))


def test_shards_are_named_for_people() -> None:
    assert [named_shards(shards) for shards in ((), (3,), (3, 7), (1, 2, 0))] == [
        "no broker",
        "broker 3",
        "brokers 3 and 7",
        "brokers 1, 2 and 0",
    ]
