"""The rooms of a broker whose shard is open, and the servicers that lead into them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.requests.budget import AnswerBudget
from libs.serving.snapshot_servicer import SnapshotServicer
from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root
from libs.storage.database.slate import Database
from libs.storage.objects.queue_names import QueueNames
from services.broker.config import BrokerConfig
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
from services.broker.outbox.executor import Executor
from services.broker.outbox.pusher import Pusher, PushLimits
from services.broker.outbox.sender import OutboxSender
from services.broker.outbox.targets import IngestPushes, OtherBrokers, OutboxTarget
from services.broker.rpc.assignment import AssignmentServicer
from services.broker.rpc.consumer import ConsumerServicer
from services.broker.rpc.entries import DelayedServicer, EntryServicer
from services.broker.rpc.outbox import OutboxServicer
from services.broker.rpc.queues import QueueNameServicer, QueueServicer
from services.broker.rpc.redrives import DeadLetterServicer
from services.broker.rpc.removals import RemovalServicer
from services.broker.shard.owner import ShardOwner
from services.broker.shard.replay_starts import ReplayStarts
from services.broker.shard.sweeper import Sweeper
from services.broker.shard.unique_names import UniqueNames


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
        payloads = Payloads(ingests, config.payload_cache_bytes)
        self.delivery = Dispatcher(
            owner, payloads, config.waiting_claims_max, config.in_flight_max, budget
        )
        self.keeper = LeaseKeeper(owner)
        self.streams = Streams(shard, owner, self.delivery, self.keeper)
        self.introductions = Introductions(owner, ingests)
        lists, waiting = list_readers(database), WaitingReader(database)
        self.reader = reader = EntryReader(owner, database, ingests, budget)
        self.watches = DelayedWatches(owner, database, reader)
        self.cleaner = DelayedCleaner(owner, database, last_ms)
        others = Invalidator(channels, directory, shard)
        self.editor = MessageEditor(owner, self.delivery, payloads, ingests, others)
        limits = PushLimits(instance.payload_bytes_max, instance.max_message_delay_ms)
        target = peers.make_target(channels, directory, shard)
        pusher = Pusher(owner, target, OtherBrokers(channels, directory, shard), blobs, limits)
        self.executor = Executor(owner, pusher, shard)
        self.sender = OutboxSender(owner, database, target, shard)
        mover = Mover(owner, lists, pusher)
        self.redrives = RedriveRunner(mover, ingests)
        self.sweeper = Sweeper(owner, database)
        starts = ReplayStarts(directory, channels, instance.replay_window_s)
        names = UniqueNames(owner, QueueNames(root.objects), channels, shard)
        self.queues = QueueServicer(config, owner, self.delivery, self.sweeper, starts, names)
        self.assignments = AssignmentServicer(
            shard, owner, self.delivery, self.introductions, starts
        )
        lister = EntryLister(owner, waiting, lists, reader)
        finder = EntryFinder(owner, waiting, lists)
        entries = EntryServicer(shard, owner, lister, finder, reader, ingests)
        self.servicers = (
            self.queues,
            ConsumerServicer(shard, owner, self.delivery, self.streams, self.executor),
            self.assignments,
            entries,
            DelayedServicer(self.editor, self.watches, entries),
            DeadLetterServicer(shard, mover, self.redrives, DeadLetterSettler(mover, shard)),
            OutboxServicer(shard, owner, database, blobs, target, self.sender),
            RemovalServicer(mover, Remover(mover, instance.purge_grace_s), Archiver(mover)),
            QueueNameServicer(shard, names),
            _snapshots(root, database, starts, owner),
        )

    def works(self) -> list[Coroutine[Any, Any, object]]:
        """What runs in the background until it is cancelled; if one ends, the broker does."""
        return [
            self.owner.commits.run(),
            self.owner.end_leases(),
            self.keeper.run(),
            self.sweeper.run(),
            self.owner.watch_due(),
            self.cleaner.run(),
            self.redrives.run(),
            self.executor.forget(),
            self.sender.run(),
        ]

    def drain(self) -> None:
        """Ends waiting claims and streams; the leases that they have go on."""
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
