"""Snapshots of a whole instance: all shards or none, alive while they are read, then released."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database import snapshots
from libs.storage.database.roots import Root, open_root
from libs.storage.errors import SnapshotNotFound
from services.janitor.snapshots import SnapshotName, snapshots_of_all
from slatemq.errors import Unavailable
from slatemq.v1 import snapshot_pb2
from tests.integration.broker.rig import close_channel, running
from tests.integration.ingest.server import Ingest, serving
from tests.integration.janitor.spark.tables_read import read
from tests.integration.storage.test_snapshots import stub_of
from tests.integration.waiting import WAIT_SECONDS


@asynccontextmanager
async def instance(folder: Path) -> AsyncIterator[tuple[Ingest, TopologyDirectory, Channels]]:
    """An ingest and a broker, and how to find them."""
    directory = TopologyDirectory(open_root(folder.as_uri()).objects)
    channels = Channels(directory)
    async with serving(folder.as_uri()) as ingest, running(folder):
        yield ingest, directory, channels
        await channels.close()
        await directory.close()


async def alive(root: Root, names: Sequence[SnapshotName]) -> list[bool]:
    found = []
    for name in names:
        try:
            await (await root.open_snapshot(name.database, name.snapshot_id)).close()
            found.append(True)
        except SnapshotNotFound:
            found.append(False)
    return found


async def test_every_shard_is_taken_ingests_first_and_all_are_released_at_the_end(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path) as (ingest, directory, channels):
        await ingest.send(b"x")
        root = open_root(tmp_path.as_uri())

        async with snapshots_of_all(directory, channels) as taken:
            first, second = taken.all
            there = await alive(root, taken.names)
        after = await alive(root, taken.names)

    assert (first.name.database, second.name.database) == ("ingest/0", "broker/0")
    assert (first.purge_epoch, second.purge_epoch) == (0, None)
    assert there == [True, True]
    assert after == [False, False]
    assert not taken.lost.done()


class Arriving(Channels):
    """Another broker comes when the first owner is called."""

    def __init__(self, directory: TopologyDirectory) -> None:
        super().__init__(directory)
        self.arrived = False

    async def to(self, service: str, shard: int) -> grpc.aio.Channel:
        if not self.arrived:
            self.arrived = True
            await self._directory.announce(Peer("broker", 7, "127.0.0.1:1"))
        return await super().to(service, shard)


async def test_a_shard_that_comes_meanwhile_makes_them_worthless(tmp_path: Path) -> None:
    async with instance(tmp_path) as (_, directory, __):
        channels = Arriving(directory)
        with pytest.raises(Unavailable, match="a shard has come"):
            async with snapshots_of_all(directory, channels):
                raise AssertionError("they are not given")
        await channels.close()


async def test_they_are_released_when_their_reader_fails(tmp_path: Path) -> None:
    async with instance(tmp_path) as (_, directory, channels):
        root = open_root(tmp_path.as_uri())

        with pytest.raises(ZeroDivisionError):
            async with snapshots_of_all(directory, channels) as taken:
                raise ZeroDivisionError

        assert await alive(root, taken.names) == [False, False]


async def test_while_a_shard_is_down_none_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOTS_MAX", 4)  # one takes up to half a second
    async with instance(tmp_path) as (ingest, directory, channels):
        await directory.announce(Peer("broker", 7, "127.0.0.1:1"))

        with pytest.raises(Unavailable, match="broker 7 is down: "):
            async with snapshots_of_all(directory, channels):
                pytest.fail("a shard is missing")

        # What had been taken is released: there is room for all again.
        for _ in range(4):
            await stub_of(ingest).CreateSnapshot(snapshot_pb2.CreateSnapshotRequest())


async def test_a_root_without_services_is_reported(tmp_path: Path) -> None:
    directory = TopologyDirectory(open_root(tmp_path.as_uri()).objects)

    with pytest.raises(Unavailable, match="no ingest or broker"):
        async with snapshots_of_all(directory, Channels(directory)):
            pytest.fail("there is nothing")


async def test_one_that_is_lost_while_it_is_read_is_reported_at_the_next_renewal(
    tmp_path: Path,
) -> None:
    passing: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(seconds: float) -> None:
        assert seconds == 100
        await passing.get()

    async with (
        instance(tmp_path) as (ingest, directory, channels),
        snapshots_of_all(directory, channels, 300_000, sleep) as taken,
    ):
        passing.put_nowait(None)
        passing.put_nowait(None)
        while not passing.empty():
            await asyncio.sleep(0)
        name = taken.names[0].snapshot_id
        await stub_of(ingest).ReleaseSnapshot(snapshot_pb2.ReleaseSnapshotRequest(snapshot_id=name))
        passing.put_nowait(None)
        lost = await taken.lost

    assert name in lost
    assert "ingest/0" in lost


async def test_they_are_renewed_again_where_a_channel_was_closed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing: asyncio.Queue[None] = asyncio.Queue()
    asked, again = asyncio.Event(), asyncio.Event()

    async def sleep(_: float) -> None:
        await passing.get()

    async def hang(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    async def note(*_: object) -> None:
        again.set()

    async with (
        instance(tmp_path) as (_, directory, channels),
        snapshots_of_all(directory, channels, sleep=sleep, services=("ingest",)),
    ):
        monkeypatch.setattr(snapshots.Snapshots, "renew", hang)
        passing.put_nowait(None)
        await asked.wait()
        monkeypatch.setattr(snapshots.Snapshots, "renew", note)
        await close_channel(channels, "ingest", 0)
        passing.put_nowait(None)
        async with asyncio.timeout(WAIT_SECONDS):
            await again.wait()


async def test_what_is_published_after_they_were_taken_is_in_none_of_their_tables(
    tmp_path: Path,
) -> None:
    async with instance(tmp_path) as (ingest, directory, channels):
        before = await ingest.send(b"1", b"2")
        async with snapshots_of_all(directory, channels) as taken:
            await ingest.send(b"3")
            options = {
                "root": tmp_path.as_uri(),
                "database": ",".join(name.database for name in taken.names),
                "snapshot": ",".join(name.snapshot_id for name in taken.names),
            }
            found = await read(options, "messages")

    assert [row["message_id"] for row in found.rows] == before
