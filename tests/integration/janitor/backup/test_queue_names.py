"""What a restore claims for queues of which a backup has more, or less, than one place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import slatemq
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.layout.keys import config_key
from libs.storage.layout.own_keys import CLOCK_KEY, move_key
from libs.storage.objects.queue_names import NameClaim, QueueNames
from libs.storage.records.configs import QueueConfigRecord, encode_config
from libs.storage.records.move_records import MoveRecord, MoveStage, encode_move
from services.janitor.backup.catalogue import Catalogue
from services.janitor.backup.restoring import Restoring
from services.janitor.backup.shards import snapshots_of_stopped
from services.janitor.backup.taking import BackupSource, Taking
from services.janitor.runs.history import RunStore
from tests.integration.broker.moves.movers import create_partitions, has_queue
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import running
from tests.integration.broker.rpc.test_partitions import outcome
from tests.made_instances import make_instance
from tests.manual_clock import ManualClock

CONFIG = encode_config(QueueConfigRecord("true", 5, 0))


async def restore(folder: Path, fresh: Path, now_ms: int) -> None:
    root, backups = open_root(folder.as_uri()), open_root((folder / "backups").as_uri())
    await make_instance(root)
    source = BackupSource(root, lambda: snapshots_of_stopped(root, now_ms), RunStore(root.objects))
    backup = await Taking(source, backups, 5).take()
    await Restoring(Catalogue(backups.objects), backup, open_root(fresh.as_uri())).restore()


async def claim_in(folder: Path) -> NameClaim:
    return await QueueNames(open_root(folder.as_uri()).objects).get("q")


async def store(root: Path, name: str, *rows: tuple[bytes, bytes]) -> None:
    database = await open_root(root.as_uri()).database(name, Kind.BROKER)
    batch = Batch()
    batch.put(CLOCK_KEY, bytes(8))
    batch.put_all(rows)
    await database.commit(batch)
    await database.close()


def leaving(number: int, target: int) -> list[tuple[bytes, bytes]]:
    """The rows of a shard that q leaves by this move."""
    move = MoveRecord(MoveStage.LEAVING, number, target)
    return [(config_key("q"), CONFIG), (move_key("q"), encode_move(move))]


def arrived(number: int, target: int) -> list[tuple[bytes, bytes]]:
    """The rows of a shard that knows that q, which left it by this move, has arrived."""
    move = MoveRecord(MoveStage.ARRIVED, number, target)
    return [(config_key("q"), CONFIG), (move_key("q"), encode_move(move))]


def copied(number: int, source: int) -> list[tuple[bytes, bytes]]:
    """The rows of a shard that has all of q, and does not know yet whether it is its own."""
    move = MoveRecord(MoveStage.COPIED, number, source, config=CONFIG)
    return [(move_key("q"), encode_move(move))]


@pytest.mark.parametrize(
    ("shards", "owner"),
    [
        ((leaving(1, 1), leaving(2, 2), []), 1),
        ((leaving(2, 2), leaving(1, 0), []), 0),
        ((leaving(1, 1), leaving(2, 2), copied(2, 1)), 1),
        ((leaving(1, 1), [], copied(2, 1)), 2),
        ((arrived(2, 1), copied(2, 0), []), 1),
        ((arrived(1, 1), leaving(2, 2), []), 1),
    ],
)
async def test_a_queue_that_has_gone_on_does_not_return_to_a_shard_that_it_left_before(
    tmp_path: Path, shards: Sequence[Sequence[tuple[bytes, bytes]]], owner: int
) -> None:
    # Given a shard that was killed before it learned that q, which left it, has arrived
    for shard, rows in enumerate(shards):
        await store(tmp_path / "root", f"broker/{shard}", *rows)

    await restore(tmp_path / "root", tmp_path / "fresh", now_ms=1)

    claim = await claim_in(tmp_path / "fresh")
    assert (claim.number, claim.broker_shards) == (3, (owner,))


async def test_a_queue_that_has_arrived_is_not_restored_where_it_was(tmp_path: Path) -> None:
    # Given a queue that was deleted on the shard to which it moved
    await store(tmp_path / "root", "broker/0", *arrived(2, 1))
    await store(tmp_path / "root", "broker/1")

    await restore(tmp_path / "root", tmp_path / "fresh", now_ms=1)

    assert (await claim_in(tmp_path / "fresh")).broker_shards == ()


async def test_a_queue_is_restored_whose_first_partition_is_deleted(tmp_path: Path) -> None:
    root, fresh, clock = tmp_path / "root", tmp_path / "fresh", ManualClock()
    async with (
        running(root, shard=0, clock=clock) as first,
        running(root, shard=1, clock=clock) as second,
        running(root, shard=2, clock=clock) as third,
    ):
        await create_partitions(first, third, second)
        await delete(first)

    await restore(root, fresh, clock.now_ms())

    # The others have their places, where a deletion looks for them
    assert (await claim_in(fresh)).broker_shards == (0, 2, 1)
    async with (
        running(fresh, shard=0, clock=clock) as first,
        running(fresh, shard=1, clock=clock) as second,
        running(fresh, shard=2, clock=clock) as third,
        slatemq.connect(first.running.address) as client,
    ):
        await client.delete_queue("q")
        for rig in (first, second, third):
            assert await has_queue(rig) is False
    assert (await claim_in(fresh)).broker_shards == ()


async def test_a_creation_that_broke_off_goes_on_after_a_restore(tmp_path: Path) -> None:
    root, fresh, clock = tmp_path / "root", tmp_path / "fresh", ManualClock()
    async with (
        running(root, shard=0, clock=clock),
        running(root, shard=1, clock=clock) as second,
    ):
        assert await outcome(second, 0, [1, 0]) == "created"

    await restore(root, fresh, clock.now_ms())

    async with (
        running(fresh, shard=0, clock=clock) as first,
        running(fresh, shard=1, clock=clock),
    ):
        assert await outcome(first, 1, [1, 0]) == "created"
    assert (await claim_in(fresh)).broker_shards == (1, 0)
