"""The janitor of a simulated world: it decides on snapshots, and has owners remove what is over.

What the janitor's jobs do with Spark, said in a few lines: an ingest's snapshots first, then the
brokers'; a message goes that every broker has judged, no replay has before it, and no list has in
it. Purges carry the epoch of their snapshot.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.errors import StorageError
from libs.storage.layout.keys import (
    RecordType,
    key_head,
    log_range,
)
from libs.storage.layout.own_keys import (
    parse_routing_cursor_key,
    replay_range,
    routing_cursor_range,
)
from libs.storage.records.metadata import decode_log_entry
from libs.storage.records.queues import decode_active, decode_failed
from libs.storage.records.replay_records import decode_replay
from libs.storage.records.states import decode_routing_cursor
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import SlateMQError
from slatemq.v1 import purge_pb2, snapshot_pb2
from slatemq.v1.purge_pb2_grpc import PurgeServiceStub
from slatemq.v1.snapshot_pb2_grpc import SnapshotServiceStub
from tests.simulation.cluster import GRACE_S, Cluster
from tests.simulation.judge import Violated
from tests.simulation.store import Rows, SimulatedRoot
from tests.simulation.workload import BUGS, INGESTS, now_ms

CALL_S: Final = 10.0


class Janitor:
    """Attributes:
    stopping: No more runs from now on.
    purged: Messages that were deleted.
    """

    def __init__(self, cluster: Cluster, seed: str, brokers: int) -> None:
        self._cluster = cluster
        self._brokers = brokers
        self._chance = random.Random(f"{seed}/janitor")
        self.stopping = False
        self.purged = 0

    def begin(self) -> asyncio.Task[None]:
        return self._cluster.client_machine("janitor").run(self._run())

    async def _run(self) -> None:
        directory = TopologyDirectory(SimulatedRoot(self._cluster.store).objects)
        channels = Channels(directory)
        while not self.stopping:
            await asyncio.sleep(self._chance.uniform(0.5, 4.0))
            try:
                with raising_slatemq_errors():
                    await self._purge(channels)
            except (SlateMQError, StorageError) as error:
                if isinstance(error, BUGS):
                    raise Violated(f"the janitor: {error!r}") from error
                self._cluster.tell(f"the janitor: {error}")

    async def _purge(self, channels: Channels) -> None:
        logs = {shard: await self._snapshot(channels, "ingest", shard) for shard in range(INGESTS)}
        brokers = [
            (await self._snapshot(channels, "broker", shard))[0] for shard in range(self._brokers)
        ]
        needed = {message for rows in brokers for message in _needed(rows)}
        before_ms = now_ms() - (self._cluster.window_s + GRACE_S) * 1000
        await asyncio.sleep(self._chance.choice((0, 0, 3)))  # A run takes its time.
        for shard, (rows, epoch) in logs.items():
            judged = min(_judged(broker, shard) for broker in brokers)
            over = [
                message
                for message, received_ms in _logged(rows)
                if message <= judged and received_ms < before_ms and message not in needed
            ]
            if not over:
                continue
            stub = PurgeServiceStub(await channels.to("ingest", shard))
            request = purge_pb2.PurgeMessagesRequest(
                purge_epoch=epoch,
                reason=purge_pb2.PURGE_REASON_UNREFERENCED,
                message_ids=over,
            )
            answer = await stub.PurgeMessages(request, timeout=CALL_S)
            self.purged += answer.purged_count

    async def _snapshot(self, channels: Channels, service: str, shard: int) -> tuple[Rows, int]:
        stub = SnapshotServiceStub(await channels.to(service, shard))
        request = snapshot_pb2.CreateSnapshotRequest(lifetime_ms=10_000)
        taken = (await stub.CreateSnapshot(request, timeout=CALL_S)).snapshot
        return self._cluster.store.snapshots[taken.snapshot_id], taken.purge_epoch


def _needed(rows: Rows) -> Iterator[int]:
    """The messages in any list of what waits, is in flight or failed."""
    for value in _below(rows, key_head(RecordType.ACTIVE)):
        for lists in decode_active(value):
            for one in lists:
                yield one.message_id
    for value in _below(rows, key_head(RecordType.FAILED)):
        for failed in decode_failed(value):
            yield failed.message_id


def _judged(rows: Rows, shard: int) -> int:
    """Up to which message of a log a broker has judged all."""
    span = routing_cursor_range()
    cursors = {
        parse_routing_cursor_key(key): decode_routing_cursor(rows[key][0])
        for key in rows.irange(span.start, span.end, (True, False))
    }
    judged = cursors.get(shard, 0)
    span = replay_range()
    for key in rows.irange(span.start, span.end, (True, False)):
        for replayed in decode_replay(rows[key][0]):
            if replayed.ingest_shard == shard and replayed.cursor < replayed.end:
                judged = min(judged, replayed.cursor)
    return judged


def _logged(rows: Rows) -> Iterator[tuple[int, int]]:
    """The messages of a log, with the times of their receipt."""
    span = log_range(0)
    for key in rows.irange(span.start, span.end, (True, False)):
        for message in decode_log_entry(rows[key][0]):
            yield message.message_id, message.received_at_ms


def _below(rows: Rows, head: bytes) -> Iterator[bytes]:
    for key in rows.irange(head, head + b"\xff" * 64):
        yield rows[key][0]
