"""Who may own a shard: the latest process, and none that was replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest

from libs.storage.database.roots import open_root
from libs.storage.errors import Fenced
from libs.storage.objects.shard_owners import FOLDER, REPLACED_MAX, Owner, ShardOwners
from libs.storage.objects.small_objects import Objects


@pytest.fixture(params=["memory", "file"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    is_file = request.param == "file"
    return open_root(tmp_path.as_uri() if is_file else f"memory:///{uuid4()}").objects


@pytest.fixture
def owners(objects: Objects) -> ShardOwners:
    return ShardOwners(objects, "broker/0")


async def test_an_owner_keeps_its_shard_over_restarts(owners: ShardOwners) -> None:
    await owners.claim(Owner("a"))
    await owners.claim(Owner("a"))
    await owners.check("a")

    assert (await owners.latest()).number == 1


async def test_who_was_replaced_never_gets_the_shard_back(owners: ShardOwners) -> None:
    for name in ("a", "b", "c"):
        await owners.claim(Owner(name))

    for name in ("a", "b"):
        with pytest.raises(Fenced, match=f"broker/0: 'c' has replaced '{name}'"):
            await owners.claim(Owner(name))
    await owners.claim(Owner("c"))


async def test_an_owner_that_was_replaced_while_it_opened_learns_of_it(owners: ShardOwners) -> None:
    await owners.claim(Owner("a"))
    await owners.claim(Owner("b"))

    with pytest.raises(Fenced):
        await owners.check("a")
    await owners.check("b")


async def test_a_process_without_a_name_takes_over_and_is_replaced_without_a_trace(
    owners: ShardOwners, objects: Objects
) -> None:
    # Given only processes without names, then nothing is stored
    await owners.claim(Owner())
    await owners.check("")
    assert await objects.list(FOLDER) == []

    # When one replaces a named one, then that one stays out, and any other may follow
    await owners.claim(Owner("a"))
    await owners.claim(Owner())
    with pytest.raises(Fenced, match="a process without an owner name has replaced 'a'"):
        await owners.claim(Owner("a"))
    await owners.claim(Owner("b"))
    with pytest.raises(Fenced):
        await owners.check("")
    await owners.claim(Owner())
    assert (await owners.latest()).replaced == ("b", "a")


async def test_a_standby_does_not_take_a_freed_shard_that_a_process_without_a_name_has_claimed(
    owners: ShardOwners,
) -> None:
    await owners.claim(Owner("a"))
    await owners.give_free("a")
    watched = await owners.latest()

    await owners.claim(Owner())

    assert not (await owners.latest()).is_free
    assert not await owners.take(Owner("standby"), watched)
    await owners.check("")


async def test_of_many_that_claim_at_once_one_is_the_owner(
    owners: ShardOwners, objects: Objects
) -> None:
    names = [f"pod-{number}" for number in range(16)]

    # Who is replaced before it has read its own claim hears of it at once
    claims = (owners.claim(Owner(name)) for name in names)
    fenced = await asyncio.gather(*claims, return_exceptions=True)
    assert {type(one) for one in fenced} <= {type(None), Fenced}

    results = await asyncio.gather(*map(owners.check, names), return_exceptions=True)
    assert [type(one) for one in results].count(Fenced) == len(names) - 1
    assert results.count(None) == 1
    assert len(await objects.list(FOLDER)) == 1


async def test_shards_have_owners_of_their_own(owners: ShardOwners, objects: Objects) -> None:
    await owners.claim(Owner("a"))
    await ShardOwners(objects, "broker/1").claim(Owner("b"))
    await ShardOwners(objects, "ingest/0").claim(Owner("c"))

    await owners.check("a")


async def test_the_record_stays_small(owners: ShardOwners) -> None:
    for number in range(REPLACED_MAX + 3):
        await owners.claim(Owner(f"pod-{number}"))

    assert len((await owners.latest()).replaced) == REPLACED_MAX


async def test_an_owner_that_has_moved_says_where_it_is(owners: ShardOwners) -> None:
    await owners.claim(Owner("a", "old:1"))
    await owners.claim(Owner("a", "new:2"))

    latest = await owners.latest()
    assert (latest.owner, latest.replaced) == (Owner("a", "new:2"), ())


async def test_of_many_that_watch_one_claim_one_takes_the_shard(owners: ShardOwners) -> None:
    await owners.claim(Owner("a"))
    watched = await owners.latest()
    names = [f"standby-{number}" for number in range(16)]

    taken = await asyncio.gather(*(owners.take(Owner(name), watched) for name in names))

    assert taken.count(True) == 1
    assert (await owners.latest()).owner.name == names[taken.index(True)]


async def test_a_claim_watched_long_ago_takes_no_shard(
    owners: ShardOwners, objects: Objects
) -> None:
    # Given a shard that has changed hands twice since, so that the number is free again
    await owners.claim(Owner("a"))
    watched = await owners.latest()
    for name in ("b", "c"):
        await owners.claim(Owner(name))

    assert not await owners.take(Owner("d"), watched)
    assert (await owners.latest()).owner.name == "c"


async def test_a_shard_given_free_is_anybodys_but_its_last_owners(owners: ShardOwners) -> None:
    await owners.claim(Owner("a", "here:1"))
    await owners.give_free("another")
    assert not (await owners.latest()).is_free

    await owners.give_free("a")

    latest = await owners.latest()
    assert latest.is_free
    assert latest.owner == Owner()
    with pytest.raises(Fenced):
        await owners.claim(Owner("a"))
    assert await owners.take(Owner("b"), latest)


_WHOLE = b'{"owner": "", "address": "", "is_free": false, "replaced": []}'


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"[]", b"{}", b'{"owner": "a", "replaced": []}'),
        *(_WHOLE.replace(b'""', b"1", 1), _WHOLE.replace(b'address": ""', b'address": 2')),
        *(_WHOLE.replace(b"false", b"0"), _WHOLE.replace(b"[]", b"[3]")),
    ],
)
async def test_a_damaged_claim_is_one_without_a_name_that_the_next_one_replaces(
    owners: ShardOwners, objects: Objects, content: bytes
) -> None:
    await owners.claim(Owner("a"))
    await objects.put(path := f"{FOLDER}/broker/0/{1:020}.json", content)

    damaged = await owners.latest()
    assert (damaged.number, damaged.owner) == (1, Owner())
    assert path in damaged.damage

    # Then no process without a name is kept out, and the claim behind it counts
    await owners.claim(Owner())
    assert await owners.take(Owner("b"), damaged)
    latest = await owners.latest()
    assert (latest.number, latest.owner.name, latest.damage) == (2, "b", "")
    assert await objects.list(FOLDER) == [f"{FOLDER}/broker/0/{2:020}.json"]


async def test_what_is_no_claim_in_the_folder_counts_for_nothing(
    owners: ShardOwners, objects: Objects
) -> None:
    strays = [f"{FOLDER}/broker/0/{name}" for name in ("0.json", f".{1:020}.json.x", "zzz.tmp")]
    for path in strays:
        await objects.put(path, b"{}")

    await owners.claim(Owner("a"))
    await owners.claim(Owner("b"))

    latest = await owners.latest()
    assert (latest.number, latest.owner.name) == (2, "b")
    assert {*strays} < {*await objects.list(FOLDER)}


async def test_a_claim_behind_an_old_one_counts_for_nothing_and_leaves_nothing(
    owners: ShardOwners, objects: Objects
) -> None:
    # Given a process that has read a claim before two others came, so that the next number is free
    await owners.claim(Owner("a"))
    watched = await owners.latest()
    for name in ("b", "c"):
        await owners.claim(Owner(name))

    assert not await owners.take(Owner("late"), watched)
    assert (await owners.latest()).owner.name == "c"
    assert len(await objects.list(FOLDER)) == 1
