"""Snapshots of every shard of an instance, kept alive while they are read."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from libs.serving.access import inherited_tls
from libs.serving.peers.channels import Channels, inherited
from libs.serving.peers.topology import Topology, TopologyDirectory
from libs.storage.database.roots import Root, open_root
from libs.storage.database.snapshots import SnapshotReader
from libs.storage.errors import StorageError
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.small_objects import Objects
from libs.storage.objects.topology_entries import FOLDER as TOPOLOGY
from libs.storage.objects.topology_entries import database_of
from services.janitor.asking import asking, release_snapshot
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import NotFound, SlateMQError, Unavailable
from slatemq.v1 import snapshot_pb2, snapshot_pb2_grpc

log = logging.getLogger(__name__)

LIFETIME_MS: Final = 300_000
"""A killed job leaves its tables pinned for at most this long; renewed at a third of it."""

SHARDED: Final = ("ingest", "broker")
"""The services whose shards own databases."""

CALL_S: Final = 60.0
"""A flush and a change of the manifest, on a store that is slow."""


@dataclass(frozen=True)
class ShardDatabase:
    """Something of the database of a shard, such as `ingest/0`."""

    database: str

    @property
    def service(self) -> str:
        return self.database.partition("/")[0]

    @property
    def shard(self) -> int:
        return int(self.database.partition("/")[2])


@dataclass(frozen=True)
class SnapshotName(ShardDatabase):
    snapshot_id: str


@asynccontextmanager
async def opened(root: Root, name: SnapshotName) -> AsyncIterator[SnapshotReader]:
    reader = await root.open_snapshot(name.database, name.snapshot_id)
    try:
        yield reader
    finally:
        await reader.close()


@dataclass(frozen=True)
class NamedSnapshot:
    """One snapshot.

    Attributes:
        taken_at_ms: The owner's time; all that it had answered before is in the snapshot.
        purge_epoch: Of an ingest; None of a broker.
    """

    name: SnapshotName
    taken_at_ms: int
    purge_epoch: int | None


@dataclass
class SnapshotSet:
    """Snapshots of all shards: the ingests' first, then the brokers'.

    `lost` resolves to what happened once a snapshot is gone before its time: rows may be missing.
    """

    all: Sequence[NamedSnapshot]
    lost: asyncio.Future[str]

    @property
    def names(self) -> list[SnapshotName]:
        return [taken.name for taken in self.all]


async def databases_of(objects: Objects) -> list[str]:
    """The names of all databases below a root, the brokers' first.

    Also of those that are lost, but not of shards that were removed.
    """
    found = {
        f"{service}/{shard}"
        for service in SHARDED
        for folder in await objects.folders(service)
        if (shard := folder.rpartition("/")[2]).isdigit()
    }
    announced = map(database_of, await objects.list(TOPOLOGY))
    found |= {name for name in announced if name is not None}
    return sorted(found - await RemovedShards(objects).all())


async def refuse_unknown_shards(objects: Objects, known: Iterable[str]) -> None:
    """Raises Unavailable for a database that is not among the known ones."""
    if unknown := {*await databases_of(objects)}.difference(known):
        raise Unavailable(
            f"{min(unknown)} has a database but is not in the topology: start its process"
        )


_listeners: list[Callable[[SnapshotName], None]] = []


def report_snapshots(listener: Callable[[SnapshotName], None]) -> None:
    """Call this with each snapshot that this process takes from now on."""
    _listeners.append(listener)


@asynccontextmanager
async def snapshots_of_all(
    directory: TopologyDirectory,
    channels: Channels,
    lifetime_ms: int = LIFETIME_MS,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    services: Sequence[str] = SHARDED,
) -> AsyncIterator[SnapshotSet]:
    """Take a snapshot of every ingest, then of every broker; renew them, release them at the end.

    In this order what a broker has of a message is never older than the message. Raises
    Unavailable when a shard is down, since what it still needs is unknown, and when one has come
    meanwhile: the purge epochs taken may be of a time when it had queues already. `sleep` waits
    between renewals, in seconds; `services` are taken in their order.
    """
    owners = _Owners(channels, lifetime_ms, sleep)
    renewing: asyncio.Task[None] | None = None
    try:
        topology = await _read(directory)
        if not topology.ingests and not topology.brokers:
            raise Unavailable("no ingest or broker has ever announced itself below this root")
        for service in services:
            await owners.take_all(service, topology.shards(service))
        now = await _read(directory)
        if any(
            now.shards(service).keys() != topology.shards(service).keys() for service in SHARDED
        ):
            raise Unavailable("a shard has come while snapshots were taken: take them again")
        taken = SnapshotSet(
            sorted(owners.taken, key=lambda one: (one.name.service != "ingest", one.name.shard)),
            asyncio.get_running_loop().create_future(),
        )
        renewing = asyncio.create_task(owners.keep(taken.lost))
        yield taken
    finally:
        if renewing is not None:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing
        await owners.release()


async def _read(directory: TopologyDirectory) -> Topology:
    try:
        return await directory.read(max_age_ms=0)
    except StorageError as error:
        raise Unavailable(f"the topology cannot be read: {error}") from error


class _Owners:
    def __init__(
        self, channels: Channels, lifetime_ms: int, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self.taken: list[NamedSnapshot] = []
        self._sleep = sleep
        self._channels = channels
        self._lifetime_ms = lifetime_ms

    async def take_all(self, service: str, shards: Iterable[int]) -> None:
        """Raises only when all have answered: what was taken is known then, and is released."""
        results = await asyncio.gather(
            *(self._take(service, shard) for shard in shards), return_exceptions=True
        )
        for one in results:
            if one is not None:
                raise one

    async def _take(self, service: str, shard: int) -> None:
        request = snapshot_pb2.CreateSnapshotRequest(lifetime_ms=self._lifetime_ms)
        with asking(service, shard):
            stub = await self._stub(service, shard)
            snapshot = (await stub.CreateSnapshot(request, timeout=CALL_S)).snapshot
        name = SnapshotName(snapshot.database, snapshot.snapshot_id)
        epoch = snapshot.purge_epoch if snapshot.HasField("purge_epoch") else None
        self.taken.append(NamedSnapshot(name, snapshot.taken_at_ms, epoch))
        for listener in _listeners:
            listener(name)
        if (name.service, name.shard) != (service, shard):
            raise Unavailable(f"{name.database} answers in place of {service}/{shard}")

    async def keep(self, lost: asyncio.Future[str]) -> None:
        """Renew all until one is lost."""
        while not lost.done():
            await self._sleep(self._lifetime_ms / 3 / 1000)
            await asyncio.gather(*(self._renew(one.name, lost) for one in self.taken))

    async def _renew(self, name: SnapshotName, lost: asyncio.Future[str]) -> None:
        request = snapshot_pb2.RenewSnapshotRequest(
            snapshot_id=name.snapshot_id, lifetime_ms=self._lifetime_ms
        )
        try:
            stub = await self._stub(name.service, name.shard)
            with raising_slatemq_errors():
                await stub.RenewSnapshot(request, timeout=CALL_S)
        except NotFound:
            if not lost.done():
                lost.set_result(f"the snapshot {name.snapshot_id} of {name.database} is gone")
        except (SlateMQError, StorageError) as error:
            # Its lifetime has room for two more tries.
            log.warning("the snapshot of %s is not renewed: %s", name.database, error)

    async def release(self) -> None:
        names = [(one.name.database, one.name.snapshot_id) for one in self.taken]
        await asyncio.gather(*(release_snapshot(self._channels, *name, CALL_S) for name in names))

    async def _stub(self, service: str, shard: int) -> snapshot_pb2_grpc.SnapshotServiceAsyncStub:
        return snapshot_pb2_grpc.SnapshotServiceStub(await self._channels.to(service, shard))


@contextmanager
def renewed_snapshots(root: str, services: Sequence[str] = SHARDED) -> Iterator[SnapshotSet]:
    """Snapshots of all shards, renewed by a thread until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="snapshots", daemon=True)
    thread.start()
    holding = _hold(root, services)
    try:
        taken = asyncio.run_coroutine_threadsafe(holding.__aenter__(), loop).result()
        try:
            yield taken
        finally:
            asyncio.run_coroutine_threadsafe(holding.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def _hold(root: str, services: Sequence[str]) -> AsyncIterator[SnapshotSet]:
    async with (
        channels_of(open_root(root)) as (directory, channels),
        snapshots_of_all(directory, channels, services=services) as taken,
    ):
        yield taken


@asynccontextmanager
async def channels_of(root: Root) -> AsyncIterator[tuple[TopologyDirectory, Channels]]:
    """The channels to the processes of an instance, and where these are."""
    directory = TopologyDirectory(root.objects)
    channels = Channels(directory, carrier=inherited(), tls=inherited_tls(os.environ))
    try:
        yield directory, channels
    finally:
        await channels.close()
        await directory.close()
