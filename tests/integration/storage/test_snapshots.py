"""SnapshotService of ingest and broker, by real servers on a data folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database import snapshots
from libs.storage.database.roots import Root, open_root
from libs.storage.errors import SnapshotNotFound
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.keys import config_range, log_range, parse_config_key, payload_range
from libs.storage.layout.own_keys import parse_routing_cursor_key, routing_cursor_range
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.metadata import decode_log_entry
from libs.storage.records.states import decode_routing_cursor
from slatemq.v1 import ingest_pb2, snapshot_pb2, snapshot_pb2_grpc
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running
from tests.integration.ingest.server import Ingest, serving
from tests.integration.router.peers import LogMemory, MemoryIngest, Running
from tests.integration.router.replay_rig import create

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def stub_of(peer: Ingest | Rig) -> snapshot_pb2_grpc.SnapshotServiceAsyncStub:
    return snapshot_pb2_grpc.SnapshotServiceStub(peer.channel)


async def take(
    stub: snapshot_pb2_grpc.SnapshotServiceAsyncStub, lifetime_ms: int = 0
) -> snapshot_pb2.Snapshot:
    request = snapshot_pb2.CreateSnapshotRequest(lifetime_ms=lifetime_ms)
    snapshot: snapshot_pb2.Snapshot = (await stub.CreateSnapshot(request)).snapshot
    return snapshot


async def rows_of(
    root: Root, snapshot: snapshot_pb2.Snapshot, span: KeyRange
) -> list[tuple[bytes, bytes]]:
    reader = await root.open_snapshot(snapshot.database, snapshot.snapshot_id)
    rows = [row async for batch in reader.scan(*span) for row in batch]
    await reader.close()
    return rows


async def test_an_ingests_snapshot_has_every_publish_answered_before_and_none_after(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path.as_uri(), shard=3) as ingest:
        before = await ingest.send(b"1", b"2") + await ingest.send(b"3")
        snapshot = await take(stub_of(ingest))
        await ingest.send(b"4")

        root = open_root(tmp_path.as_uri())
        log = await rows_of(root, snapshot, log_range(0))
        payloads = await rows_of(root, snapshot, payload_range(0, MAX_MESSAGE_ID))

    assert snapshot.database == "ingest/3"
    assert snapshot.lifetime_ms == 600_000
    assert snapshot.HasField("purge_epoch")
    assert [one.message_id for _, row in log for one in decode_log_entry(row)] == before
    assert len(payloads) == 3


async def test_it_shows_the_purge_epoch_from_before_so_that_a_later_raise_is_noticed(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path.as_uri()) as ingest:
        first = await take(stub_of(ingest))
        await ingest.stub.RaisePurgeEpoch(ingest_pb2.RaisePurgeEpochRequest())
        second = await take(stub_of(ingest))

    assert (first.purge_epoch, second.purge_epoch) == (0, 1)
    assert second.taken_at_ms >= first.taken_at_ms


async def test_publishes_are_answered_while_snapshots_are_taken(tmp_path: Path) -> None:
    async with serving(tmp_path.as_uri()) as ingest:
        stub = stub_of(ingest)
        taking = asyncio.gather(*(take(stub) for _ in range(10)))
        answered = 0
        while not taking.done():
            await ingest.send(b"x" * 1000)
            answered += 1

    assert len({snapshot.snapshot_id for snapshot in taking.result()}) == 10
    assert answered > 1


async def test_a_brokers_snapshot_has_its_queues_and_its_routing_cursors(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.create("q")
        await rig.assign([1, 2, 3])
        snapshot = await take(stub_of(rig))
        await rig.create("later")
        await rig.assign([4])

        root = open_root(tmp_path.as_uri())
        configs = await rows_of(root, snapshot, config_range())
        cursors = await rows_of(root, snapshot, routing_cursor_range())

    assert snapshot.database == "broker/0"
    assert not snapshot.HasField("purge_epoch")
    assert [parse_config_key(key) for key, _ in configs] == ["q"]
    items = [
        (parse_routing_cursor_key(key), decode_routing_cursor(value)) for key, value in cursors
    ]
    assert items == [(0, 1)]


async def test_claims_and_acks_are_answered_while_a_broker_takes_snapshots(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.create("q")
        await rig.assign(range(1, 1001))
        stub = stub_of(rig)
        taking = asyncio.gather(*(take(stub) for _ in range(10)))
        acked = 0
        while not taking.done():
            claimed = await rig.claim("q", max_messages=1)
            acked += (await rig.ack(claimed[0].lease_token)) == [0]

    assert acked > 1


class HeldIngest(MemoryIngest):
    """Answers where a log begins only when it is let."""

    def __init__(self, memory: LogMemory) -> None:
        super().__init__(memory)
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def FindLogPosition(  # noqa: N802
        self, request: ingest_pb2.FindLogPositionRequest, context: Any
    ) -> ingest_pb2.FindLogPositionResponse:
        self.asked.set()
        await self.let.wait()
        return await super().FindLogPosition(request, context)


async def test_a_brokers_snapshot_waits_for_replays_that_have_raised_the_purge_epoch() -> None:
    disk = Disk()
    root = memory_root(disk)
    held = HeldIngest(LogMemory(0))
    async with running(root, disk=disk) as rig:
        ingest = Running(TopologyDirectory(root.objects), held)
        await ingest.start()
        creating = asyncio.create_task(create(rig, "late"))
        await held.asked.wait()

        taking = asyncio.create_task(take(stub_of(rig)))
        await rig.create("other")  # creations that begin later are not waited for
        assert not taking.done()
        held.let.set()
        snapshot = await taking

        await creating
        configs = await rows_of(root, snapshot, config_range())
        await ingest.stop()
    assert "late" in [parse_config_key(key) for key, _ in configs]


async def test_a_snapshot_is_renewed_and_released_by_its_id(tmp_path: Path) -> None:
    async with serving(tmp_path.as_uri()) as ingest:
        stub = stub_of(ingest)
        await take(stub, lifetime_ms=10_000)
        snapshot = await take(stub, lifetime_ms=600_000)
        name = snapshot.snapshot_id

        await stub.RenewSnapshot(snapshot_pb2.RenewSnapshotRequest(snapshot_id=name))
        await stub.ReleaseSnapshot(snapshot_pb2.ReleaseSnapshotRequest(snapshot_id=name))
        await stub.ReleaseSnapshot(snapshot_pb2.ReleaseSnapshotRequest(snapshot_id=name))

        gone = stub.RenewSnapshot(snapshot_pb2.RenewSnapshotRequest(snapshot_id=name))
        assert (await refusal(gone))[0] is grpc.StatusCode.NOT_FOUND
        with pytest.raises(SnapshotNotFound):
            await rows_of(open_root(tmp_path.as_uri()), snapshot, log_range(0))


@pytest.mark.parametrize("lifetime_ms", [-1, 1, 9_999, 86_400_001, 1 << 62])
async def test_a_lifetime_out_of_bounds_is_refused(lifetime_ms: int) -> None:
    async with serving() as ingest:
        stub = stub_of(ingest)
        created = stub.CreateSnapshot(snapshot_pb2.CreateSnapshotRequest(lifetime_ms=lifetime_ms))
        renewed = stub.RenewSnapshot(
            snapshot_pb2.RenewSnapshotRequest(snapshot_id="x", lifetime_ms=lifetime_ms)
        )
        released = stub.ReleaseSnapshot(snapshot_pb2.ReleaseSnapshotRequest())

        for call in (created, renewed):
            assert await refusal(call) == (INVALID, "OUT_OF_RANGE", "lifetime_ms")
        assert await refusal(released) == (INVALID, "REQUIRED", "snapshot_id")


async def test_too_many_snapshots_are_refused_with_the_time_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOTS_MAX", 4)  # one takes up to half a second
    async with serving() as ingest:
        stub = stub_of(ingest)
        for _ in range(4):
            await take(stub)

        refused = await refusal(stub.CreateSnapshot(snapshot_pb2.CreateSnapshotRequest()))

        assert refused[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SNAPSHOTS")
