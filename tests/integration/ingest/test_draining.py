"""An ingest shard is drained: it takes no publishes, and serves what it has."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import slatemq
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from libs.storage.database.slate import Database
from libs.storage.layout.ids import message_id, shard_of
from libs.storage.records.metadata import MessageMetadata, decode_log_entry
from services.broker.outbox.targets import IngestPushes
from services.ingest import draining
from services.ingest.batches import ENTRY_MESSAGES_MAX
from services.ingest.config import IngestConfig
from services.ingest.read import entries
from slatemq import OutgoingMessage
from slatemq._publish import sending
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.v1 import shard_pb2, shard_pb2_grpc
from slatemq.v1.ingest_pb2 import PublishRun, PushedMessage, PushRequest
from tests.configs import config_of
from tests.integration.ingest.server import Ingest, Server, message


@asynccontextmanager
async def ingest(folder: Path, shard: int) -> AsyncIterator[Server]:
    server = Server(config_of(IngestConfig, root=folder.as_uri(), shard=shard), Telemetry())
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def two_ingests(folder: Path) -> AsyncIterator[tuple[Ingest, Ingest, slatemq.Client]]:
    async with (
        ingest(folder, 0) as first,
        ingest(folder, 1) as second,
        Ingest.at(first.address) as zero,
        Ingest.at(second.address) as one,
        slatemq.connect(first.address) as client,
    ):
        await client.publish_batch([OutgoingMessage(b"so that the client knows both")], shard=0)
        yield zero, one, client


async def push(ingest: Ingest, number: int) -> int:
    request = PushRequest(
        broker_shard=7,
        first_number=number,
        messages=[PushedMessage(payload=b"x", queue_id="q", created_at_ms=1)],
    )
    with raising_slatemq_errors():
        return int((await ingest.stub.Push(request, timeout=30)).last_number)


async def test_what_is_published_after_the_drain_is_stored_by_others_without_an_error(
    tmp_path: Path,
) -> None:
    async with two_ingests(tmp_path) as (zero, one, client):
        found: list[int] = []

        async def publish_on(many: int) -> None:
            for _ in range(many):
                found.append(await client.publish(b"x"))
                found.extend(await client.publish_batch([OutgoingMessage(b"y")]))

        before = [asyncio.create_task(publish_on(20)) for _ in range(8)]
        await client.drain_shard("ingest", 1)
        last = (await one.status()).durable_sequence
        await asyncio.gather(*before, *(publish_on(5) for _ in range(8)))

        assert (await one.status()).durable_sequence == last
        stored = [sent.message_id for log in (zero, one) for sent in await log.log()]
        assert len(found) == len(set(found)) == 2 * 8 * 25
        assert set(found) <= set(stored)
        assert len(stored) == len(found) + 1  # nothing twice


async def test_a_drain_outlives_its_process_and_can_be_cancelled(tmp_path: Path) -> None:
    async with two_ingests(tmp_path) as (_, _, client):
        assert (await client.drain_shard("ingest", 1)).state == "drained"

    async with two_ingests(tmp_path) as (_, one, client):
        states = [shard.state for shard in (await client.shards("ingest")).shards]
        assert states == ["serving", "drained"]
        with pytest.raises(FailedPrecondition) as refused:
            await one.send(b"x")
        assert refused.value.reason == "SHARD_DRAINING"

        assert (await client.drain_shard("ingest", 1, cancel=True)).state == "serving"
        (stored,) = await one.send(b"x")
        assert shard_of(stored) == 1


async def test_an_ingest_has_none_of_the_counts_of_a_broker(tmp_path: Path) -> None:
    async with two_ingests(tmp_path) as (_, one, client):
        (_, shard), removed = await client.shards("ingest")
        assert (shard.service, shard.shard, removed) == ("ingest", 1, [])
        assert shard.database_bytes > 0
        assert (shard.queues_count, shard.messages_count, shard.load) == (None, None, None)
        stub = shard_pb2_grpc.ShardServiceStub(one.channel)
        wire = (await stub.GetShard(shard_pb2.GetShardRequest())).shard
        assert (wire.service, wire.shard) == ("ingest", 1)
        assert not wire.HasField("queues_count")


async def test_the_only_ingest_that_takes_publishes_is_not_drained(tmp_path: Path) -> None:
    async with two_ingests(tmp_path) as (_, _, client):
        await client.drain_shard("ingest", 0)
        with pytest.raises(FailedPrecondition) as refused:
            await client.drain_shard("ingest", 1)
        assert refused.value.reason == "LAST_INGEST"
        assert "start another one first" in refused.value.message
        assert shard_of(await client.publish(b"x")) == 1


async def test_drains_of_all_ingests_at_the_same_time_leave_one_that_takes_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, both = draining.Drain._check_may_drain, asyncio.Barrier(2)

    async def check_together(drain: draining.Drain) -> None:
        await check(drain)
        await both.wait()

    monkeypatch.setattr(draining.Drain, "_check_may_drain", check_together)
    async with two_ingests(tmp_path) as (_, _, client):
        # When each of two is drained, and finds the other one open
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(
                *(client.drain_shard("ingest", shard) for shard in (0, 1)), return_exceptions=True
            )

        # Then one is refused at least, and takes publishes
        refused = [one for one in outcomes if isinstance(one, BaseException)]
        assert refused
        for error in refused:
            assert isinstance(error, FailedPrecondition)
            assert error.reason == "LAST_INGEST"
        serving = [
            one.shard for one in (await client.shards("ingest")).shards if one.state == "serving"
        ]
        assert len(serving) == len(refused)
        topology = await TopologyDirectory(open_root(tmp_path.as_uri()).objects).read()
        assert topology.open_ingests == serving
        assert shard_of(await client.publish(b"x")) in serving


async def test_a_repeat_gets_its_first_answer_and_nothing_new_is_stored(tmp_path: Path) -> None:
    async with two_ingests(tmp_path) as (_, one, client):
        first = await one.send(b"x", request_id="known")
        await client.drain_shard("ingest", 1)

        assert await one.send(b"x", request_id="known") == first
        for payload in (b"small", b"large" * 20_000):
            with pytest.raises(FailedPrecondition) as refused:
                await one.send(payload, request_id=f"new {len(payload)}")
            assert refused.value.reason == "SHARD_DRAINING"
        assert await one.payloads(*first) == [b"x"]


async def test_the_keys_of_a_draining_shard_go_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "MOVED_S", 60.0)
    keys = [f"key {number}" for number in range(30)]
    its_own = [key for key in keys if dedupe_shard(key, [0, 1]) == 1]
    assert its_own
    async with two_ingests(tmp_path) as (_, one, client):
        await client.drain_shard("ingest", 1)
        sent = [OutgoingMessage(b"x", dedupe_key=key) for key in keys]
        stored = [await client.publish(b"x", dedupe_key=key) for key in its_own]
        again = await client.publish_many(sent)

        assert {shard_of(sent_id) for sent_id in (*stored, *again)} == {0}
        with pytest.raises(InvalidArgument) as refused:
            await one.publish(PublishRun(payloads=[b"x"], dedupe_keys=its_own[:1]))
        assert refused.value.reason == "WRONG_SHARD"


async def test_pushes_that_have_numbers_are_stored_and_brokers_choose_another_ingest(
    tmp_path: Path,
) -> None:
    async with two_ingests(tmp_path) as (_, one, client):
        directory = TopologyDirectory(open_root(tmp_path.as_uri()).objects)
        channels = Channels(directory)
        try:
            target = IngestPushes(channels, directory, 1)
            assert await target.choose() == 1
            assert await push(one, 1) == 1

            await client.drain_shard("ingest", 1)

            assert await push(one, 2) == 2
            await directory.read(max_age_ms=0)
            assert await target.choose() == 0
            (shard,) = [one for one in (await client.shards("ingest")).shards if one.shard == 1]
            assert (shard.state, shard.remaining[0][:11]) == ("draining", "2 messages,")
        finally:
            await channels.close()
            await directory.close()


async def test_what_keeps_a_shard_from_being_drained_is_counted(tmp_path: Path) -> None:
    async with two_ingests(tmp_path) as (_, one, client):
        await one.publish(message(b"a"), message(b"b"))
        await one.publish(PublishRun(payloads=[b"c"], retention_s=0))
        stored = [sent for sent in await one.log() if sent.message_id >= message_id(1, 1)]

        drained = await client.drain_shard("ingest", 1)

        for_ever = sum(sent.retention_s == 0 for sent in stored)
        assert for_ever
        assert drained.state == "draining"
        assert drained.remaining[0].startswith(
            f"{len(stored)} messages, which `slatemq janitor run"
        )
        assert drained.remaining[1].startswith(f"of these {for_ever} with retention 0")


async def test_what_is_left_is_counted_in_small_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "COUNTED_ENTRIES_MAX", 32)
    reads, threads = list[int](), set[int]()
    scan = Database.scan

    async def noted_scan(database: Database, *span: Any, **options: Any) -> AsyncIterator[Any]:
        reads.append(0)
        async for rows in scan(database, *span, **options):
            reads[-1] += len(rows)
            yield rows

    def noted_decode(value: bytes) -> list[MessageMetadata]:
        found = decode_log_entry(value)
        if len(found) == ENTRY_MESSAGES_MAX:
            threads.add(threading.get_ident())
        return found

    async with two_ingests(tmp_path) as (_, one, client):
        # Given 32 entries, of which one is large
        for _ in range(31):
            await one.send(b"x")
        await one.publish(
            PublishRun(payloads=[b"x"] * ENTRY_MESSAGES_MAX, headers={"note": "x" * 100})
        )
        await client.drain_shard("ingest", 1)
        with monkeypatch.context() as noted:
            noted.setattr(Database, "scan", noted_scan)
            noted.setattr(entries, "decode_log_entry", noted_decode)

            drained = await client.drain_shard("ingest", 1)

        # Then all are counted, few were read at once, and the large one was decoded in a thread
        assert drained.remaining[0].startswith(f"{31 + ENTRY_MESSAGES_MAX:,} messages, which")
        assert sum(reads) >= 32
        assert max(reads) <= entries.ROWS_MIN
        assert threads
        assert threading.get_ident() not in threads

        # And of more entries than are counted, it is said that there are more
        monkeypatch.setattr(draining, "COUNTED_ENTRIES_MAX", 31)
        drained = await client.drain_shard("ingest", 1)
        assert drained.remaining[0].startswith("more than 31 messages, which")
