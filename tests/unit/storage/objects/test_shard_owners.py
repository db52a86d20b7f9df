"""Who may own a shard: the latest process, and none that was replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest

from libs.storage.database.roots import open_root
from libs.storage.errors import CorruptRecord, Fenced
from libs.storage.objects.shard_owners import FOLDER, REPLACED_MAX, ShardOwners
from libs.storage.objects.small_objects import Objects


@pytest.fixture(params=["memory", "file"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    is_file = request.param == "file"
    return open_root(tmp_path.as_uri() if is_file else f"memory:///{uuid4()}").objects


@pytest.fixture
def owners(objects: Objects) -> ShardOwners:
    return ShardOwners(objects, "broker/0")


async def test_an_owner_keeps_its_shard_over_restarts(owners: ShardOwners) -> None:
    await owners.claim("a")
    await owners.claim("a")
    await owners.check("a")

    assert (await owners.latest()).number == 1


async def test_who_was_replaced_never_gets_the_shard_back(owners: ShardOwners) -> None:
    for name in ("a", "b", "c"):
        await owners.claim(name)

    for name in ("a", "b"):
        with pytest.raises(Fenced, match=f"broker/0: 'c' has replaced '{name}'"):
            await owners.claim(name)
    await owners.claim("c")


async def test_an_owner_that_was_replaced_while_it_opened_learns_of_it(owners: ShardOwners) -> None:
    await owners.claim("a")
    await owners.claim("b")

    with pytest.raises(Fenced):
        await owners.check("a")
    await owners.check("b")


async def test_a_process_without_a_name_takes_over_and_is_replaced_without_a_trace(
    owners: ShardOwners, objects: Objects
) -> None:
    # Given only processes without names, then nothing is stored
    await owners.claim("")
    await owners.check("")
    assert await objects.list(FOLDER) == []

    # When one replaces a named one, then that one stays out, and any other may follow
    await owners.claim("a")
    await owners.claim("")
    with pytest.raises(Fenced, match="a process without an owner name has replaced 'a'"):
        await owners.claim("a")
    await owners.claim("b")
    with pytest.raises(Fenced):
        await owners.check("")
    await owners.claim("")
    assert (await owners.latest()).replaced == ("b", "a")


async def test_of_many_that_claim_at_once_one_is_the_owner(
    owners: ShardOwners, objects: Objects
) -> None:
    names = [f"pod-{number}" for number in range(16)]

    await asyncio.gather(*(owners.claim(name) for name in names))

    results = await asyncio.gather(*map(owners.check, names), return_exceptions=True)
    assert [type(one) for one in results].count(Fenced) == len(names) - 1
    assert results.count(None) == 1
    assert len(await objects.list(FOLDER)) == 1


async def test_shards_have_owners_of_their_own(owners: ShardOwners, objects: Objects) -> None:
    await owners.claim("a")
    await ShardOwners(objects, "broker/1").claim("b")
    await ShardOwners(objects, "ingest/0").claim("c")

    await owners.check("a")


async def test_the_record_stays_small(owners: ShardOwners) -> None:
    for number in range(REPLACED_MAX + 3):
        await owners.claim(f"pod-{number}")

    assert len((await owners.latest()).replaced) == REPLACED_MAX


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"owner": 1, "replaced": []}', b"{}"])
async def test_a_damaged_record_is_an_error(
    owners: ShardOwners, objects: Objects, content: bytes
) -> None:
    await objects.put(f"{FOLDER}/broker/0/{1:020}.json", content)

    with pytest.raises(CorruptRecord, match=r"shard-owners/broker/0"):
        await owners.claim("a")
