"""A broker shard is drained, and removed for ever once it has nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

import slatemq
from libs.serving.http.server import Exposition
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.exits import ExitCause
from libs.serving.process.removal import measure_draining
from libs.serving.server import RunningService, Signals
from libs.serving.telemetry import Telemetry, configure
from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import UNCLAIMED, QueueNames
from libs.storage.objects.removed_shards import RemovedShards
from services.broker.config import BrokerConfig
from services.broker.service import BrokerService
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound
from slatemq.v1 import shard_pb2, shard_pb2_grpc
from tests.configs import config_of
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.rig import Rig, introduce, refusal, running
from tests.integration.unanswered_removals import unanswered


def draining_of(rig: Rig) -> float:
    """The metric of the broker's drain."""
    exposition = Exposition()
    telemetry = configure("broker", "broker-1", readers=[exposition.reader])
    measure_draining(telemetry.meter, rig.broker.placement.drain)
    (value,) = re.findall(rb"^slatemq_shard_draining (\S+)", exposition.render(()), re.M)
    return float(value)


@asynccontextmanager
async def two_brokers(
    folder: Path, pushes: Pushes | None = None
) -> AsyncIterator[tuple[Rig, Rig, slatemq.Client]]:
    async with (
        running(folder, shard=0) as first,
        running(folder, shard=1, pushes=pushes) as second,
        slatemq.connect(first.running.address) as client,
    ):
        await introduce(first)
        yield first, second, client


async def test_a_draining_shard_gets_no_new_queues_over_restarts_too(tmp_path: Path) -> None:
    async with running(tmp_path, shard=1) as rig, slatemq.connect(rig.running.address) as client:
        await client.create_queue("kept")
        drained = await client.drain_shard("broker", 1)
        assert (drained.state, drained.remaining) == ("draining", ("1 queue",))
        assert draining_of(rig) == 1

    async with two_brokers(tmp_path) as (_, second, client):
        made = [await client.create_queue(f"q-{number}") for number in range(10)]
        assert {queue.broker_shard for queue in made} == {0}
        with pytest.raises(FailedPrecondition) as refused:
            await client.create_queue("here", shard=1)
        assert refused.value.reason == "SHARD_DRAINING"

        # What it has is served as before
        await second.assign([1], "kept")
        (message,) = await client.claim("kept")
        await message.ack()

        # When the drain is cancelled
        assert (await client.drain_shard("broker", 1, cancel=True)).state == "serving"
        assert draining_of(second) == 0
        assert (await client.create_queue("here", shard=1)).broker_shard == 1


async def test_a_shard_that_has_something_is_not_removed(tmp_path: Path) -> None:
    pushes = Pushes()
    pushes.down = True
    async with two_brokers(tmp_path, pushes) as (_, _, client):
        await client.create_queue("q", shard=1)
        await client.execute([slatemq.Push("q", b"x")])

        async def problem() -> str:
            with pytest.raises(FailedPrecondition) as refused:
                await client.remove_shard("broker", 1)
            assert refused.value.reason == "SHARD_NOT_DRAINED"
            return refused.value.message

        left = "1 queue, 1 push that waits for an ingest"
        assert f"not being drained (`slatemq shard drain`), and it has {left}" in await problem()
        await client.drain_shard("broker", 1)
        assert f"yet: it has {left}" in await problem()
        await client.delete_queue("q")
        assert "yet: it has 1 push that waits for an ingest" in await problem()
        assert "1 request ID of a command" in await problem()
        with pytest.raises(NotFound):
            await client.remove_shard("broker", 7)


async def test_a_removal_that_names_another_shard_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, shard=1) as rig, slatemq.connect(rig.running.address) as client:
        await client.drain_shard("broker", 1)
        stub = shard_pb2_grpc.ShardServiceStub(rig.channel)
        for database in ("", "broker/0", "broker-1"):
            request = shard_pb2.RemoveShardRequest(database=database)
            _, reason, field = await refusal(stub.RemoveShard(request))
            assert (reason, field) == ("INVALID_FIELD", "database")
        assert await has_files(tmp_path)


async def test_shards_of_another_kind_of_process_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, shard=1) as rig, slatemq.connect(rig.running.address) as client:
        for call in (
            client.shards("router"),  # type: ignore[arg-type]
            client.drain_shard("router", 1),  # type: ignore[arg-type]
            client.remove_shard("", 1),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidArgument, match="must be ingest or broker") as refused:
                await call
            assert refused.value.field == "service"
        with pytest.raises(NotFound):
            await client.drain_shard("ingest", 1)
        ((shard,), _) = await client.shards("broker")
        assert (shard.service, shard.shard, shard.queues_count) == ("broker", 1, 0)


async def test_a_removed_shard_is_gone_with_its_files_and_its_number(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    async with two_brokers(tmp_path) as (_, second, client):
        await client.drain_shard("broker", 1)
        assert [one.state for one in (await client.shards("broker")).shards] == [
            "serving",
            "drained",
        ]

        await client.remove_shard("broker", 1)

        async with asyncio.timeout(60):
            while len((found := await client.shards("broker")).shards) > 1:
                await asyncio.sleep(0.2)
            while await has_files(tmp_path):
                await asyncio.sleep(0.05)
        assert ([one.shard for one in found.shards], found.removed) == ([0], [1])
        assert list((await TopologyDirectory(root.objects).read()).brokers) == [0]
        assert (await client.create_queue("q")).broker_shard == 0
    assert second.exit is not None
    assert (second.exit.code, second.exit.message) == (0, "broker shard 1 was removed")

    # Then no process starts with its number
    cause = await start(tmp_path, shard=1)
    assert cause.code == 2
    assert "broker shard 1 was removed" in cause.message
    assert not await has_files(tmp_path)


async def test_a_removal_that_was_cut_off_is_finished_by_the_next_start(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    async with running(tmp_path, shard=1):
        pass
    assert await has_files(tmp_path)
    # Given a process that was killed when the removal was recorded
    await RemovedShards(root.objects).add("broker/1", now_ms=0)

    cause = await start(tmp_path, shard=1)

    assert cause.code == 2
    assert not await has_files(tmp_path)


async def test_a_claim_that_a_removed_shard_has_left_holds_up_no_name(tmp_path: Path) -> None:
    names = QueueNames(open_root(tmp_path.as_uri()).objects)
    async with (
        running(tmp_path, shard=0) as first,
        running(tmp_path, shard=1) as removed,
        running(tmp_path, shard=2) as other,
        slatemq.connect(first.running.address) as client,
    ):
        # Given a process that was killed once the deletion of a queue was durable
        assert await names.claim("q", (1,), UNCLAIMED)
        await client.drain_shard("broker", 1)
        await client.remove_shard("broker", 1)
        async with asyncio.timeout(60):
            await removed.ended
        await introduce(first, other)

        # Then there is no such queue, and each shard may have one
        with pytest.raises(NotFound):
            await client.get_queue("q")
        with pytest.raises(NotFound):
            await client.execute([slatemq.Push("q", b"x")])
        assert (await client.create_queue("q", shard=2)).broker_shard == 2


REMOVAL = shard_pb2.RemoveShardRequest(database="broker/1")


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_removal_whose_record_has_no_answer_is_repeated_not_cancelled(
    tmp_path: Path, is_written: bool
) -> None:
    async with running(tmp_path, shard=1) as rig, slatemq.connect(rig.running.address) as client:
        await client.drain_shard("broker", 1)
        stub = shard_pb2_grpc.ShardServiceStub(rig.channel)
        with unanswered(rig.root.objects, is_written=is_written):
            code, _, _ = await refusal(stub.RemoveShard(REMOVAL))
        assert code is grpc.StatusCode.UNAVAILABLE

        # Then it takes no queues, since the next start would delete them
        with pytest.raises(FailedPrecondition, match="cannot be cancelled any more") as refused:
            await client.drain_shard("broker", 1, cancel=True)
        assert refused.value.reason == "SHARD_LEAVING"
        with pytest.raises(FailedPrecondition):
            await client.create_queue("q", shard=1)

        await client.remove_shard("broker", 1)
        async with asyncio.timeout(60):
            cause = await rig.ended
    assert (cause.code, cause.message) == (0, "broker shard 1 was removed")
    assert not await has_files(tmp_path)


async def test_a_removal_whose_record_was_not_written_is_finished_by_the_next_start(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, shard=1) as rig, slatemq.connect(rig.running.address) as client:
        await client.drain_shard("broker", 1)
        with unanswered(rig.root.objects, is_written=False):
            await refusal(shard_pb2_grpc.ShardServiceStub(rig.channel).RemoveShard(REMOVAL))

    cause = await start(tmp_path, shard=1)

    assert (cause.code, cause.message) == (0, "broker shard 1 was removed")
    assert not await has_files(tmp_path)
    assert await RemovedShards(open_root(tmp_path.as_uri()).objects).has("broker/1")


async def test_a_process_that_is_replaced_while_it_removes_its_shard_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = open_root(tmp_path.as_uri())
    async with running(tmp_path, shard=1) as old:
        async with slatemq.connect(old.running.address) as client:
            await client.drain_shard("broker", 1)
        # Given a process that stands still once it has found its shard empty
        drain, has_looked, goes_on = old.broker.placement.drain, asyncio.Event(), asyncio.Event()
        remaining = drain.remaining

        async def slowly() -> Sequence[str]:
            found = await remaining()
            has_looked.set()
            await goes_on.wait()
            return found

        monkeypatch.setattr(drain, "remaining", slowly)
        call = shard_pb2_grpc.ShardServiceStub(old.channel).RemoveShard(REMOVAL)
        removing = asyncio.create_task(refusal(call))
        await has_looked.wait()

        # And another one that takes its shard, and ends the drain
        async with running(tmp_path, shard=1) as new:
            async with slatemq.connect(new.running.address) as client:
                await client.drain_shard("broker", 1, cancel=True)
                await client.create_queue("kept", shard=1)
            goes_on.set()
            await removing

    assert not await RemovedShards(root.objects).has("broker/1")
    async with running(tmp_path, shard=1) as rig:
        assert "kept" in rig.owner.shard.queues


async def has_files(folder: Path) -> bool:
    objects = open_root(folder.as_uri()).objects
    listed = [await objects.list(name) for name in ("broker/1", "shard-owners/broker/1")]
    entries = [path for path in await objects.list("topology") if path.endswith("broker-1.json")]
    return any(listed) or bool(entries)


async def start(folder: Path, shard: int) -> ExitCause:
    """Runs a broker of its own to its end; returns why it ended."""
    config = config_of(BrokerConfig, root=folder.as_uri(), port=0, shard=shard)
    service = BrokerService(config, Telemetry(), open_root(folder.as_uri()))
    async with asyncio.timeout(60):
        return await RunningService(service, config, Telemetry()).run(Signals())
