"""The rooms of a broker whose shard is open, and the servicers that lead into them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from libs.serving.events.servicer import EventsServicer
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.requests.budget import AnswerBudget
from libs.serving.snapshot_servicer import SnapshotServicer
from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root
from libs.storage.database.slate import Database
from libs.storage.objects.queue_names import QueueNames
from services.broker.config import BrokerConfig
from services.broker.dead_letters.dead_letters import DeadLetters
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.introductions import Introductions
from services.broker.delivery.lease_keeper import LeaseKeeper
from services.broker.delivery.message_cache import Ingests, Payloads
from services.broker.delivery.responses import stopping
from services.broker.delivery.streams import Streams
from services.broker.entries.editor import Invalidator
from services.broker.entries.entries import Entries
from services.broker.outbox.conversion import PushLimits
from services.broker.outbox.executor import Executor
from services.broker.outbox.pusher import Pusher
from services.broker.outbox.sender import OutboxSender
from services.broker.outbox.targets import IngestPushes, OtherBrokers, OutboxTarget
from services.broker.rpc.assignment import AssignmentServicer
from services.broker.rpc.consumer import ConsumerServicer
from services.broker.rpc.entries import DelayedServicer, EntryServicer
from services.broker.rpc.outbox import OutboxServicer
from services.broker.rpc.queues import QueueNameServicer, QueueServicer
from services.broker.rpc.redrives import DeadLetterServicer
from services.broker.rpc.removals import RemovalServicer
from services.broker.rpc.servicers import Servicers
from services.broker.shard.owner import ShardOwner
from services.broker.shard.replay_starts import ReplayStarts
from services.broker.shard.sweeper import Sweeper
from services.broker.shard.unique_names import UniqueNames

if TYPE_CHECKING:
    from services.broker.events.relay import BrokerRelay


class Peers(NamedTuple):
    """How a broker reaches the others; tests put their own ingests and target in."""

    channels: Channels
    directory: TopologyDirectory
    make_ingests: Callable[[Channels], Ingests] = Ingests
    make_target: Callable[[Channels, TopologyDirectory, int], OutboxTarget] = IngestPushes


class Broker:
    """A broker whose shard is open."""

    def __init__(
        self,
        config: BrokerConfig,
        root: Root,
        peers: Peers,
        owner: ShardOwner,
        database: Database,
        last_ms: int,
        budget: AnswerBudget,
        relay: BrokerRelay | None,
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
        invalidator = Invalidator(channels, directory, shard)
        self.entries = entries = Entries(
            owner, database, last_ms, self.delivery, payloads, ingests, invalidator, budget
        )
        limits = PushLimits(instance.payload_bytes_max, instance.max_message_delay_ms)
        target = peers.make_target(channels, directory, shard)
        pusher = Pusher(owner, target, OtherBrokers(channels, directory, shard), blobs, limits)
        self.executor = Executor(owner, pusher, shard)
        self.sender = OutboxSender(owner, database, target, shard)
        self.dead_letters = DeadLetters(
            shard, owner, entries.lists, pusher, ingests, instance.purge_grace_s
        )
        self.sweeper = Sweeper(owner, database)
        starts = ReplayStarts(directory, channels, instance.replay_window_s)
        names = UniqueNames(owner, QueueNames(root.objects), channels, shard)
        entry_servicer = EntryServicer(shard, owner, entries, ingests)
        self.servicers = Servicers(
            QueueServicer(config, owner, self.delivery, self.sweeper, starts, names),
            ConsumerServicer(shard, owner, self.delivery, self.streams, self.executor),
            AssignmentServicer(shard, owner, self.delivery, self.introductions, starts),
            entry_servicer,
            DelayedServicer(entries.editor, entries.watches, entry_servicer),
            DeadLetterServicer(shard, owner, self.dead_letters),
            OutboxServicer(shard, owner, database, blobs, target, self.sender),
            RemovalServicer(owner, self.dead_letters),
            QueueNameServicer(shard, names),
            SnapshotServicer(
                root.snapshots(database),
                owner.clock.now_ms,
                owner.commits.prove_ownership,
                settled=partial(_settled, starts, owner),
            ),
            EventsServicer(relay),
        )

    def works(self) -> list[Coroutine[Any, Any, object]]:
        """What runs in the background until it is cancelled; if one ends, the broker does."""
        return [
            self.owner.commits.run(),
            self.owner.end_leases(),
            self.keeper.run(),
            self.sweeper.run(),
            self.owner.watch_due(),
            self.entries.cleaner.run(),
            self.dead_letters.redrives.run(),
            self.executor.forget(),
            self.sender.run(),
        ]

    def drain(self) -> None:
        """Ends waiting claims and streams; the leases that they have go on."""
        self.servicers.queues.drain()
        self.entries.watches.drain()
        self.streams.drain()
        self.delivery.drain(stopping())

    async def close(self) -> None:
        await self.introductions.close()
        await self.delivery.close()


async def _settled(starts: ReplayStarts, owner: ShardOwner) -> None:
    await starts.settled()
    await owner.durable()  # also what a caller did not wait for
