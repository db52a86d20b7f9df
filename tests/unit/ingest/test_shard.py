import shutil
import time
from pathlib import Path

import pytest

from libs.serving.process.exits import EXIT_FENCED
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import Fenced, LostDatabase
from libs.storage.layout.own_keys import (
    CLOCK_KEY,
    parse_request_ids_key,
    request_ids_range,
)
from libs.storage.records.states import encode_clock
from tests.manual_clock import ManualClock
from tests.stored_messages import read_messages
from tests.unit.ingest.shards import batch, opened


async def test_the_older_of_two_owners_answers_nothing_more_and_says_why() -> None:
    root = open_root("memory:///")
    async with opened(root) as older:
        first = await older.publisher.publish(batch(b"a", request_id="r"))
        async with opened(root) as newer:
            with pytest.raises(Fenced):
                await older.publisher.publish(batch(b"lost", request_id="s"))
            assert (await older.wait_lost()).code == EXIT_FENCED
            # Its publish is nowhere, and its repeat is a first one elsewhere
            assert await newer.publisher.publish(batch(b"a", request_id="r")) == first
            second = await newer.publisher.publish(batch(b"lost", request_id="s"))
            assert second.first_message_id > first.first_message_id
            assert newer.log.end.sequence == second.first_message_id


async def test_an_idle_owner_that_was_fenced_finds_out() -> None:
    root = open_root("memory:///")
    async with opened(root) as older, opened(root):
        assert (await older.wait_lost()).code == EXIT_FENCED


async def test_the_database_of_another_shard_is_refused(tmp_path: Path) -> None:
    # Given two shards, neither of which has a message
    root = open_root(tmp_path.as_uri())
    for number in (0, 1):
        async with opened(root, shard=number):
            pass

    # When the folder of one is in the place of the other
    shutil.rmtree(tmp_path / "ingest/0")
    shutil.copytree(tmp_path / "ingest/1", tmp_path / "ingest/0")

    # Then it does not serve there, and says which it is
    with pytest.raises(LostDatabase, match=r"ingest/0 below .* has the records of ingest/1"):
        async with opened(root):
            pass
    async with opened(root, shard=1):
        pass


async def test_the_time_of_receipt_never_goes_back_across_a_restart() -> None:
    # Given a last commit that was made a little ahead of this machine's clock
    root = open_root("memory:///")
    ahead_ms = int(time.time() * 1000) + 50
    database = await root.database("ingest/0", Kind.INGEST)
    made = Batch()
    made.put(CLOCK_KEY, encode_clock(ahead_ms))
    await database.commit(made)
    await database.close()

    # Then the shard serves only when the clock has caught up
    async with opened(root) as shard:
        answered = await shard.publisher.publish(batch(b"x"))
        (message,) = (await read_messages(shard, answered.first_message_id)).messages
        assert message.received_at_ms >= ahead_ms


async def test_old_request_ids_are_deleted_without_any_further_publish() -> None:
    root, clock = open_root("memory:///"), ManualClock()
    async with opened(root, clock) as shard:
        await shard.publisher.publish(batch(b"x", request_id="r"))
        clock.advance(12 * 60_000)
        await shard.publisher.clean_up()
        await shard.publisher.commits.durable()
        assert (await shard.publisher.publish(batch(b"y", request_id="r"))).first_message_id == 2
    database = await root.database("ingest/0", Kind.INGEST)
    span = request_ids_range(0, (1 << 32) - 1)
    keys = [key async for rows in database.scan(*span) for key, _ in rows]
    assert [parse_request_ids_key(key).first_sequence for key in keys] == [2]
    await database.close()
