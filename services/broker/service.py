"""The broker process: opens its shard, serves it, and ends when it no longer owns it.

`Broker` is what there is once the shard is open: its parts, and the servicers that lead to them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.serving.process.commit_config import check_pace, pace_of
from libs.serving.process.exits import ExitCause, first_cause
from libs.serving.process.ownership import Ownership
from libs.serving.process.removal import ShardRemoval, measure_draining
from libs.serving.process.shards import open_owned, wait_for_clock, wait_lost, watch_wal_store
from libs.serving.process.store_measures import measure_commits
from libs.serving.requests.budget import AnswerBudget
from libs.serving.service import Service
from libs.serving.snapshot_servicer import SnapshotServicer
from libs.serving.telemetry import Telemetry
from libs.storage.database.blobs import Blobs
from libs.storage.database.clocks import Clock, HybridClock
from libs.storage.database.roots import Root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Database
from libs.storage.objects.queue_names import QueueNames
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.shard_owners import Owner
from services.broker.config import BrokerConfig
from services.broker.core.moves import moving
from services.broker.dead_letters.mover import Mover
from services.broker.dead_letters.redrive_runner import RedriveRunner
from services.broker.dead_letters.removals import Archiver, Remover
from services.broker.dead_letters.settler import DeadLetterSettler
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.introductions import Introductions
from services.broker.delivery.lease_keeper import LeaseKeeper
from services.broker.delivery.message_cache import Ingests, Payloads
from services.broker.delivery.responses import stopping
from services.broker.delivery.streams import Streams
from services.broker.entries.conversion import EntryReader
from services.broker.entries.delayed import DelayedCleaner, DelayedWatches
from services.broker.entries.editor import Invalidator, MessageEditor
from services.broker.entries.finder import EntryFinder
from services.broker.entries.finished_pages import list_readers
from services.broker.entries.lister import EntryLister
from services.broker.entries.waiting_pages import WaitingReader
from services.broker.metrics import claim_waits, measure, measure_in_flight, measure_outbox
from services.broker.moves.arrivals import Arrivals
from services.broker.moves.arrived import ArrivedQueues
from services.broker.moves.departures import Departures
from services.broker.moves.targets import ArrivalTargets, PurgeEpochs
from services.broker.outbox.executor import Executor
from services.broker.outbox.pusher import Pusher, PushLimits
from services.broker.outbox.sender import OutboxSender
from services.broker.outbox.targets import IngestPushes, OtherBrokers, OutboxTarget
from services.broker.rpc.archived import ArchivedServicer
from services.broker.rpc.arrivals import ArrivalServicer
from services.broker.rpc.assignment import AssignmentServicer
from services.broker.rpc.consumer import ConsumerServicer
from services.broker.rpc.entries import DelayedServicer, EntryServicer
from services.broker.rpc.moves import MoveServicer
from services.broker.rpc.outbox import OutboxServicer
from services.broker.rpc.queues import Placement, QueueNameServicer, QueueServicer
from services.broker.rpc.redrives import DeadLetterServicer
from services.broker.rpc.removals import RemovalServicer
from services.broker.shard.drain import Drain
from services.broker.shard.load import ShardLoad
from services.broker.shard.loading import last_clock_ms, load_shard
from services.broker.shard.locations import Locations
from services.broker.shard.owner import ShardOwner
from services.broker.shard.removed_ingests import RemovedIngests
from services.broker.shard.replay_starts import ReplayStarts
from services.broker.shard.sweeper import Sweeper
from services.broker.shard.unique_names import UniqueNames
from slatemq.errors import WRONG_SHARD, NotFound, SlateMQError

if TYPE_CHECKING:
    from services.broker.events import BrokerRelay

log = logging.getLogger(__name__)


class Peers(NamedTuple):
    """How a broker reaches the others; tests put their own ingests and target in."""

    channels: Channels
    directory: TopologyDirectory
    make_ingests: Callable[[Channels], Ingests] = Ingests
    make_target: Callable[[Channels, TopologyDirectory, int], OutboxTarget] = IngestPushes


class Broker:
    def __init__(
        self,
        config: BrokerConfig,
        root: Root,
        peers: Peers,
        owner: ShardOwner,
        database: Database,
        last_ms: int,
        budget: AnswerBudget,
    ) -> None:
        """`last_ms` is the time of the last commit before the start."""
        shard, instance = config.shard, config.instance
        channels, directory, blobs = peers.channels, peers.directory, Blobs(root)
        self.owner = owner
        ingests = peers.make_ingests(channels)
        self.payloads = payloads = Payloads(ingests, config.payload_cache_bytes)
        bounds = config.waiting_claims_max, config.in_flight_max
        self.delivery = delivery = Dispatcher(owner, payloads, *bounds, budget)
        self.keeper = LeaseKeeper(owner)
        self.streams = Streams(shard, owner, delivery, self.keeper)
        self.introductions = Introductions(owner, ingests)
        lists, waiting = list_readers(database), WaitingReader(database)
        self.reader = reader = EntryReader(owner, database, ingests, budget)
        self.watches = DelayedWatches(owner, database, reader)
        self.cleaner = DelayedCleaner(owner, database, last_ms)
        others = Invalidator(channels, directory, shard)
        self.editor = MessageEditor(owner, delivery, payloads, ingests, others)
        limits = PushLimits(instance.payload_bytes_max, instance.max_message_delay_ms)
        target, names = peers.make_target(channels, directory, shard), QueueNames(root.objects)
        load = ShardLoad(owner.shard.queues)
        drain = Drain(owner, database, load, RemovedShards(root.objects))
        locations = Locations(names, partial(channels.is_removed, "broker"))
        self.placement = placement = Placement(locations, load, drain)
        pusher = Pusher(owner, target, OtherBrokers(channels, locations, shard), blobs, limits)
        self.executor = Executor(owner, pusher, shard)
        self.sender = OutboxSender(owner, database, target, shard)
        mover = Mover(owner, lists, pusher)
        archiver = Archiver(mover)
        self.redrives = RedriveRunner(mover, ingests, budget)
        self.sweeper = sweeper = Sweeper(owner, database)
        self.removed_ingests = RemovedIngests(owner, directory)
        starts = ReplayStarts(directory, channels, instance.replay_window_s)
        unique = UniqueNames(owner, names, channels, shard)
        self.arrived = ArrivedQueues(owner, sweeper, PurgeEpochs(directory, ingests))
        targets = ArrivalTargets(channels, shard)
        self.arrivals = Arrivals(shard, owner, database, sweeper, drain, names, unique, locations)
        self.departures = Departures(
            shard, owner, database, delivery, names, locations, targets, self.arrived
        )
        self.queues = QueueServicer(config, owner, delivery, sweeper, starts, unique, placement)
        self.assignments = AssignmentServicer(shard, owner, delivery, self.introductions, starts)
        lister = EntryLister(owner, waiting, lists, reader)
        finder = EntryFinder(owner, waiting, lists)
        entries = EntryServicer(shard, owner, lister, finder, reader, ingests)
        self.servicers = (
            self.queues,
            ConsumerServicer(shard, owner, delivery, self.streams, self.executor),
            self.assignments,
            entries,
            DelayedServicer(self.editor, self.watches, entries),
            DeadLetterServicer(shard, mover, self.redrives, DeadLetterSettler(mover, shard)),
            OutboxServicer(shard, owner, database, blobs, target, self.sender),
            ArchivedServicer(mover, archiver),
            RemovalServicer(mover, Remover(mover, database, instance.purge_grace_s), archiver),
            QueueNameServicer(unique),
            MoveServicer(shard, owner, self.departures),
            ArrivalServicer(shard, self.arrivals),
            _snapshots(root, database, starts, owner),
        )

    def works(self) -> list[Coroutine[Any, Any, object]]:
        """What runs in the background until it is cancelled; if one ends, the broker does."""
        return [
            self.owner.commits.run(),
            self.owner.lost_time.watch(),
            self.owner.end_leases(),
            self.keeper.run(),
            self.sweeper.run(),
            self.owner.watch_due(),
            self.cleaner.run(),
            self.redrives.run(),
            self.executor.forget(),
            self.sender.run(),
            self.placement.load.run(),
            self.arrivals.run(),
            self.departures.run(),
            self.arrived.run(),
            self.removed_ingests.run(),
        ]

    def drain(self) -> None:
        """Ends waiting claims and streams; the leases that they have go on.

        No lease ends from now on: acks and extensions are refused.
        """
        self.owner.lost_time.hold()
        self.queues.drain()
        self.watches.drain()
        self.streams.drain()
        self.delivery.drain(stopping())

    async def close(self) -> None:
        await self.introductions.close()
        await self.delivery.close()


def _snapshots(
    root: Root, database: Database, starts: ReplayStarts, owner: ShardOwner
) -> SnapshotServicer:
    async def settled() -> None:
        await starts.settled()
        await owner.durable()  # also what a caller did not wait for

    prove = owner.commits.prove_ownership
    return SnapshotServicer(root.snapshots(database), owner.clock.now_ms, prove, settled=settled)


class BrokerService(Service[BrokerConfig]):
    kind = "broker"
    owns_shard = True

    def __init__(
        self,
        config: BrokerConfig,
        telemetry: Telemetry,
        root: Root,
        *,
        make_clock: Callable[[int], Clock] = HybridClock,
        wall: Callable[[], float] = time.time,
        make_ingests: Callable[[Channels], Ingests] = Ingests,
        make_target: Callable[[Channels, TopologyDirectory, int], OutboxTarget] = IngestPushes,
    ) -> None:
        """Prepare; `start` opens. The last four are for tests."""
        super().__init__(config, config.shard, telemetry, root)
        check_pace(config)
        self._removal = ShardRemoval(root, self.directory, f"broker/{config.shard}")
        self._make_clock = make_clock
        self._wall = wall
        self._peers = Peers(self.channels, self.directory, make_ingests, make_target)
        self._budget = AnswerBudget(config.delivery_bytes_max, "delivery_bytes_max")
        self._relay: BrokerRelay | None = None
        if config.queue is not None:
            # Loaded only with a queue backend: direct mode needs nothing of it.
            relays = import_module("services.broker.events")
            self._relay = relays.BrokerRelay(self.name, config.queue, telemetry)
        self._tasks: list[asyncio.Task[object]] = []
        self.broker: Broker | None = None

    @property
    def note(self) -> str:
        if self.broker is None:
            return ""
        notes = self.broker.delivery.in_flight.note, self.broker.owner.commits.pace.note
        return "; ".join(filter(None, (*notes, super().note)))

    @property
    def held_bytes(self) -> int:
        """Messages on their way to consumers, and what is not stored yet."""
        if self.broker is None:
            return 0
        return self._budget.used_bytes + self.broker.owner.commits.uncommitted_bytes

    @property
    def memory_parts(self) -> Mapping[str, int]:
        if self.broker is None:
            return {}
        owner = self.broker.owner
        return {
            "lanes": owner.shard.lanes.held_bytes,
            "payload_cache": self.broker.payloads.size_bytes,
            "deliveries": self._budget.used_bytes,
            "uncommitted": owner.commits.uncommitted_bytes,
        }

    @property
    def cache_lookups(self) -> Mapping[str, tuple[int, int]]:
        if self.broker is None:
            return {}
        payloads = self.broker.payloads
        return {"payloads": (payloads.hits_count, payloads.misses_count)}

    async def directed(self, error: NotFound) -> SlateMQError:
        if self.broker is None:
            return error
        directed = await self.broker.placement.locations.directed(error, self._config.shard)
        owner = self.broker.owner
        if (
            directed is error
            and error.reason != WRONG_SHARD
            and owner.shard.moves.has_arrived(error.resource_name, owner.clock.now_ms())
        ):
            return moving(error.resource_name)  # Since the error was made.
        return directed

    def servicers(self) -> Iterable[object]:
        assert self.broker is not None, "called after start"
        return self.broker.servicers

    async def start(self, address: str, peer_address: str) -> None:
        """Opens the shard, which fences its former owner, and reads where it stands."""
        owner, database, last_ms = await self._load(Owner(self.owner_name, peer_address))
        self.broker = Broker(
            self._config,
            self._root,
            self._peers,
            owner,
            database,
            last_ms,
            self._budget,
        )
        if self._telemetry.enabled:
            measure_commits(self._telemetry.meter, owner.commits)
            self.broker.delivery.record_wait = claim_waits(self._telemetry)
        measure(self._telemetry, owner.shard)
        measure_outbox(self._telemetry, owner.shard.outbox)
        measure_in_flight(self._telemetry, self.broker.delivery.in_flight)
        self.shard_drain = drain = self.broker.placement.drain
        measure_draining(self._telemetry.meter, drain)
        self._tasks += [asyncio.create_task(work) for work in self.broker.works()]
        await drain.finish()
        await self._announce(owner, address, peer_address)

    async def _announce(self, owner: ShardOwner, address: str, peer_address: str) -> None:
        """Says where the shard is, once it is proven ours, and begins to publish its events."""
        config, shard = self._config, owner.shard
        peer = Peer("broker", config.shard, address, peer_address)
        self.announcement = Ownership(owner.commits, self.directory, peer)
        await self.announcement.announce()
        log.info(
            "shard %d: %d queues, revision %d", config.shard, len(shard.queues), shard.revision
        )
        if self._relay is not None:
            self._relay.begin_publishing()

    async def _load(self, process: Owner) -> tuple[ShardOwner, Database, int]:
        """The shard as its last commit left it, its database, and the time of that commit."""
        config = self._config
        name = f"broker/{config.shard}"
        await self._removal.check_start()
        database = await open_owned(self._root, name, Kind.BROKER, process)
        self.database = database
        last_ms = await last_clock_ms(database)
        await wait_for_clock(database, self._wall)
        clock = self._make_clock(last_ms)
        owner = ShardOwner(
            database,
            await load_shard(database, last_ms),
            clock,
            pace=pace_of(config, self._root, database),
            bytes_max=config.uncommitted_bytes_max,
            held_ms=last_ms,
        )
        owner.shard.lanes.bytes_max = config.lane_bytes_max
        owner.shard.outbox.rows_max = config.outbox_rows_max
        owner.shard.outbox.bytes_max = config.outbox_bytes_max
        owner.shard.redrives.kept = config.redrives_kept
        owner.shard.redrives.retention_s = config.redrive_retention_s
        if self._relay is not None:
            await self._relay.record_changes(owner, database)
        return owner, database, last_ms

    async def wait_fatal(self) -> ExitCause:
        """Ends when a background task does: the shard is not ours any more, or a commit failed."""
        assert self.database is not None, "called after start"
        assert self.shard_drain is not None, "called after start"
        removed = self._removal.wait(self.shard_drain.removed)
        watch = watch_wal_store(self._root, self.database)
        ends = [wait_lost(self.database, self._tasks), watch, removed]
        return await first_cause(*ends, *([self._relay.wait_fatal()] if self._relay else ()))

    def opened(self) -> None:
        assert self.broker is not None, "called after start"
        self.broker.owner.lost_time.go_on()

    async def drain(self) -> None:
        if self.broker is not None:
            self.broker.drain()

    async def stop(self) -> None:
        """Commits what is left and closes."""
        if self.broker is not None:
            await self.broker.close()
        if self._relay is not None:
            await self._relay.stop()
        if self.broker is not None and self.broker.owner.commits.failed is None:
            await self.broker.owner.commits.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await super().stop()
        if self.database is not None:
            await self.database.close()
            if self.shard_drain is not None and self.shard_drain.removed.is_set():
                await self._removal.finish()
