"""All servicers of a broker, built when its shard is open, and registered together."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio

from libs.serving.events.servicer import EventsServicer
from libs.serving.instance.servicer import InstanceServicer
from libs.serving.peers.topology import TopologyServicer
from libs.serving.snapshot_servicer import SnapshotServicer
from services.broker.rpc.assignment import AssignmentServicer
from services.broker.rpc.consumer import ConsumerServicer
from services.broker.rpc.delayed import DelayedServicer
from services.broker.rpc.entries import EntryServicer
from services.broker.rpc.outbox import OutboxServicer
from services.broker.rpc.queue_names import QueueNameServicer
from services.broker.rpc.queues import QueueServicer
from services.broker.rpc.redrives import DeadLetterServicer
from services.broker.rpc.removals import RemovalServicer
from slatemq.v1 import (
    assignment_pb2_grpc,
    consumer_pb2_grpc,
    entry_pb2_grpc,
    events_pb2_grpc,
    instance_pb2_grpc,
    outbox_pb2_grpc,
    queue_name_pb2_grpc,
    queue_pb2_grpc,
    removal_pb2_grpc,
    snapshot_pb2_grpc,
    topology_pb2_grpc,
)


@dataclass(frozen=True, slots=True)
class Servicers:
    """One servicer for each gRPC service of a broker."""

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
    instance: InstanceServicer
    topology: TopologyServicer

    def add_to(self, server: grpc.aio.Server) -> None:
        queue_pb2_grpc.add_QueueServiceServicer_to_server(self.queues, server)
        consumer_pb2_grpc.add_ConsumerServiceServicer_to_server(self.consumers, server)
        assignment_pb2_grpc.add_AssignmentServiceServicer_to_server(self.assignments, server)
        entry_pb2_grpc.add_EntryServiceServicer_to_server(self.entries, server)
        entry_pb2_grpc.add_DelayedServiceServicer_to_server(self.delayed, server)
        entry_pb2_grpc.add_DeadLetterServiceServicer_to_server(self.dead_letters, server)
        outbox_pb2_grpc.add_OutboxServiceServicer_to_server(self.outbox, server)
        removal_pb2_grpc.add_RemovalServiceServicer_to_server(self.removals, server)
        queue_name_pb2_grpc.add_QueueNameServiceServicer_to_server(self.queue_names, server)
        snapshot_pb2_grpc.add_SnapshotServiceServicer_to_server(self.snapshots, server)
        events_pb2_grpc.add_EventsServiceServicer_to_server(self.events, server)
        instance_pb2_grpc.add_InstanceServiceServicer_to_server(self.instance, server)
        topology_pb2_grpc.add_TopologyServiceServicer_to_server(self.topology, server)
