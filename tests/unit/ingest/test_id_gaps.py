"""Where the IDs of a log jump, as the ingest notes it."""

from __future__ import annotations

import asyncio

import pytest

from libs.storage.database.roots import open_root
from libs.storage.database.slate import Database
from libs.storage.records.log_bounds import LogGap, LogIds
from services.ingest.shard import Shard
from services.ingest.write import id_gaps
from tests.unit.ingest.shards import batch, opened


def counted(shard: Shard) -> int:
    """All messages of the log."""
    return LogIds(1, shard.gaps.gaps).count(0, shard.log.end.last_message_id)


async def test_messages_are_counted_over_every_restart() -> None:
    root = open_root("memory:///")
    published = 0
    for counts in ([3, 1], [], [2], [], [], [5, 5]):
        async with opened(root, id_block_size=100) as shard:
            assert counted(shard) == published
            for count in counts:
                await shard.publisher.publish(batch(*[b""] * count))
                published += count
                assert counted(shard) == published
    assert shard.gaps.gaps == [LogGap(4, 101), LogGap(102, 201)]


async def test_ids_without_messages_before_the_first_ones_are_in_the_gap() -> None:
    root = open_root("memory:///")
    async with opened(root, id_block_size=100) as shard:
        await shard.publisher.publish(batch(b"a"))
    async with opened(root, id_block_size=100) as shard:
        shard.publisher._ids.allocate(7)
        await shard.publisher.publish(batch(b"b"))
        assert shard.gaps.gaps == [LogGap(1, 108)]


async def test_a_gap_whose_commit_is_lost_is_noted_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = open_root("memory:///")
    async with opened(root, id_block_size=100) as shard:
        await shard.publisher.publish(batch(b"a"))

    async def lost(self: Database, *_: object) -> None:
        raise OSError("the machine is gone")

    async with opened(root, id_block_size=100) as shard:
        with monkeypatch.context() as patch:
            for name in ("commit", "write"):
                patch.setattr(Database, name, lost)
            with pytest.raises(Exception, match="gone"):
                await asyncio.wait_for(shard.publisher.publish(batch(b"b")), 60)

    async with opened(root, id_block_size=100) as shard:
        await shard.publisher.publish(batch(b"c"))
        assert shard.gaps.gaps == [LogGap(1, 101)]
        assert counted(shard) == 2


async def test_the_oldest_gaps_go_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(id_gaps, "GAPS_MAX", 2)
    root = open_root("memory:///")
    for _ in range(4):
        async with opened(root, id_block_size=10) as shard:
            await shard.publisher.publish(batch(b"a"))
    async with opened(root, id_block_size=10) as shard:
        assert shard.gaps.gaps == [LogGap(11, 21), LogGap(21, 31)]
