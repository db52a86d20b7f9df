"""Restore drills: an instance under load is backed up and destroyed, and goes on elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import slatemq
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import Root, open_root
from services.janitor.backup.catalogue import Backup, Catalogue
from services.janitor.backup.restoring import Restoring
from services.janitor.backup.shards import (
    ShardSnapshot,
    ShardSnapshots,
    snapshots_of_owners,
    snapshots_of_stopped,
)
from services.janitor.backup.taking import BackupSource, Taking
from services.janitor.runs.history import RunStore
from services.janitor.snapshots import snapshots_of_all
from slatemq.errors import AlreadyExists, Unavailable
from slatemq.v1 import (
    consumer_pb2,
    consumer_pb2_grpc,
    ingest_pb2,
    ingest_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
)
from tests.acceptance.steady_load import SteadyLoad
from tests.forms import proof
from tests.integration.stack.processes import Service

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # Two instances of five processes each.

WAIT_S = 60.0
QUEUES = ("apples", "pears", "plums")
LARGE = 70_000

BACKOFF = queue_pb2.Backoff(kind=queue_pb2.Backoff.KIND_FIXED, initial_ms=1_000)
"""One that grows would keep messages for minutes whose leases have ended all the time."""


class Instance:
    """Two ingests, two brokers and a router over one folder, and a client of theirs."""

    client: slatemq.Client

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = open_root((folder / "data").as_uri())
        self.ingests = [Service(folder, "ingest", "--shard", str(shard)) for shard in range(2)]
        self.brokers = [Service(folder, "broker", "--shard", str(shard)) for shard in range(2)]
        self.router = Service(folder, "router")

    @property
    def all(self) -> list[Service]:
        return [*self.ingests, *self.brokers, self.router]

    async def create_queue(self, queue_id: str, shard: int) -> None:
        stub = queue_pb2_grpc.QueueServiceStub(self.brokers[shard].there)
        queue = queue_pb2.Queue(
            queue_id=queue_id,
            filter=f'headers.queue == "{queue_id}"',
            max_attempts=1_000,
            backoff=BACKOFF,
        )
        await stub.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue))

    async def consume_all(self, queues: Iterable[str]) -> dict[int, bytes]:
        """Ack all that the queues have and get, until nothing is left; payloads by message ID."""
        queue_ids, found = list(queues), dict[int, bytes]()
        await self._routed(queue_ids, found)
        for queue_id in queue_ids:
            async with asyncio.timeout(WAIT_S):
                while await self._unfinished(queue_id):
                    await self._consume(queue_id, found)
        return found

    async def _routed(self, queue_ids: Sequence[str], found: dict[int, bytes]) -> None:
        """Consume until all is in the queues that was in the logs before this."""
        last: set[int] = set()
        runs = [
            ingest_pb2.PublishRun(payloads=[b"last"], headers={"queue": queue_id})
            for queue_id in queue_ids
        ]
        async with asyncio.timeout(WAIT_S):
            for ingest in self.ingests:
                stub = ingest_pb2_grpc.IngestServiceStub(ingest.there)
                published = await stub.Publish(ingest_pb2.PublishRequest(runs=runs))
                last.update(published.message_ids)
            while not last <= found.keys():
                for queue_id in queue_ids:
                    await self._consume(queue_id, found)
        for message_id in last:
            del found[message_id]

    async def _consume(self, queue_id: str, found: dict[int, bytes]) -> None:
        """Ack what the queue has now: nothing, where an ingest takes too long to read it."""
        messages: list[slatemq.Received] = []
        with suppress(Unavailable):
            messages += await self.client.claim(queue_id, 100, wait=0.2)
        found.update((one.message_id, one.payload) for one in messages)
        assert not any(await self.client.ack([one.lease_token for one in messages]))

    async def _unfinished(self, queue_id: str) -> int:
        counts = (await self.client.get_queue(queue_id)).counts
        return counts.available_count + counts.in_flight_count + counts.delayed_count


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Instance]:
    """An instance over what `folder`/data has; killed at the end."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    made = Instance(folder)
    try:
        await asyncio.gather(*(service.start() for service in made.all))
        async with slatemq.connect(made.ingests[0].address) as client:
            made.client = client
            yield made
    finally:
        await asyncio.gather(*(service.close() for service in made.all))


async def back_up(root: Root, backups: Root, snapshots: Any = None, kept: int = 5) -> Backup:
    take = snapshots or (lambda: snapshots_of_owners(root))
    return await Taking(BackupSource(root, take, RunStore(root.objects)), backups, kept).take()


async def restore(backups: Root, folder: Path, backup: Backup) -> None:
    (folder / "data").mkdir(parents=True)
    root = open_root((folder / "data").as_uri())
    await Restoring(Catalogue(backups.objects), backup, root).restore()


@pytest.mark.parametrize("rounds", [2, proof(20)])
async def test_a_restored_instance_has_all_that_was_answered_before_the_backup_and_goes_on(
    tmp_path: Path, rounds: int
) -> None:
    backups = open_root((tmp_path / "backups").as_uri())
    async with serving(tmp_path / "old") as old:
        for place, queue_id in enumerate(QUEUES):
            await old.create_queue(queue_id, place % 2)
        # Whose claims are over shortly after the restore
        load = SteadyLoad(old.client, QUEUES, keep=2, lease=5)
        load.start()
        for _ in range(rounds):
            await load.progress(60, 20)
            # When it is backed up under load
            published, acked = dict(load.published), set(load.acked)
            backup = await back_up(old.root, backups)
        await load.stop()
    shutil.rmtree(tmp_path / "old")
    await restore(backups, tmp_path / "new", backup)

    async with serving(tmp_path / "new") as new:
        found = await new.consume_all(QUEUES)

        # Then nothing is lost that was answered before, and nothing is there that was acked before
        assert published.keys() - load.consumed.keys() <= found.keys()
        assert not found.keys() & acked
        assert all(load.published.get(one, payload) == payload for one, payload in found.items())

        # And it goes on: with IDs that were never given out, and names that are taken
        more = SteadyLoad(new.client, QUEUES)
        given = [await more.publish(queue_id) for queue_id in QUEUES for _ in range(5)]
        assert not {*given} & {*load.published, *found}
        assert await new.consume_all(QUEUES) == more.published
        for queue_id in QUEUES:
            with pytest.raises(AlreadyExists):
                await new.client.create_queue(queue_id)
        await new.client.create_queue("cherries")


async def test_an_acked_message_stays_acked_and_a_claimed_one_comes_again(tmp_path: Path) -> None:
    backups = open_root((tmp_path / "backups").as_uri())
    async with serving(tmp_path / "old") as old:
        await old.create_queue("apples", 1)
        load = SteadyLoad(old.client, ["apples", "pears"])
        ids = [await load.publish("apples", size) for size in (10, LARGE, 10, LARGE)]
        (acked,) = await old.client.claim("apples", 1, wait=WAIT_S)
        await acked.ack()
        # With claims that are over shortly after the restore
        assert await old.client.claim("apples", 1, lease=5, wait=WAIT_S)
        assert await old.client.claim("apples", 1, lease=5, wait=WAIT_S)
        backup = await back_up(old.root, backups)
    await restore(backups, tmp_path / "new", backup)

    async with serving(tmp_path / "new") as new:
        found = await new.consume_all(["apples"])
        assert found == {one: load.published[one] for one in ids if one != acked.message_id}


@asynccontextmanager
async def snapshots_around(root: Root, between: Any) -> AsyncIterator[ShardSnapshots]:
    """As `snapshots_of_owners`, with something happening between brokers and ingests."""
    async with AsyncExitStack() as stack:
        directory = TopologyDirectory(root.objects)
        stack.push_async_callback(directory.close)
        channels = Channels(directory)
        stack.push_async_callback(channels.close)
        found: list[ShardSnapshot] = []
        for service in ("broker", "ingest"):
            taking = snapshots_of_all(directory, channels, services=(service,))
            for one in (await stack.enter_async_context(taking)).all:
                name = one.name
                found.append(ShardSnapshot(name.database, name.snapshot_id, one.taken_at_ms))
            if service == "broker":
                await between()
        yield ShardSnapshots(tuple(found), asyncio.get_running_loop().create_future())


async def test_what_happens_between_two_snapshots_costs_no_push_after_the_restore(
    tmp_path: Path,
) -> None:
    backups = open_root((tmp_path / "backups").as_uri())

    async def push(instance: Instance, payload: bytes) -> None:
        request = consumer_pb2.ExecuteRequest(request_id=str(uuid.uuid4()))
        pushed = request.commands.add().push
        pushed.queue_id, pushed.payload = "apples", payload
        await consumer_pb2_grpc.ConsumerServiceStub(instance.brokers[1].there).Execute(request)

    async with serving(tmp_path / "old") as old:
        await old.create_queue("apples", 1)
        await push(old, b"before")

        async def between() -> None:
            # Pushes that the ingest's snapshot has, and the broker's has not made
            await push(old, b"between 1")
            await push(old, b"between 2")
            async with asyncio.timeout(WAIT_S):
                while any([line.waiting_count async for line in old.client.outbox_lines()]):
                    await asyncio.sleep(0.02)

        backup = await back_up(old.root, backups, lambda: snapshots_around(old.root, between))
    await restore(backups, tmp_path / "new", backup)

    async with serving(tmp_path / "new") as new:
        # When the restored broker makes pushes of the same numbers, then none is passed over
        await push(new, b"after 1")
        await push(new, b"after 2")
        found: list[bytes] = []
        async with asyncio.timeout(WAIT_S):
            while len(found) < 5:
                found += (await new.consume_all(["apples"])).values()
        expected = [b"after 1", b"after 2", b"before", b"between 1", b"between 2"]
        assert sorted(found) == expected


async def test_an_instance_moves_while_it_is_stopped_and_nothing_is_lost(tmp_path: Path) -> None:
    backups = open_root((tmp_path / "backups").as_uri())
    async with serving(tmp_path / "old") as old:
        await old.create_queue("apples", 0)
        await old.create_queue("pears", 1)
        load = SteadyLoad(old.client, ["apples", "pears"])
        # Given a backup from before, whose objects need not be copied again
        for number in range(10):
            await load.publish(("apples", "pears")[number % 2], LARGE)
        first = await back_up(old.root, backups)
        late = await load.publish("apples", LARGE)

        # When it is taken over, though its processes run, and moved
        backup = await back_up(
            old.root, backups, lambda: snapshots_of_stopped(old.root, first.taken_at_ms)
        )
        for owner in (*old.ingests, *old.brokers):
            assert await asyncio.wait_for(owner.process.wait(), WAIT_S) == 77
    assert backup.copied_count < first.copied_count
    assert first.source == backup.source
    await restore(backups, tmp_path / "new", backup)

    async with serving(tmp_path / "new") as new:
        found = await new.consume_all(["apples", "pears"])
        assert found == load.published
        assert late in found
