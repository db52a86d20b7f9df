"""Who serves what, and where: one small JSON object per process, below `topology/` in the root.

::

    topology/broker-3.json   {"service": "broker", "shard": 3, "address": "10.0.0.7:7420"}

Where clients come from outside a network that the services share (containers, Kubernetes), the
object has two addresses: `address` for clients, and `peer_address` for the other services. That of
an ingest has its largest payload, too, in bytes: `payload_bytes_max`; and `draining` while it is
being drained.

Each process writes its own at start, under the same name as the one it replaces; all others read
it. Entries are never taken for proof of life: a process that is down keeps its entry.

Readers read one object, `topology/change`, which gets a new random value after each change of an
entry, and the entries only where that value has changed. So an idle instance costs its store one
GET for each reading, however many processes it has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from libs.storage.errors import ObjectNotFound, StorageError, StoreUnavailable
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.small_objects import Objects
from libs.storage.objects.topology_entries import FOLDER, entry_path
from slatemq.v1 import topology_pb2, topology_pb2_grpc

log = logging.getLogger(__name__)

CACHE_MS = 5_000
"""How old a reading may be: addresses change only when a process moves, and each reading costs a
request per process."""

RESOLVE_AGAIN_MS = 250
"""The same for a peer that cannot be reached: it may just have moved."""

SOON_MS = 1_000
"""How long a reading may take for callers who would rather have the last one than wait: a store
that hangs takes 10 s to fail."""

OUTDATED_MS = 20_000
"""An older reading does not help a client that doubts its own: processes may have started and moved
since. A standby waits for weeks with what it read at its start."""

CHANGE = f"{FOLDER}/change"
"""The object that shows whether any entry has changed."""

LIST_MS = 1_200_000
"""How old the list of entries may be while nothing seems to have changed: a process may have ended
between its entry and the change."""

READS_AT_ONCE = 32
"""Objects read at the same time; 1,000 shards then take about 30 round trips."""


@dataclass(frozen=True, order=True)
class Peer:
    """One process: its service (`broker`), its shard, and where it is reached (`host:port`).

    Attributes:
        address: Its advertised address, for clients.
        peer_address: For the other services; empty means the advertised one.
        payload_bytes_max: The largest payload that an ingest takes; 0 when unknown.
        is_draining: Whether it is an ingest that takes no publishes.
    """

    service: str
    shard: int
    address: str
    peer_address: str = ""
    payload_bytes_max: int = 0
    is_draining: bool = False

    @property
    def path(self) -> str:
        """The path of its object below the root."""
        return entry_path(self.service, self.shard)


@dataclass(frozen=True)
class Topology:
    """All processes of the instance, as they last announced themselves, sorted."""

    peers: tuple[Peer, ...]

    def shards(self, service: str) -> Mapping[int, str]:
        """The address for services, by shard, ascending."""
        found = self._by_service.get(service, {})
        return {shard: peer.peer_address or peer.address for shard, peer in found.items()}

    def advertised(self, service: str) -> Mapping[int, str]:
        """The address for clients, by shard, ascending."""
        found = self._by_service.get(service, {})
        return {shard: peer.address for shard, peer in found.items()}

    def peer(self, service: str, shard: int) -> Peer | None:
        """One process; None if it never announced itself."""
        return self._by_service.get(service, {}).get(shard)

    def address(self, service: str, shard: int) -> str | None:
        """The address for services of one process; None if it never announced itself."""
        peer = self.peer(service, shard)
        return (peer.peer_address or peer.address) if peer else None

    def payload_bytes_max(self, ingest_shard: int) -> int | None:
        """The largest payload that an ingest accepts; None where it never announced one."""
        peer = self.peer("ingest", ingest_shard)
        return (peer.payload_bytes_max or None) if peer else None

    @property
    def ingests(self) -> Mapping[int, str]:
        return self.shards("ingest")

    @property
    def open_ingests(self) -> Sequence[int]:
        """The ingest shards that take publishes, ascending: those that are not being drained."""
        return [
            shard
            for shard, peer in self._by_service.get("ingest", {}).items()
            if not peer.is_draining
        ]

    @property
    def brokers(self) -> Mapping[int, str]:
        return self.shards("broker")

    @cached_property
    def _by_service(self) -> dict[str, dict[int, Peer]]:
        found: dict[str, dict[int, Peer]] = {}
        for peer in sorted(self.peers):
            found.setdefault(peer.service, {})[peer.shard] = peer
        return found


def decode_peer(data: bytes) -> Peer:
    """The process that an object of the topology announces. Raises ValueError for any other."""
    try:
        fields = load_json(data)
        peer = Peer(
            str(fields["service"]),
            int(fields["shard"]),
            str(fields["address"]),
            str(fields.get("peer_address", "")),
            int(fields.get("payload_bytes_max", 0)),
            fields.get("draining", False) is True,
        )
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(repr(error)) from error
    # All that is answered of it, so that one bad object does not fail the answer.
    topology_pb2.Endpoint(shard=peer.shard, address=peer.address)
    return peer


class TopologyDirectory:
    """Announces this process, and finds all others.

    Methods raise StoreUnavailable when the store cannot be used and nothing is known yet.
    """

    def __init__(self, objects: Objects, monotonic: Callable[[], float] = time.monotonic) -> None:
        """The clock (in seconds) only ages the cache."""
        self._objects = objects
        self._monotonic = monotonic
        self._reading = asyncio.Lock()
        self._known: Topology | None = None
        self._known_at = float("-inf")  # When `_known` was read
        self._read_at = float("-inf")  # The same, unless it is to be read again
        self._listed_at = float("-inf")
        self._failed_at = float("-inf")
        self._refreshing_since = float("-inf")
        self._own_changes = 0
        self._change: bytes | None = None
        self._refreshing: asyncio.Task[Topology] | None = None

    async def announce(self, peer: Peer) -> None:
        """Announce the address of this process; replaces its predecessor's."""
        optional = {
            "peer_address": peer.peer_address,
            "payload_bytes_max": peer.payload_bytes_max,
            "draining": peer.is_draining,
        }
        fields = {"service": peer.service, "shard": peer.shard, "address": peer.address}
        fields |= {name: value for name, value in optional.items() if value}
        await self._objects.put(peer.path, json.dumps(fields).encode())
        await self._note_change()

    async def entry(self, peer: Peer) -> Peer | None:
        """The entry of this peer's service and shard as stored now; None without one."""
        return await self._read_one(peer.path)

    async def withdraw(self, peer: Peer) -> None:
        """Take this process off the list, unless another has taken its number over already.

        For routers and janitors, which come and go; shards stay until they are removed. Raises
        nothing: who ends while the store is down stays on the list, and the log says so.
        """
        try:
            topology = await self.read(max_age_ms=0)
            if topology.advertised(peer.service).get(peer.shard) == peer.address:
                await self.remove(peer.path)
        except StorageError as error:
            log.warning("could not remove this process from the topology: %s", error)

    async def is_removed(self, service: str, shard: int) -> bool:
        """Whether a shard without an entry was removed for ever. Raises StoreUnavailable."""
        return await RemovedShards(self._objects).has(f"{service}/{shard}")

    async def is_given_up(self, service: str, shard: int) -> bool:
        """Whether a shard without an entry is gone with what it had. Raises StoreUnavailable."""
        return await RemovedShards(self._objects).is_given_up(f"{service}/{shard}")

    async def remove(self, path: str) -> None:
        """Delete the entry at this path below the root. Raises StoreUnavailable."""
        await self._objects.delete(path)
        await self._note_change()

    async def read(self, max_age_ms: int = CACHE_MS) -> Topology:
        """The topology, at most `max_age_ms` old, or the last known one while the store is down."""
        called_at = self._monotonic()
        async with self._reading:  # One reading serves all callers that wait for it.
            if self._known is not None and (
                self._age_ms(self._read_at) <= max_age_ms or self._failed_at > called_at
            ):
                return self._known
            before = self._own_changes
            try:
                self._known = await self._read_changed()
                self._known_at = self._monotonic()
                # Without a change of this process meanwhile, which it may lack.
                if before == self._own_changes:
                    self._read_at = self._monotonic()
            except StorageError as error:
                if self._known is None:
                    raise
                self._failed_at = self._monotonic()
                log.warning("the topology cannot be read, going on with the last: %s", error)
            return self._known

    async def read_now(self) -> Topology:
        """The topology as the store has it now. Raises StoreUnavailable."""
        called_at = self._monotonic()
        topology = await self.read(max_age_ms=0)
        if self._failed_at >= called_at:
            raise StoreUnavailable("it is not known which processes own the shards now")
        return topology

    async def prepare(self) -> None:
        """Have a topology to go on with while the store is down; the next reader looks again."""
        await self.read()
        self._read_at = float("-inf")

    async def read_soon(self, max_age_ms: int = CACHE_MS) -> Topology:
        """Like `read`, or the last known one if the store takes over `SOON_MS`.

        All callers share one reading, and after one that failed none begins for `max_age_ms`.
        """
        if self._known is None:
            return await self.read(max_age_ms)
        if self._age_ms(self._read_at) <= max_age_ms:
            return self._known
        if not self._is_refreshing and self._age_ms(self._failed_at) <= max_age_ms:
            return self._known
        reading = self._refresh(max_age_ms)
        left_ms = SOON_MS - self._age_ms(self._refreshing_since)
        if left_ms > 0:
            await asyncio.wait([reading], timeout=left_ms / 1000)
        return self._known

    @property
    def is_outdated(self) -> bool:
        """Whether the last reading is older than `OUTDATED_MS`."""
        return self._age_ms(self._known_at) > OUTDATED_MS

    def last(self) -> Topology | None:
        """The last reading, without waiting; an old one is renewed in the background."""
        if self._known is not None and self._age_ms(self._read_at) > CACHE_MS:
            self._refresh(CACHE_MS)
        return self._known

    @property
    def _is_refreshing(self) -> bool:
        return self._refreshing is not None and not self._refreshing.done()

    def _refresh(self, max_age_ms: int) -> asyncio.Task[Topology]:
        """The reading in the background; begins one where there is none."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self.read(max_age_ms))
            self._refreshing_since = self._monotonic()
        return self._refreshing

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])

    def _age_ms(self, read_at: float) -> float:
        return (self._monotonic() - read_at) * 1000

    async def _note_change(self) -> None:
        """Have all readers read the entries again, this one too."""
        self._own_changes += 1
        self._read_at = self._listed_at = float("-inf")
        await self._objects.put(CHANGE, secrets.token_hex(16).encode())

    async def _read_changed(self) -> Topology:
        """The entries, which are read only after a change. Raises StorageError."""
        try:
            change = await self._objects.get(CHANGE)
        except ObjectNotFound:
            change = None
        is_known = change is not None and change == self._change
        if self._known is not None and is_known and self._age_ms(self._listed_at) <= LIST_MS:
            return self._known
        listed_at = self._monotonic()
        topology = await self._read_all()
        # Of before the entries were read: a change meanwhile has them read again.
        self._change, self._listed_at = change, listed_at
        return topology

    async def _read_all(self) -> Topology:
        paths = [path for path in await self._objects.list(FOLDER) if path.endswith(".json")]
        found: list[Peer | None] = []
        for begin in range(0, len(paths), READS_AT_ONCE):
            some = paths[begin : begin + READS_AT_ONCE]
            found += await asyncio.gather(*map(self._read_one, some))
        return Topology(tuple(sorted(peer for peer in found if peer is not None)))

    async def _read_one(self, path: str) -> Peer | None:
        try:
            return decode_peer(await self._objects.get(path))
        except ObjectNotFound:
            return None  # Withdrawn since it was listed.
        except ValueError as error:
            # One bad object, put there by hand perhaps, must not cut everybody off.
            log.warning("ignoring a damaged topology object: %r", error, extra={"path": path})
            return None


class TopologyServicer(topology_pb2_grpc.TopologyServiceServicer):
    """Serves the directory, whose short cache bounds what many clients cost the store.

    Clients ask it before all else, and may want what needs no store: one that hangs holds none up.
    """

    def __init__(self, directory: TopologyDirectory) -> None:
        self._directory = directory

    async def GetTopology(  # noqa: N802 - the RPC's name
        self, request: topology_pb2.GetTopologyRequest, context: Any
    ) -> topology_pb2.GetTopologyResponse:
        """The processes known now.

        Raises StoreUnavailable where nothing is known yet, or too little for a caller that doubts
        what it has: another process may know more.
        """
        max_age_ms = RESOLVE_AGAIN_MS if request.is_doubted else CACHE_MS
        topology = await self._directory.read_soon(max_age_ms)
        if request.is_doubted and self._directory.is_outdated:
            topology = await self._directory.read_now()
        taking = frozenset(topology.open_ingests)

        endpoints = {
            f"{service}s": [
                topology_pb2.Endpoint(
                    shard=shard,
                    address=address,
                    is_draining=service == "ingest" and shard not in taking,
                )
                for shard, address in topology.advertised(service).items()
            ]
            for service in ("ingest", "broker", "router", "janitor")
        }
        return topology_pb2.GetTopologyResponse(**endpoints)
