"""The broker process: opens its shard, serves it, and ends when it no longer owns it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import grpc.aio

from libs.serving.events.servicer import SERVICE_NAME as EVENTS_SERVICE
from libs.serving.events.servicer import EventsServicer
from libs.serving.http.parts import HttpParts
from libs.serving.instance.servicer import SERVICE_NAME as INSTANCE_SERVICE
from libs.serving.instance.servicer import InstanceServicer
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.serving.peers.topology_servicer import SERVICE_NAME as TOPOLOGY_SERVICE
from libs.serving.peers.topology_servicer import TopologyServicer
from libs.serving.process.exits import ExitCause, first_cause
from libs.serving.process.ownership import Ownership
from libs.serving.process.shards import wait_for_clock, wait_lost
from libs.serving.requests.answer_budget import AnswerBudget
from libs.serving.snapshot_servicer import SERVICE_NAME as SNAPSHOT_SERVICE
from libs.serving.snapshot_servicer import SnapshotServicer
from libs.serving.telemetry import Telemetry
from libs.storage.database.blobs import Blobs
from libs.storage.database.clocks import Clock, HybridClock
from libs.storage.database.roots import Root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Database
from libs.storage.objects.probe import probe_store
from libs.storage.objects.queue_names import QueueNames
from services.broker.config import BrokerConfig
from services.broker.dead_letters.archiver import Archiver
from services.broker.dead_letters.mover import Mover
from services.broker.dead_letters.redrive_runner import RedriveRunner
from services.broker.dead_letters.remover import Remover
from services.broker.dead_letters.settler import DeadLetterSettler
from services.broker.delivery.dispatcher import Delivery
from services.broker.delivery.introductions import Introductions
from services.broker.delivery.invalidation import Forgetting
from services.broker.delivery.lease_keeper import LeaseKeeper
from services.broker.delivery.message_cache import IngestClient, Ingests, Payloads
from services.broker.delivery.responses import stopping
from services.broker.delivery.streams import Streams
from services.broker.entries.conversion import EntryReader
from services.broker.entries.delayed_cleanup import DelayedCleaner
from services.broker.entries.delayed_watch import DelayedWatches
from services.broker.entries.editor import MessageEditor
from services.broker.entries.finder import EntryFinder
from services.broker.entries.finished_pages import list_readers
from services.broker.entries.lister import EntryLister
from services.broker.entries.waiting_pages import WaitingReader
from services.broker.metrics import measure, measure_outbox
from services.broker.outbox.conversion import PushLimits
from services.broker.outbox.executor import Executor
from services.broker.outbox.pusher import Pusher
from services.broker.outbox.sender import OutboxSender
from services.broker.outbox.targets import IngestPushes, OtherBrokers, OutboxTarget
from services.broker.rpc.assignment import AssignmentServicer
from services.broker.rpc.consumer import ConsumerServicer
from services.broker.rpc.delayed import DelayedServicer
from services.broker.rpc.entries import EntryServicer
from services.broker.rpc.outbox import OutboxServicer
from services.broker.rpc.queue_names import QueueNameServicer
from services.broker.rpc.queues import QueueServicer
from services.broker.rpc.redrives import DeadLetterServicer
from services.broker.rpc.removals import RemovalServicer
from services.broker.rpc.servicers import Servicers
from services.broker.shard.loading import last_clock_ms, load_shard
from services.broker.shard.owner import ShardOwner
from services.broker.shard.replay_starts import ReplayStarts
from services.broker.shard.sweeper import Sweeper
from services.broker.shard.unique_names import UniqueNames
from slatemq.v1 import (
    assignment_pb2,
    consumer_pb2,
    entry_pb2,
    outbox_pb2,
    queue_name_pb2,
    queue_pb2,
    removal_pb2,
)

if TYPE_CHECKING:
    from services.broker.events.relay import BrokerRelay

log = logging.getLogger(__name__)

GRPC_SERVICES = (
    *(
        pb2.DESCRIPTOR.services_by_name[name].full_name
        for pb2, name in (
            (queue_pb2, "QueueService"),
            (consumer_pb2, "ConsumerService"),
            (assignment_pb2, "AssignmentService"),
            (entry_pb2, "EntryService"),
            (entry_pb2, "DelayedService"),
            (entry_pb2, "DeadLetterService"),
            (outbox_pb2, "OutboxService"),
            (removal_pb2, "RemovalService"),
            (queue_name_pb2, "QueueNameService"),
        )
    ),
    EVENTS_SERVICE,
    INSTANCE_SERVICE,
    SNAPSHOT_SERVICE,
    TOPOLOGY_SERVICE,
)


class BrokerService:
    """See libs.serving.server.Service."""

    def __init__(
        self,
        config: BrokerConfig,
        telemetry: Telemetry,
        root: Root,
        *,
        make_clock: Callable[[int], Clock] = HybridClock,
        wall: Callable[[], float] = time.time,
        make_ingests: Callable[[Channels], Ingests] = IngestClient,
        make_target: Callable[[Channels, TopologyDirectory, int], OutboxTarget] = IngestPushes,
    ) -> None:
        """Prepare; `start` opens. The last four are for tests."""
        self._config = config
        self._telemetry = telemetry
        self._make_clock = make_clock
        self._wall = wall
        self._make_ingests = make_ingests
        self._make_target = make_target
        self._root = root
        self._directory = TopologyDirectory(self._root.objects)
        self._channels = Channels(
            self._directory,
            payload_bytes_max=config.instance.payload_bytes_max,
            carrier=telemetry.carrier,
        )
        self._budget = AnswerBudget(config.delivery_bytes_max, "delivery_bytes_max")
        instance = config.instance
        self._limits = PushLimits(instance.payload_bytes_max, instance.max_message_delay_ms)
        self._relay: BrokerRelay | None = None
        if config.queue is not None:
            # Loaded when it is wanted: direct mode has nothing of it.
            relays = import_module("services.broker.events.relay")
            self._relay = relays.BrokerRelay(self.name, config.queue, telemetry)
        self._forgetting = Forgetting(self._channels, self._directory, config.shard)
        self._tasks: list[asyncio.Task[object]] = []
        self._database: Database | None = None
        self._owner: ShardOwner | None = None
        self._delivery: Delivery | None = None
        self._streams: Streams | None = None
        self.keeper: LeaseKeeper | None = None
        self.announcement: Ownership | None = None
        self._introductions: Introductions | None = None
        self._watches: DelayedWatches | None = None
        self.servicers: Servicers | None = None

    @property
    def name(self) -> str:
        """For logs."""
        return f"broker-{self._config.shard}"

    @property
    def grpc_services(self) -> Sequence[str]:
        """For health and reflection."""
        return GRPC_SERVICES

    @property
    def directory(self) -> TopologyDirectory:
        """Knows where the services are that this one does not have."""
        return self._directory

    @property
    def http_parts(self) -> HttpParts:
        """What it adds to the HTTP port: the state of the backend of events."""
        return HttpParts(queue_health=self._relay.health if self._relay is not None else None)

    @property
    def held_bytes(self) -> int:
        """Messages on their way to consumers, and what is not stored yet."""
        if self._owner is None:
            return 0
        return self._budget.used_bytes + self._owner.commits.uncommitted_bytes

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers all servicers."""
        assert self.servicers is not None, "called after start"
        self.servicers.add_to(server)

    async def start(self, address: str) -> None:
        """Opens the shard, which fences whoever had it, and reads where it stands."""
        config = self._config
        owner, database, last_ms = await self._load()
        ingests = self._make_ingests(self._channels)
        payloads = Payloads(ingests, config.payload_cache_bytes)
        budget = self._budget
        delivery = Delivery(owner, payloads, config.waiting_claims_max, budget)
        sweeper = Sweeper(owner, database)
        cleaner = DelayedCleaner(owner, database, last_ms)
        reader = EntryReader(owner, database, ingests, budget)
        self._watches = DelayedWatches(owner, database, reader)
        starts = ReplayStarts(self._directory, self._channels, config.instance.replay_window_s)
        names = UniqueNames(owner, QueueNames(self._root.objects), self._channels, config.shard)
        target = self._make_target(self._channels, self._directory, config.shard)
        others = OtherBrokers(self._channels, self._directory, config.shard)
        blobs = Blobs(self._root)
        pusher = Pusher(owner, target, others, blobs, self._limits)
        executor = Executor(owner, pusher, config.shard)
        sender = OutboxSender(owner, database, target, config.shard)
        keeper = self.keeper = LeaseKeeper(owner)
        self._streams = Streams(config.shard, owner, delivery, keeper)
        self._introductions = Introductions(owner, ingests)
        waiting, lists = WaitingReader(database), list_readers(database)
        finder = EntryFinder(owner, waiting, lists)
        lister = EntryLister(owner, waiting, lists, reader)
        entries = EntryServicer(config.shard, owner, finder, lister, reader, ingests)
        editor = MessageEditor(owner, delivery, payloads, ingests, self._forgetting)
        mover = Mover(owner, lists, pusher)
        runner = RedriveRunner(mover, ingests)
        settler = DeadLetterSettler(mover, config.shard)
        archiver = Archiver(mover)
        remover = Remover(mover, config.instance.purge_grace_s)
        self._owner, self._delivery = owner, delivery
        measure(self._telemetry, owner.shard)
        measure_outbox(self._telemetry, owner.shard.outbox)
        self._run(
            owner.commits.run(),
            owner.end_leases(),
            keeper.run(),
            sweeper.run(),
            owner.watch_due(),
            cleaner.run(),
            runner.run(),
            executor.forget(),
            sender.run(),
        )
        await self._announce(owner, address)
        self.servicers = Servicers(
            QueueServicer(
                config.shard,
                owner,
                delivery,
                sweeper,
                starts,
                names,
                max_delay_ms=config.instance.max_message_delay_ms,
                changes_per_s=config.queue_changes_per_s,
            ),
            ConsumerServicer(config.shard, owner, delivery, self._streams, executor),
            AssignmentServicer(config.shard, owner, delivery, self._introductions, starts),
            entries,
            DelayedServicer(editor, self._watches, entries.find_waiting),
            DeadLetterServicer(config.shard, owner, mover, runner, settler),
            OutboxServicer(config.shard, owner, database, blobs, target, sender),
            RemovalServicer(owner, remover, archiver, self._limits),
            QueueNameServicer(config.shard, names),
            self._snapshots(owner, database, starts),
            EventsServicer(self._relay),
            InstanceServicer(self._root.objects, self._directory, config),
            TopologyServicer(self._directory),
        )

    async def _announce(self, owner: ShardOwner, address: str) -> None:
        """Says where the shard is, once it is proven ours, and begins to publish its events."""
        config, shard = self._config, owner.shard
        peer = Peer("broker", config.shard, address, config.peer_address)
        self.announcement = Ownership(owner.commits, self._directory, peer)
        await self.announcement.announce()
        log.info(
            "shard %d: %d queues, revision %d", config.shard, len(shard.queues), shard.revision
        )
        if self._relay is not None:
            self._relay.begin_publishing()

    def _run(self, *works: Coroutine[Any, Any, object]) -> None:
        self._tasks += [asyncio.create_task(work) for work in works]

    def _snapshots(
        self, owner: ShardOwner, database: Database, starts: ReplayStarts
    ) -> SnapshotServicer:
        return SnapshotServicer(
            self._root.snapshots(database),
            owner.clock.now_ms,
            owner.commits.prove_ownership,
            settled=partial(_settled, starts, owner),
        )

    async def _load(self) -> tuple[ShardOwner, Database, int]:
        """The shard as its last commit left it, its database, and the time of that commit."""
        config = self._config
        await probe_store(self._root.objects)
        database = await self._root.database(f"broker/{config.shard}", Kind.BROKER)
        self._database = database
        last_ms = await last_clock_ms(database)
        await wait_for_clock(database, self._wall)
        clock = self._make_clock(last_ms)
        owner = ShardOwner(
            database,
            await load_shard(database, last_ms, clock.now_ms()),
            clock,
            interval_ms=config.commit_interval_ms,
            bytes_max=config.uncommitted_bytes_max,
        )
        owner.shard.lanes.bytes_max = config.lane_bytes_max
        owner.shard.outbox.rows_max = config.outbox_rows_max
        owner.shard.outbox.bytes_max = config.outbox_bytes_max
        owner.shard.redrives.kept = config.redrives_kept
        owner.shard.redrives.retention_s = config.redrive_retention_s
        if self._relay is not None:
            await self._relay.record(owner, database)
        return owner, database, last_ms

    async def wait_fatal(self) -> ExitCause:
        """Ends when a background task does: the shard is not ours any more, or a commit failed."""
        assert self._database is not None, "called after start"
        lost = wait_lost(self._database, self._tasks)
        return await (lost if self._relay is None else first_cause(lost, self._relay.wait_fatal()))

    async def drain(self) -> None:
        """Sends the waiting away; what they hold stays theirs."""
        if self.servicers is not None:
            self.servicers.queues.drain()
        if self._watches is not None:
            self._watches.drain()
        if self._streams is not None:
            self._streams.drain()
        if self._delivery is not None:
            self._delivery.drain(stopping())

    async def stop(self) -> None:
        """Commits what is left and closes."""
        if self._introductions is not None:
            await self._introductions.close()
        if self._delivery is not None:
            await self._delivery.close()
        if self._relay is not None:
            await self._relay.stop()
        if self._owner is not None and self._owner.commits.failed is None:
            await self._owner.commits.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._channels.close()
        await self._directory.close()
        if self._database is not None:
            await self._database.close()


async def _settled(starts: ReplayStarts, owner: ShardOwner) -> None:
    await starts.settled()
    await owner.durable()  # also what a caller did not wait for
