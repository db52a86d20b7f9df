"""What a service is: one process's part of the API, its start and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import grpc.aio

from libs.access.audit import Act
from libs.serving.access import open_without, service_tls, tls_environment
from libs.serving.events.servicer import EventsServicer
from libs.serving.examination import Examiner
from libs.serving.http.parts import HttpParts
from libs.serving.instance_servicer import InstanceServicer
from libs.serving.peers.channels import Channels, open_channel
from libs.serving.peers.elsewhere import PACKAGE, SERVED_BY, WITH_EVENTS
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.config import OwnerConfig, ServingConfig
from libs.serving.process.exits import ExitCause
from libs.serving.process.healthprobe import tls_files
from libs.serving.process.ownership import Announcement
from libs.serving.process.removal import ShardDrain
from libs.serving.process.shards import probe_stores
from libs.serving.process.standby import Standby, owner_name_of
from libs.serving.process.store_costs import costs_of
from libs.serving.process.store_measures import (
    StoreMeasures,
    measure_caches,
    measure_memory,
)
from libs.serving.shard_servicer import ShardServicer
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root
from libs.storage.database.slate import Database
from libs.storage.objects.shard_owners import Owner
from slatemq.errors import NotFound, SlateMQError

if TYPE_CHECKING:
    from libs.serving.events.relay import ProcessRelay

C = TypeVar("C", bound=ServingConfig)


class Service(Generic[C]):
    """A service that `libs.serving.server` can run.

    Attributes:
        kind: What it is, such as `broker`, in SERVED_BY and in the topology.
        owns_shard: Whether it owns the database `<kind>/<shard>`; its config is an OwnerConfig.
        shard: The number of its shard, or what distinguishes it from others of its kind.
        owner_name: As the owner of its shard: of this life alone where it stands by.
        name: The name of this process for logs and telemetry, such as `broker-3`.
        directory: The addresses of the other services.
        channels: To them.
        announcement: Its entry in the topology, once started: Ownership where it owns a shard.
        note: What an operator should know although the process serves; empty: nothing.
        access_note: Says which files of access are refused; its server sets it.
        held_bytes: Bytes held for callers: messages on their way to them, or to the store.
        database: The database that it owns, once open.
        shard_drain: The drain of the shard that it owns, once started.
        memory_parts: Bytes in memory by what they are for.
        cache_lookups: Hits and misses of its caches since the start.
        http_parts: What the service adds to the HTTP port.
    """

    kind: ClassVar[str]
    owns_shard: ClassVar[bool] = False

    def __init__(self, config: C, shard: int, telemetry: Telemetry, root: Root) -> None:
        """Prepare; `start` opens. A subclass raises FatalError for settings that mean nothing."""
        self._config = config
        self._telemetry = telemetry
        self._root = root
        self.shard = shard
        self.name = f"{self.kind}-{shard}"
        self.owner_name = owner_name_of(config) if isinstance(config, OwnerConfig) else ""
        self.directory = TopologyDirectory(root.objects)
        self.channels = Channels(
            self.directory,
            payload_bytes_max=config.instance.payload_bytes_max,
            carrier=telemetry.carrier,
            tls=service_tls(config),
        )
        self.announcement: Announcement | None = None
        self.database: Database | None = None
        self.shard_drain: ShardDrain | None = None
        self._relay: ProcessRelay | None = None
        self.access_note: Callable[[], str] = str

    @property
    def probe_tls(self) -> Mapping[str, str]:
        """The files with which other processes are probed; empty without TLS."""
        return tls_files(tls_environment(self._config))

    @property
    def grpc_services(self) -> Sequence[str]:
        """The full names of its gRPC services, for health and reflection."""
        return [PACKAGE + name for name, kinds in SERVED_BY.items() if self.kind in kinds]

    @property
    def note(self) -> str:
        """What holds up callers while the process serves, for its operator; else empty."""
        return self._relay.note if self._relay is not None else ""

    @property
    def folders(self) -> Iterable[Path]:
        """Those that its stores are, where they are folders."""
        return self._root.folders.values()

    @property
    def held_bytes(self) -> int:
        return 0

    @property
    def memory_parts(self) -> Mapping[str, int]:
        return {}

    @property
    def cache_lookups(self) -> Mapping[str, tuple[int, int]]:
        return {}

    @property
    def log_end(self) -> int | None:
        """The last durable message of its log, where it has one."""
        return None

    def measure_process(self) -> None:
        """Register what every process measures of its store, its memory and its caches."""
        if not self._telemetry.enabled:
            return
        root, meter = self._root, self._telemetry.meter
        config = self._config
        texts = config.store_prices, config.wal_store_prices
        costs_of(*texts, root.address, root.wal_address)  # Raises for prices that mean nothing.
        store = StoreMeasures(
            meter,
            root.objects.counts,
            lambda: self.database,
            lambda: root.folders,
            lambda: costs_of(*texts, root.address, root.wal_address),
        )
        measure_memory(meter, lambda: {**self.memory_parts, **store.memory_parts()})
        measure_caches(meter, store.cache_lookups, lambda: self.cache_lookups)

    def publish_act(self, act: Act) -> None:
        """Make an event of what a caller did, where there are events."""
        if self._relay is not None:
            self._relay.publish_act(act)

    @property
    def http_parts(self) -> HttpParts:
        return HttpParts(queue_health=self._relay.health if self._relay is not None else None)

    @property
    def database_name(self) -> str:
        """Of the database that it owns, such as `broker/3`."""
        return f"{self.kind}/{self.shard}"

    def standby(self, peer_address: str) -> Standby | None:
        """What waits for the shard before `start`; None where this process does not wait."""
        config = self._config
        if not isinstance(config, OwnerConfig) or not config.standby:
            return None
        tls = service_tls(config)
        return Standby(
            (self.kind, self.shard),
            Owner(self.owner_name, peer_address),
            self._root.objects,
            self.directory,
            lambda address: open_channel(address, tls=tls),
            config.instance_number,
        )

    async def probe_store(self) -> None:
        """Raises UnsafeStore or ClockAhead where a store may not hold a shard's database."""
        if self.owns_shard:
            await probe_stores(self._root)

    async def start(self, address: str, peer_address: str) -> None:
        """Open what is owned and become ready to serve under these advertised `host:port`.

        `address` is for clients, `peer_address` for the other services.

        May take its time; may be cancelled by a signal. Raises FatalError to name the exit;
        the errors of libs.storage name it by themselves (Fenced exits as fenced).
        """
        raise NotImplementedError

    def servicers(self) -> Iterable[object]:
        """Its own servicers, in any order. Called after `start`, before the first call."""
        raise NotImplementedError

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register its servicers, and those that every process has."""
        shared: list[object] = [
            InstanceServicer(
                self._root.objects,
                self.directory,
                self.channels,
                self._config,
                open_without(self._config),
                lambda: "; ".join(filter(None, (self.note, self.access_note()))),
                Examiner(
                    self.name,
                    self._root,
                    self._config,
                    lambda: self.database,
                    lambda: self.log_end,
                ),
                has_events=self.kind in WITH_EVENTS,
            ),
        ]
        if self.kind in WITH_EVENTS:
            shared.append(EventsServicer(self._relay))
        if self.shard_drain is not None:
            shared.append(ShardServicer(self.shard_drain, self._root.objects))
        for servicer in (*self.servicers(), *shared):
            _register(servicer, server)

    def opened(self) -> None:
        """Called when calls are let in."""

    async def wait_fatal(self) -> ExitCause:
        """Return when the process must end: fenced, or a commit failed. Called after `start`."""
        raise NotImplementedError

    async def directed(self, error: NotFound) -> SlateMQError:
        """An error about what was not here, with where it is as far as that is known."""
        return error

    async def drain(self) -> None:
        """End long calls (waiting claims, streams); called when asked to stop."""

    async def stop(self) -> None:
        """Close what `start` opened; also called after a `start` that failed or was cancelled."""
        await self.channels.close()
        if self.announcement is not None:
            await self.announcement.withdraw()
        await self.directory.close()


def _register(servicer: object, server: grpc.aio.Server) -> None:
    """Call the function that was generated with the servicer's base class."""
    for base in type(servicer).__mro__:
        add = getattr(sys.modules[base.__module__], f"add_{base.__name__}_to_server", None)
        if add is not None:
            add(servicer, server)
            return
    raise TypeError(f"{type(servicer).__name__} is not a servicer of generated code")
