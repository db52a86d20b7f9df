"""Large payloads of dead letters that are redriven into queues of other shards."""

from __future__ import annotations

import pytest

from libs.storage.database.blobs import UPLOAD_AGE_MS_MAX, Blobs
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES
from services.broker.dead_letters import redrive_runner
from slatemq.v1 import entry_pb2
from tests.integration.broker.entry_calls import (
    FAILED,
    ended,
    fail,
    ids,
    redrive,
    redriven,
    start,
)
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.rig import Disk, memory_root, running
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock


async def test_an_upload_that_is_too_old_when_it_would_be_pushed_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a large letter, and a store whose first upload takes over an hour
    monkeypatch.setattr(redrive_runner, "RETRY_S", 0.01)
    disk, pushes, clock = Disk(), Pushes(), ManualClock()
    root = memory_root(disk)
    async with (
        running(root, disk=disk, shard=1) as other,
        running(root, clock, disk=disk, pushes=pushes) as rig,
    ):
        await other.create("far")
        await rig.create(max_attempts=1)
        await fail(rig, [1])
        rig.ingest.sizes[1] = 200_000
        uploaded: list[str] = []
        put = Blobs.put

        async def slow(blobs: Blobs, payload: bytes) -> str:
            uploaded.append(await put(blobs, payload))
            if len(uploaded) == 1:
                clock.advance(UPLOAD_AGE_MS_MAX + 1)
            return uploaded[-1]

        monkeypatch.setattr(Blobs, "put", slow)

        # When it is redriven
        result = await redriven(rig, target_queue_id="far")

        # Then the old blob, which no one refers to and may be collected, is not what is pushed
        assert (result.state, result.redriven_count) == (entry_pb2.Redrive.STATE_DONE, 1)
        assert await ids(rig, FAILED) == []
        await eventually(pushes.payloads)
        [pushed] = pushes.stored[0]
        assert len(uploaded) == 2
        assert pushed.payload_uri == uploaded[1]


async def test_a_dead_letter_that_is_too_large_to_be_pushed_stays_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    pushes.limit = 100_000
    async with (
        running(root, disk=disk, shard=1) as other,
        running(root, disk=disk, pushes=pushes) as rig,
    ):
        await other.create("far")
        await rig.create(max_attempts=1)
        await fail(rig, [1, 2, 3])
        rig.ingest.sizes[2] = 200_000

        result = await redriven(rig, target_queue_id="far")

        assert (result.state, result.examined_count, result.redriven_count) == (
            entry_pb2.Redrive.STATE_DONE,
            3,
            2,
        )
        assert await ids(rig, FAILED) == [2]
        assert "message 2 stays where it failed: it has 200000 bytes" in caplog.text
        await eventually(lambda: pushes.payloads() == [b"%010d" % n for n in (1, 3)])


async def test_contents_count_in_the_budget_of_deliveries_until_they_are_pushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given more dead letters than may be pushed at once, of which one is large
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    settings = {"delivery_bytes_max": 1 << 20}
    async with (
        running(root, disk=disk, shard=1) as other,
        running(root, disk=disk, pushes=pushes, settings=settings) as rig,
    ):
        await other.create("far")
        await rig.create(max_attempts=1)
        await fail(rig, [1, 2, 3, 4, 5])
        rig.ingest.sizes[1] = 100_000
        budget, held, put = rig.service._budget, list[int](), Blobs.put

        async def counted(blobs: Blobs, payload: bytes) -> str:
            held.append(budget.used_bytes)
            return await put(blobs, payload)

        monkeypatch.setattr(Blobs, "put", counted)
        rig.ingest.reads.clear()

        # When they are redriven
        result = await redriven(rig, target_queue_id="far")

        # Then two are moved at a time, as a quarter of the budget has room for, which they hold
        assert (result.state, result.redriven_count) == (entry_pb2.Redrive.STATE_DONE, 5)
        assert rig.ingest.reads == [[1, 2], [3, 4], [5]]
        assert held == [1 << 18]
        assert budget.used_bytes == 0
        assert await ids(rig, FAILED) == []


@pytest.mark.parametrize(
    ("settings", "size", "moved"),
    [({"outbox_rows_max": 12}, 200_000, 9), ({"outbox_bytes_max": 1 << 20}, 65_000, 15)],
    ids=["rows", "bytes"],
)
async def test_what_the_outbox_has_room_for_goes_and_for_the_rest_nothing_is_uploaded(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, int],
    size: int,
    moved: int,
) -> None:
    # Given three pushes that wait for an ingest which is down, and more dead letters than fit
    monkeypatch.setattr(redrive_runner, "RETRY_S", 0.01)
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    pushes.down = True
    uploads: list[int] = []
    put = Blobs.put

    async def counted(blobs: Blobs, payload: bytes) -> str:
        uploads.append(len(payload))
        return await put(blobs, payload)

    monkeypatch.setattr(Blobs, "put", counted)
    async with (
        running(root, disk=disk, shard=1) as other,
        running(root, disk=disk, pushes=pushes, settings=settings) as rig,
    ):
        await other.create("far")
        await rig.create(max_attempts=1)
        await fail(rig, [1, 2, 3])
        await redriven(rig, target_queue_id="far")
        await fail(rig, range(11, 31))
        for number in range(11, 31):
            rig.ingest.sizes[number] = size

        # When they are redriven
        one = await start(rig, target_queue_id="far")
        await eventually(lambda: caplog.text.count("waits: the outbox is full") >= 3)

        # Then all that fit have gone, and of the others nothing is uploaded, however often it tries
        assert (await redrive(rig, one.redrive_id)).redriven_count == moved
        assert len(await ids(rig, FAILED)) == 20 - moved
        is_large = size > INLINE_PAYLOAD_MAX_BYTES
        assert len(uploads) == (moved if is_large else 0)
        pushes.down = False
        result = await ended(rig, one.redrive_id)
        assert (result.state, result.redriven_count) == (entry_pb2.Redrive.STATE_DONE, 20)
        await eventually(lambda: len(pushes.stored.get(0, ())) == 23)
        assert len(uploads) == (20 if is_large else 0)
