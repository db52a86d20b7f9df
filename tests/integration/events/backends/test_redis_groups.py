"""Which entries consumers of a group in Redis keep, and which others get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions

from libs.events.deliveries import end_task
from libs.events.redis.connection import open_client
from libs.events.redis.streams import Group
from tests.forms import examples
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running

pytestmark = pytest.mark.slow  # A real server.


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Any]:
    with running(RedisServer(tmp_path, "streams")) as server:
        async with open_client(server.settings("any")) as opened:
            yield opened


async def test_a_consumer_gets_what_a_dead_one_had_behind_any_number_of_its_own(
    client: Any,
) -> None:
    # Given a consumer that has many entries, and a dead one that has one behind them
    group, dead = (Group(client, "s", "group", name) for name in ("alive", "dead"))
    await group.create("0")
    for number in range(25):
        await client.xadd("s", {"number": number})
    for _ in range(3):
        await group.read()
    await client.xadd("s", {"number": "behind"})
    (left,) = await dead.read()

    # When both have shown no sign of life for as long as a dead one has
    for one in (group, dead):
        await one.leave()

    # Then it gets that one, and none of its own a second time
    assert [one.entry_id for one in await group.reclaim()] == [left.entry_id]


async def test_what_could_not_be_kept_in_an_outage_is_kept_by_the_next_call(
    tmp_path: Path,
) -> None:
    with running(RedisServer(tmp_path, "streams")) as server:
        async with open_client(server.settings("any")) as opened:
            client: Any = opened
            # Given a consumer that could not show that it still has an entry
            group = Group(client, "s", "group", "one")
            await group.create("0")
            entry_id = await client.xadd("s", {"number": 1})
            await group.read()
            await asyncio.to_thread(server.kill)
            with pytest.raises(exceptions.ConnectionError):
                await group.keep([entry_id])
            await asyncio.to_thread(server.start)

            # When Redis is back, and an hour has passed for it, then that entry is kept
            await client.xclaim("s", "group", "one", 0, [entry_id], idle=3_600_000, justid=True)
            await group.keep([entry_id])
            (pending,) = await client.xpending_range("s", "group", "-", "+", 1)
            assert pending["time_since_delivered"] < 3_600_000


async def test_a_consumer_that_stood_still_takes_nothing_back_from_another(client: Any) -> None:
    # Given a consumer that has entries, one of which another one has taken over
    group, other = (Group(client, "s", "group", name) for name in ("still", "other"))
    await group.create("0")
    taken, kept = [await client.xadd("s", {"number": number}) for number in range(2)]
    await group.read()
    await client.xclaim("s", "group", "other", 0, [taken])

    # When it shows that it still has them, then it gets to know what it has, and no more
    assert await group.keep([taken, kept, b"7-7"]) == {kept}
    assert await group.claim_again(taken) == []
    assert [one.entry_id for one in await group.claim_again(kept)] == [kept]
    pending = await client.xpending_range("s", "group", "-", "+", 10)
    assert {row["message_id"]: row["consumer"] for row in pending} == {
        taken: b"other",
        kept: b"still",
    }

    # And as the other one leaves, only what that one has is free
    await other.leave()
    assert [one.entry_id for one in await group.reclaim()] == [taken]


@pytest.mark.repeated
@pytest.mark.parametrize("is_leaving", [True, False])
async def test_no_entry_goes_with_a_consumer_that_gets_it_as_it_is_removed(
    client: Any, monkeypatch: pytest.MonkeyPatch, is_leaving: bool
) -> None:
    # Given a consumer, which leaves again and again, or which others always take for a dead one
    monkeypatch.setattr("libs.events.redis.streams.FORGET_CONSUMER_MS", -1)
    monkeypatch.setattr("libs.events.redis.streams.RECLAIM_S", 0)
    group, leaving, other = (Group(client, "s", "group", name) for name in ("one", "one", "other"))
    await group.create("0")

    async def remove() -> None:
        while True:
            await (leaving.leave() if is_leaving else other.reclaim())

    # When entries come to it, then it still has each when it has finished it
    removing = asyncio.create_task(remove())
    try:
        for number in range(examples(100)):
            await client.xadd("s", {"number": number})
            (delivery,) = await group.read()
            assert await client.xack("s", "group", delivery.entry_id) == 1
    finally:
        await end_task(removing)
