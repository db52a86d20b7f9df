"""A drained ingest shard is removed for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

import slatemq
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.exits import ExitCause
from libs.serving.server import RunningService, Signals
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root, open_root
from libs.storage.objects.removed_shards import RemovedShards
from services.ingest.config import IngestConfig
from services.ingest.service import IngestProcess
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable
from slatemq.v1 import shard_pb2, shard_pb2_grpc
from slatemq.v1.ingest_pb2 import PublishRun, PushedMessage, PushRequest
from slatemq.v1.purge_pb2 import PURGE_REASON_EXPIRED, PurgeMessagesRequest
from slatemq.v1.purge_pb2_grpc import PurgeServiceStub
from tests.configs import config_of
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.rig import refusal as grpc_refusal
from tests.integration.broker.rig import running
from tests.integration.ingest.server import Ingest, Server, process
from tests.integration.unanswered_removals import unanswered
from tests.integration.waiting import WAIT_SECONDS
from tests.made_instances import make_instance


@asynccontextmanager
async def serving(folder: Path, shard: int, root: Root | None = None) -> AsyncIterator[Ingest]:
    config = config_of(IngestConfig, root=folder.as_uri(), shard=shard, purge_grace_s=0)
    server = Server(config, Telemetry(), root)
    await server.start()
    try:
        async with Ingest.at(server.address) as ingest:
            yield ingest
    finally:
        await server.stop()


@asynccontextmanager
async def client_of(ingest: Ingest, folder: Path) -> AsyncIterator[slatemq.Client]:
    topology = await TopologyDirectory(open_root(folder.as_uri()).objects).read()
    async with slatemq.connect(topology.ingests[0]) as client:
        yield client


async def start(folder: Path) -> ExitCause:
    """Runs ingest 1 to its end; returns why it ended."""
    config = config_of(IngestConfig, root=folder.as_uri(), port=0, shard=1)
    service = IngestProcess(config, Telemetry(), open_root(folder.as_uri()))
    async with asyncio.timeout(WAIT_SECONDS):
        return await RunningService(service, config, Telemetry()).run(Signals())


async def files_left(folder: Path) -> list[str]:
    objects = open_root(folder.as_uri()).objects
    listed = [await objects.list(name) for name in ("ingest/1", "shard-owners/ingest/1")]
    entries = [path for path in await objects.list("topology") if path.endswith("ingest-1.json")]
    return [path for paths in (*listed, entries) for path in paths]


async def refusal(client: slatemq.Client) -> str:
    with pytest.raises(FailedPrecondition) as refused:
        await client.remove_shard("ingest", 1)
    assert refused.value.reason == "SHARD_NOT_DRAINED"
    return refused.value.message


async def test_a_removed_shard_is_gone_with_its_files_and_its_number(tmp_path: Path) -> None:
    root = tmp_path.as_uri()
    flags = ("--port", "0", "--shard", "1")
    await make_instance(open_root(root))
    async with (
        serving(tmp_path, 0) as other,
        process(root, tmp_path / "ready", *flags) as (child, _),
        client_of(other, tmp_path) as client,
    ):
        await client.drain_shard("ingest", 1)
        await client.remove_shard("ingest", 1)
        async with asyncio.timeout(WAIT_SECONDS):
            assert await child.wait() == 0
        assert await files_left(tmp_path) == []

        async with asyncio.timeout(WAIT_SECONDS):
            while len((found := await client.shards("ingest")).shards) > 1:
                await asyncio.sleep(0.1)
        assert (found.shards[0].shard, found.removed) == (0, [1])
        assert await client.publish(b"x") >> 48 == 0

    # Then no process starts with its number
    cause = await start(tmp_path)
    assert (cause.code, "ingest shard 1 was removed" in cause.message) == (2, True)
    assert await files_left(tmp_path) == []


async def test_a_removal_that_was_cut_off_is_finished_by_the_next_start(tmp_path: Path) -> None:
    async with serving(tmp_path, 1):
        pass
    assert len(await files_left(tmp_path)) > 2
    # Given a process that was killed when the removal was recorded
    await RemovedShards(open_root(tmp_path.as_uri()).objects).add("ingest/1", now_ms=0)

    cause = await start(tmp_path)

    assert cause.code == 2
    assert await files_left(tmp_path) == []


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_removal_whose_record_has_no_answer_is_certain(
    tmp_path: Path, is_written: bool
) -> None:
    root = open_root(tmp_path.as_uri())
    async with (
        serving(tmp_path, 0) as other,
        serving(tmp_path, 1, root) as ingest,
        client_of(other, tmp_path) as client,
    ):
        await client.drain_shard("ingest", 1)
        stub = shard_pb2_grpc.ShardServiceStub(ingest.channel)
        removal = shard_pb2.RemoveShardRequest(database="ingest/1")
        with unanswered(root.objects, is_written=is_written):
            code, _, _ = await grpc_refusal(stub.RemoveShard(removal))
        assert code is grpc.StatusCode.UNAVAILABLE

        # Then it takes nothing, since the next start would delete it
        with pytest.raises(FailedPrecondition, match="cannot be cancelled any more") as refused:
            await client.drain_shard("ingest", 1, cancel=True)
        assert refused.value.reason == "SHARD_LEAVING"
        with pytest.raises(FailedPrecondition):
            await ingest.send(b"x")
        request = PushRequest(
            broker_shard=0,
            first_number=1,
            messages=[PushedMessage(payload=b"x", queue_id="q", created_at_ms=1, retention_s=1)],
        )
        _, reason, _ = await grpc_refusal(ingest.stub.Push(request))
        assert reason == "SHARD_LEAVING"

    # And the next process finishes the removal
    cause = await start(tmp_path)
    assert (cause.code, "ingest shard 1 was removed" in cause.message) == (2 * is_written, True)
    assert await files_left(tmp_path) == []
    assert await RemovedShards(root.objects).has("ingest/1")


async def test_a_shard_with_messages_is_not_removed_until_they_are(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, 0) as other,
        serving(tmp_path, 1) as ingest,
        client_of(other, tmp_path) as client,
    ):
        (sent,) = await ingest.publish(PublishRun(payloads=[b"x"], retention_s=1))
        said = "it is not being drained (`slatemq shard drain`), and it has 1 message"
        assert said in await refusal(client)
        await client.drain_shard("ingest", 1)
        assert "cannot be removed yet: it has 1 message" in await refusal(client)
        assert await ingest.payloads(sent) == [b"x"]

        received_ms = (await ingest.log())[0].received_at_ms
        request = PurgeMessagesRequest(reason=PURGE_REASON_EXPIRED, message_ids=[sent])
        async with asyncio.timeout(WAIT_SECONDS):
            while time.time() * 1000 < received_ms + 1_100:
                await asyncio.sleep(0.05)
        answer = await PurgeServiceStub(ingest.channel).PurgeMessages(request)
        assert answer.purged_count == 1

        assert (await client.shards("ingest")).shards[1].state == "drained"
        await client.remove_shard("ingest", 1)


async def test_pushes_that_wait_at_a_broker_keep_a_shard_and_later_ones_are_refused(
    tmp_path: Path,
) -> None:
    pushes = Pushes(ingest_shard=1)
    pushes.down = True
    async with (
        serving(tmp_path, 0) as other,
        serving(tmp_path, 1) as ingest,
        running(tmp_path, pushes=pushes) as broker,
        client_of(other, tmp_path) as client,
    ):
        await client.create_queue("q")
        await client.execute([slatemq.Push("q", b"x")])
        await client.drain_shard("ingest", 1)
        assert "yet: it has 1 push that waits at broker 0" in await refusal(client)

        # It is refused, and nothing has changed: what the broker sends is taken
        request = PushRequest(
            broker_shard=0,
            first_number=1,
            messages=[PushedMessage(payload=b"x", queue_id="q", created_at_ms=1, retention_s=1)],
        )
        assert (await ingest.stub.Push(request)).last_number == 1
        assert "1 message" in await refusal(client)

        # When the broker is down, it cannot be known
        broker.signals.first.set()
        await broker.ended
        stub = shard_pb2_grpc.ShardServiceStub(ingest.channel)
        with pytest.raises(Unavailable) as refused, raising_slatemq_errors():
            await stub.RemoveShard(shard_pb2.RemoveShardRequest(database="ingest/1"))
        assert "broker 0 does not say whether pushes for ingest 1 wait" in refused.value.message


async def test_only_the_database_that_is_named_is_removed(tmp_path: Path) -> None:
    async with serving(tmp_path, 0) as other, serving(tmp_path, 1) as ingest:
        async with client_of(other, tmp_path) as client:
            await client.drain_shard("ingest", 1)
        stub = shard_pb2_grpc.ShardServiceStub(ingest.channel)
        for database in ("", "ingest/0", "broker/1", "ingest-1"):
            request = shard_pb2.RemoveShardRequest(database=database)
            with pytest.raises(InvalidArgument) as refused, raising_slatemq_errors():
                await stub.RemoveShard(request)
            assert refused.value.field == "database"
        assert await files_left(tmp_path)
