"""What removals cost an ingest and a broker: messages purged, dead letters archived, lists pruned.

python -m benchmarks.removals --messages 100000

What is removed is put into a database directly; the removals run as the janitor's calls do, 5,000
messages or 10,000 entries at once, in the owner's own loop. Processor time is that of the whole
process, SlateDB's threads among it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.volume import Layout, Volume, write
from benchmarks.volume.plan import State
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.blobs import Blobs
from libs.storage.database.clocks import HybridClock
from libs.storage.database.pace import FixedPace
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.layout.buckets import BucketKind
from libs.storage.objects.queue_names import QueueNames
from libs.storage.objects.shard_owners import Owner
from libs.storage.records.queues import FailedMessage
from services.broker.core.batches.remove import DeadLetter
from services.broker.core.queue import Queue
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Shard
from services.broker.core.waiting.bucket import Place
from services.broker.dead_letters.mover import ListedDeadLetter, Mover
from services.broker.dead_letters.removals import Archiver, Remover, WaitingMessage
from services.broker.entries.finished_pages import ListReaders, TimeRange, list_readers
from services.broker.outbox.pusher import Pusher, PushLimits
from services.broker.outbox.targets import IngestPushes, OtherBrokers
from services.broker.shard.locations import Locations
from services.broker.shard.owner import ShardOwner
from services.ingest.config import IngestConfig
from services.ingest.edit.purge_rules import Reason
from services.ingest.edit.purging import Purge
from services.ingest.shard import open_shard

AT_ONCE = 10_000
PURGED_AT_ONCE = 5_000
HOUR_MS = 3_600_000
PRIORITY = 128
PAYLOAD_BYTES_MAX = 1 << 20


def parts(count: int, size: int) -> Iterator[range]:
    for first in range(1, count + 1, size):
        yield range(first, min(first + size, count + 1))


async def add(owner: ShardOwner, put: Callable[[int], None]) -> None:
    await owner.run(put)
    await owner.durable()


async def timed(what: str, count: int, removal: Awaitable[int]) -> None:
    began, began_cpu = time.perf_counter(), time.process_time()
    removed = await removal
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    assert removed == count, f"{removed} of {count}"
    print(
        f"{what:36} {count:9,} in {took_s:6.2f} s, processor {cpu_s / count * 1e6:6.1f} us each",
        flush=True,
    )


async def purged(folder: Path, what: str, volume: Volume) -> None:
    """All that is past its retention goes from a log of `volume`."""
    root = open_root(folder.as_uri())
    layout = Layout(volume)
    await write(root.url, volume, layout)
    expired = np.flatnonzero(layout.states() == State.EXPIRED).tolist()
    ids = [layout.id_of(place) for place in expired]
    shard = await open_shard(root, IngestConfig(root=root.url), Owner())

    async def purge() -> int:
        count = 0
        for first in range(0, len(ids), PURGED_AT_ONCE):
            some = ids[first : first + PURGED_AT_ONCE]
            count += (await shard.purger.purge(Purge(0, Reason.EXPIRED, some))).count
        return count

    await timed(what, len(ids), purge())
    await shard.close()


async def measure_ingest(folder: Path, count: int) -> None:
    half = Volume(waiting=count, expired=count)
    volumes = {
        "purged, whole entries of 1000": half,
        "purged, a half of entries of 1000": replace(half, scattered=True),
        "purged, a tenth of entries of 1000": replace(half, scattered=True, waiting=9 * count),
        "purged, each with its own entry": replace(half, entry=1),
    }
    for number, (what, volume) in enumerate(volumes.items()):
        await purged(folder / str(number), what, volume)


async def archived(
    owner: ShardOwner, queue: Queue, lists: ListReaders, archiver: Archiver, count: int
) -> None:
    for ids in parts(count, AT_ONCE):

        def fail(now_ms: int, ids: range = ids) -> None:
            queue.failed.add(FailedMessage(one, now_ms, 1, PRIORITY, 0, "no") for one in ids)
            queue.touch()

        await add(owner, fail)
    dead_letters = [
        ListedDeadLetter(order, DeadLetter(one.message_id, one.failed_at_ms))
        async for order, row in lists.failed.rows(queue, TimeRange(), None)
        for one in row
    ]

    async def archive() -> int:
        for first in range(0, count, AT_ONCE):
            await archiver.archive(queue, dead_letters[first : first + AT_ONCE], "run")
        return queue.archived.count

    await timed("archived", count, archive())


async def pruned(
    owner: ShardOwner, queue: Queue, remover: Remover, count: int, row_size: int
) -> None:
    for ids in parts(count, row_size):

        def finish(now_ms: int, ids: range = ids) -> None:
            at_ms = now_ms - HOUR_MS
            queue.done.add((one, at_ms, 1, "worker", at_ms, one, "") for one in ids)

        await add(owner, finish)

    async def prune() -> int:
        removed, more = 0, True
        while more:
            part, more = await remover.done(queue, owner.clock.now_ms())
            removed += part
        return removed

    await timed(f"done, in rows of {row_size}", count, prune())


async def expired(owner: ShardOwner, queue: Queue, remover: Remover, count: int) -> None:
    wanted: list[WaitingMessage] = []
    for ids in parts(count, 1000):

        def come(now_ms: int, ids: range = ids) -> None:
            deadlines_ms = (now_ms + 1,) * len(ids)
            queue.waiting.assign(ids, (PRIORITY,) * len(ids), deadlines_ms, (), now_ms)
            (lane,) = queue.waiting.lanes()
            place = Place(PRIORITY, BucketKind.READY, lane.tail)
            wanted.extend(WaitingMessage(place, one) for one in ids)

        await add(owner, come)

    async def drop() -> int:
        for first in range(0, count, AT_ONCE):
            await remover.expired(queue, wanted[first : first + AT_ONCE])
        return count - queue.waiting.ready_count

    await timed("expired", count, drop())


async def measure_broker(folder: Path, count: int) -> None:
    root = open_root(folder.as_uri())
    database = await root.database("broker/0", Kind.BROKER)
    owner = ShardOwner(database, Shard(), HybridClock(0), pace=FixedPace(), bytes_max=1 << 30)
    commits = asyncio.create_task(owner.commits.run())
    lists = list_readers(database)
    directory = TopologyDirectory(root.objects)
    channels = Channels(directory, payload_bytes_max=PAYLOAD_BYTES_MAX)
    locations = Locations(QueueNames(root.objects), partial(channels.is_removed, "broker"))
    pusher = Pusher(
        owner,
        IngestPushes(channels, directory, 0),
        OtherBrokers(channels, locations, 0),
        Blobs(root),
        PushLimits(PAYLOAD_BYTES_MAX, HOUR_MS),
    )
    mover = Mover(owner, lists, pusher)
    archiver, remover = Archiver(mover), Remover(mover, database, 0)
    settings = QueueSettings("true", done_retention_s=1)
    queue = await owner.run(lambda _: owner.shard.create_queue("q", settings))
    await archived(owner, queue, lists, archiver, count)
    await pruned(owner, queue, remover, 10 * count, 1000)
    await pruned(owner, queue, remover, count // 20, 1)
    await expired(owner, queue, remover, count)
    await owner.commits.close()
    await commits
    await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.removals")
    parser.add_argument("--messages", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        asyncio.run(measure_ingest(Path(folder), given.messages))
        asyncio.run(measure_broker(Path(folder), given.messages))


if __name__ == "__main__":
    main()
