"""All servicers of a broker, built when its shard is open."""

from __future__ import annotations

from typing import NamedTuple

from libs.serving.events.servicer import EventsServicer
from libs.serving.snapshot_servicer import SnapshotServicer
from services.broker.rpc.assignment import AssignmentServicer
from services.broker.rpc.consumer import ConsumerServicer
from services.broker.rpc.entries import DelayedServicer, EntryServicer
from services.broker.rpc.outbox import OutboxServicer
from services.broker.rpc.queues import QueueNameServicer, QueueServicer
from services.broker.rpc.redrives import DeadLetterServicer
from services.broker.rpc.removals import RemovalServicer


class Servicers(NamedTuple):
    """One servicer for each gRPC service of a broker, besides those that every process has."""

    queues: QueueServicer
    consumers: ConsumerServicer
    assignments: AssignmentServicer
    entries: EntryServicer
    delayed: DelayedServicer
    dead_letters: DeadLetterServicer
    outbox: OutboxServicer
    removals: RemovalServicer
    queue_names: QueueNameServicer
    snapshots: SnapshotServicer
    events: EventsServicer
