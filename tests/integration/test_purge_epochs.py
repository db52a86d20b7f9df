"""A broker that was never seen before makes every ingest refuse what was decided without it."""

from pathlib import Path

import grpc
import pytest

from libs.serving.topology import Peer, TopologyDirectory
from libs.storage.roots import open_root
from slatemq.v1 import snapshot_pb2, snapshot_pb2_grpc
from tests.integration.broker.rig import running
from tests.integration.ingest_server import Ingest, serving


async def epoch(ingest: Ingest) -> int:
    stub = snapshot_pb2_grpc.SnapshotServiceStub(ingest.channel)
    taken = await stub.CreateSnapshot(snapshot_pb2.CreateSnapshotRequest(), timeout=30)
    return int(taken.snapshot.purge_epoch)


async def test_the_first_queue_of_a_shard_raises_the_epoch_of_every_ingest_and_later_ones_do_not(
    tmp_path: Path,
) -> None:
    url = tmp_path.as_uri()
    async with serving(url, shard=0) as first, serving(url, shard=1) as second:
        async with running(tmp_path) as rig:
            assert [await epoch(one) for one in (first, second)] == [0, 0]
            await rig.create("a")
            assert [await epoch(one) for one in (first, second)] == [1, 1]
            await rig.create("b")
        async with running(tmp_path) as rig:
            await rig.create("c")
            assert [await epoch(one) for one in (first, second)] == [1, 1]
        async with running(tmp_path, shard=1) as rig:
            await rig.create("d")
            assert [await epoch(one) for one in (first, second)] == [2, 2]


async def test_without_all_ingests_a_shard_gets_no_first_queue(tmp_path: Path) -> None:
    directory = TopologyDirectory(open_root(tmp_path.as_uri()).objects)
    async with serving(tmp_path.as_uri()) as ingest, running(tmp_path) as rig:
        gone = Peer("ingest", 5, "127.0.0.1:1")
        await directory.announce(gone)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.create("a")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "ingest 5 is away" in str(refused.value.details())
        await directory.withdraw(gone)
        await rig.create("a")
        assert await epoch(ingest) >= 1
