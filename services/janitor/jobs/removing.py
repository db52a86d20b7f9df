"""Tasks that ask owners to remove what a partition holds; each yields counts.

Owners check everything again, and refuse what is no longer true: that is counted, and no error. So
is what is gone already: a job that is run again finds much of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from services.janitor.asking import is_moving
from services.janitor.jobs.batches import counts_batch, grouped
from services.janitor.jobs.owners import Owners, owners_of
from slatemq.errors import FailedPrecondition, NotFound, SlateMQError, Unavailable
from slatemq.v1 import purge_pb2, purge_pb2_grpc, removal_pb2, removal_pb2_grpc

ENTRY_KEYS: Final = ("queue", "broker_shard", "created_revision")


@dataclass(frozen=True)
class MessagePurge:
    """Purges messages: rows of `ingest_shard` and `message_id`, ascending.

    `epochs` are, by ingest shard, the purge epochs that came with the snapshots.
    """

    root: str
    epochs: Mapping[int, int]
    reason: purge_pb2.PurgeReason.ValueType

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts: Counter[str] = Counter()
        stale: set[int] = set()
        with owners_of(self.root) as owners:
            for table in grouped(batches, ["ingest_shard"]):
                shard = table["ingest_shard"][0].as_py()
                if shard not in stale:
                    try:
                        counts += self._purge(owners, shard, table)
                        continue
                    except FailedPrecondition as error:
                        if error.reason != "STALE_PURGE_EPOCH":
                            raise
                        stale.add(shard)
                # A queue that starts in the past may need them: the next run will know.
                counts["messages_postponed"] += table.num_rows
        yield counts_batch(counts)

    def _purge(self, owners: Owners, shard: int, table: pa.Table) -> Counter[str]:
        request = purge_pb2.PurgeMessagesRequest(
            purge_epoch=self.epochs[shard],
            reason=self.reason,
            message_ids=table["message_id"].to_numpy(),
        )
        response = owners.call(
            "ingest",
            shard,
            lambda channel: purge_pb2_grpc.PurgeServiceStub(channel).PurgeMessages,
            request,
        )
        return Counter(
            messages_purged=response.purged_count,
            messages_gone=response.gone_count,
            messages_refused=len(response.refused_ids),
            payload_bytes=response.purged_bytes,
        )


@dataclass(frozen=True)
class EntryRemoval:
    """Removes entries: rows of ENTRY_KEYS, and those of their lists, in list order.

    `failed`: they are dead letters past the failed retention of their queue; otherwise they wait,
    and are past their own retention.
    """

    root: str
    failed: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts: Counter[str] = Counter()
        with owners_of(self.root) as owners:
            for table in grouped(batches, ENTRY_KEYS):
                removal: dict[str, Any]
                if self.failed:
                    dead_letters = removal_pb2.FailedExpiredRemoval(rows=failed_rows(table))
                    removal = {"failed_expired": dead_letters}
                else:
                    removal = {"expired": removal_pb2.ExpiredRemoval(rows=waiting_rows(table))}
                result = remove_entries(owners, table, **removal)
                kind = "failed" if self.failed else "entries"
                counts[f"{kind}_removed"] += result.removed_count
                counts[f"{kind}_gone"] += result.gone_count
                counts[f"{kind}_refused"] += len(result.refused)
        yield counts_batch(counts)


@dataclass(frozen=True)
class DonePruning:
    """Prunes done lists: rows of ENTRY_KEYS and `done_before_ms`, all of a queue."""

    root: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts: Counter[str] = Counter()
        pruned: set[str] = set()
        with owners_of(self.root) as owners:
            for table in grouped(batches, ENTRY_KEYS):
                before_ms = table["done_before_ms"][0].as_py()
                done = removal_pb2.DoneRemoval(done_before_ms=before_ms)
                more, removed = True, 0
                while more:
                    result = remove_entries(owners, table, done=done)
                    removed += result.removed_count
                    # A call that removes nothing would do so again.
                    more = result.more and result.removed_count > 0
                counts["done_removed"] += removed
                if removed:
                    pruned.add(table["queue"][0].as_py())
        counts["queues_pruned"] = len(pruned)
        yield counts_batch(counts)


def remove_entries(
    owners: Owners, table: pa.Table, **removal: Any
) -> removal_pb2.RemoveEntriesResponse:
    """One call, for the queue of a batch; where the queue is gone, all its entries are."""
    queue, shard, revision = (table[name][0].as_py() for name in ENTRY_KEYS)
    request = removal_pb2.RemoveEntriesRequest(queue_id=queue, created_revision=revision, **removal)
    try:
        return owners.call(
            "broker",
            shard,
            lambda channel: removal_pb2_grpc.RemovalServiceStub(channel).RemoveEntries,
            request,
            queue,
        )
    except (NotFound, FailedPrecondition, Unavailable) as error:
        if not is_gone(error, queue):
            raise
        return removal_pb2.RemoveEntriesResponse(gone_count=table.num_rows)


def is_gone(error: SlateMQError, queue: str) -> bool:
    """Whether a queue was deleted since, or is moving or has: then the next run finds it."""
    if isinstance(error, NotFound):
        return error.resource_name == queue
    return error.reason == "QUEUE_CHANGED" or is_moving(error, queue)


def waiting_rows(table: pa.Table) -> list[removal_pb2.WaitingRow]:
    columns = ["message_id", "priority", "timed", "bucket_order", "bucket_number"]
    return [removal_pb2.WaitingRow(**row) for row in table.select(columns).to_pylist()]


def failed_rows(table: pa.Table) -> list[removal_pb2.FailedRow]:
    columns = ["message_id", "failed_at_ms", "bucket_order"]
    return [removal_pb2.FailedRow(**row) for row in table.select(columns).to_pylist()]
