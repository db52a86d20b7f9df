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
    assert await names.get("orders") == NameClaim(1, (3,))
    assert await names.claim("orders", (7, 3), NameClaim(1, (3,)))
    assert await names.get("orders") == NameClaim(2, (7, 3))
    await names.free("orders", NameClaim(2, (7, 3)))
    assert await names.get("orders") == NameClaim(3, ())


@pytest.mark.parametrize("shards", ["null", "3", '"3"', "[3, 3]", "[-1]", "[true]", "[1.0]", "{}"])
def test_a_claim_that_names_no_list_of_shards_is_damaged(tmp_path: Path, shards: str) -> None:
    names = QueueNames(open_root(tmp_path.as_uri()).objects)
    assert asyncio.run(names.claim("orders", (3,), UNCLAIMED))
    (path,) = tmp_path.glob("queue-names/*/*.json")
    path.write_text(path.read_text().replace("[3]", shards))

    with pytest.raises(CorruptRecord, match="queue name"):
        asyncio.run(names.get("orders"))


def test_shards_are_named_for_people() -> None:
    assert [named_shards(shards) for shards in ((), (3,), (3, 7), (1, 2, 0))] == [
        "no broker",
        "broker 3",
        "brokers 3 and 7",
        "brokers 1, 2 and 0",
    ]
