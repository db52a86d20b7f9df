"""A broker shard that was never seen before: ingests refuse what was decided without it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import open_root
from libs.storage.layout.ids import message_id
from services.broker.delivery import introductions
from services.broker.delivery.message_cache import Ingests
from slatemq.v1 import assignment_pb2, snapshot_pb2, snapshot_pb2_grpc
from tests.integration.broker.rig import Ingest as StandIn
from tests.integration.broker.rig import Rig, running
from tests.integration.ingest.server import Ingest, serving

REAL: Any = Ingests
"""In place of the rig's ingest."""


async def epoch(ingest: Ingest) -> int:
    stub = snapshot_pb2_grpc.SnapshotServiceStub(ingest.channel)
    taken = await stub.CreateSnapshot(snapshot_pb2.CreateSnapshotRequest(), timeout=30)
    return int(taken.snapshot.purge_epoch)


async def assigned(
    rig: Rig, *logs: int, shift: int = 0, queue_id: str = "a"
) -> list[assignment_pb2.LogRangeResult]:
    """Routes a message of each log to a queue, as its first one, or this many later."""
    ranges = [
        assignment_pb2.LogRange(
            ingest_shard=log,
            previous_sequence=message_id(log, shift) if shift else 0,
            last_sequence=message_id(log, shift + 1),
            assignments=[
                assignment_pb2.QueueAssignment(
                    queue_id=queue_id, message_ids=[message_id(log, shift + 1)]
                )
            ],
            config_revision=1,
        )
        for log in logs
    ]
    return list((await rig.assignments.Assign(assignment_pb2.AssignRequest(ranges=ranges))).results)


async def test_an_ingest_raises_its_epoch_before_a_broker_shard_gets_its_first_message_and_once(
    tmp_path: Path,
) -> None:
    url = tmp_path.as_uri()
    async with serving(url, shard=0) as first, serving(url, shard=1) as second:

        async def epochs() -> list[int]:
            return [await epoch(one) for one in (first, second)]

        async with running(tmp_path, ingest=REAL) as rig:
            await rig.create("a")
            assert await epochs() == [0, 0]
            assert [one.applied for one in await assigned(rig, 0)] == [True]
            assert await epochs() == [1, 0]
            assert [one.applied for one in await assigned(rig, 0, shift=1)] == [True]
            assert [one.applied for one in await assigned(rig, 1)] == [True]
            assert await epochs() == [1, 1]
        async with running(tmp_path, ingest=REAL) as rig:
            assert [one.applied for one in await assigned(rig, 0, shift=2)] == [True]
            assert await epochs() == [1, 1]
        async with running(tmp_path, ingest=REAL, shard=1) as rig:
            await rig.create("b")
            assert [one.applied for one in await assigned(rig, 0, queue_id="b")] == [True]
            assert await epochs() == [2, 1]


async def test_an_ingest_that_is_down_holds_up_no_first_queue_and_no_log_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path.as_uri()
    directory = TopologyDirectory(open_root(url).objects)
    # Given a new broker shard, and an ingest that announced itself and is down
    async with serving(url, shard=5):
        pass
    async with serving(url), running(tmp_path, ingest=REAL) as rig:
        await directory.announce(Peer("ingest", 5, "127.0.0.1:1"))
        # Then it gets its first queue, and messages of the others
        await rig.create("a")
        other, down = await assigned(rig, 0, 5)
        assert (other.applied, other.retry_later) == (True, False)
        assert (down.applied, down.retry_later, down.cursor) == (False, True, 0)
        assert await rig.counts("a") == {"available": 1}

        # And those of this one when it is back, sent again
        async with serving(url, shard=5) as back, asyncio.timeout(60):
            while not (await assigned(rig, 5))[0].applied:
                await asyncio.sleep(0.01)
            assert await epoch(back) >= 1
        assert await rig.counts("a") == {"available": 2}


class Hanging(StandIn):
    """Ingest 5 answers no introduction."""

    async def raise_purge_epoch(self, shard: int) -> None:
        self.raised.append(shard)
        if shard == 5:
            await asyncio.Event().wait()


@pytest.mark.parametrize("is_known", [False, True])
async def test_an_ingest_that_hangs_does_not_hold_up_the_other_logs_of_a_call(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    monkeypatch.setattr(introductions, "WAIT_S", 1_000.0)
    async with running(ingest=Hanging()) as rig:
        await rig.create("a")
        if is_known:
            (other,) = await assigned(rig, 0)
            assert other.applied
        async with asyncio.timeout(60):
            for shift in range(is_known, 3):
                other, hanging = await assigned(rig, 0, 5, shift=shift)
                assert (other.applied, hanging.retry_later) == (True, True)


async def test_a_log_whose_ingest_is_being_asked_is_to_be_sent_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ingest = Hanging()
    async with running(ingest=ingest) as rig:
        await rig.create("a")
        monkeypatch.setattr(introductions, "WAIT_S", 0.01)
        (first,) = await assigned(rig, 5)
        monkeypatch.setattr(introductions, "WAIT_S", 1_000.0)
        async with asyncio.timeout(60):
            (second,) = await assigned(rig, 5)
        assert (first.retry_later, second.retry_later) == (True, True)
        assert ingest.raised == [5]
