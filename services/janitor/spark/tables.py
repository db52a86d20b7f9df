"""The tables that `format("slatemq")` reads: their columns, and where their rows lie.

docs/reference/tables.md describes them for users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from libs.storage.arrow.log import LOG_SCHEMA, PAYLOAD_SCHEMA, log_batches
from libs.storage.arrow.packs import stored_payloads
from libs.storage.arrow.queues import (
    ACTIVE_SCHEMA,
    ARCHIVED_SCHEMA,
    ATTEMPTS_SCHEMA,
    DONE_SCHEMA,
    FAILED_SCHEMA,
    QueueShard,
    active_batches,
    archived_batch,
    attempts_batch,
    done_batch,
    failed_batch,
)
from libs.storage.layout.primitives import Row
from libs.storage.records.configs import QueueConfigRecord
from libs.storage.records.states import QueueStateRecord

QUEUES_SCHEMA: Final = pa.schema(
    [
        pa.field("queue", pa.string(), nullable=False),
        pa.field("broker_shard", pa.int32(), nullable=False),
        pa.field("filter", pa.string(), nullable=False),
        pa.field("max_attempts", pa.int32(), nullable=False),
        pa.field("done_retention_s", pa.int64(), nullable=False),
        pa.field("failed_retention_s", pa.int64(), nullable=False),
        pa.field("created_revision", pa.int64(), nullable=False),
        pa.field("settings", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("waiting_count", pa.int64(), nullable=False),
        pa.field("in_flight_count", pa.int64(), nullable=False),
        pa.field("done_count", pa.int64(), nullable=False),
        pa.field("failed_count", pa.int64(), nullable=False),
        pa.field("archived_count", pa.int64(), nullable=False),
    ]
)
"""A queue that exists: its config, and how many messages its lists have."""


@dataclass(frozen=True)
class Bucketed:
    """Where rows come from: the queue, and what is gone of the bucket at its head."""

    place: QueueShard
    head_order: int = 0
    head_offset: int = 0


Decode = Callable[[Sequence[Row], Bucketed, pa.Schema], list[pa.RecordBatch]]


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        schema: Its columns, or those of them that are read.
        service: Whose databases have it, `ingest` or `broker`.
        time_column: The column by whose time its rows are in order; empty: none.
        decode: Makes columns of stored rows; None for `queues`, which planning reads.
    """

    name: str
    schema: pa.Schema
    service: str
    time_column: str = ""
    decode: Decode | None = None

    def only(self, names: Sequence[str]) -> Table:
        """The table with these columns only, in order. Raises ValueError for an unknown one."""
        for name in names:
            if name not in self.schema.names:
                raise ValueError(
                    f"{name!r} is not a column of {self.name}, which has "
                    f"{', '.join(self.schema.names)}"
                )
            if list(names).count(name) > 1:
                raise ValueError(f"column {name!r} is named twice")
        if not names:
            raise ValueError(f"no column of {self.name} is named: name one at least")
        return replace(self, schema=pa.schema([self.schema.field(name) for name in names]))


def _list_decoder(
    batch: Callable[[Sequence[Row], QueueShard, pa.Schema], pa.RecordBatch],
) -> Decode:
    return lambda rows, of, only: [batch(rows, of.place, only)]


def _decode_active(rows: Sequence[Row], of: Bucketed, only: pa.Schema) -> list[pa.RecordBatch]:
    return active_batches(rows, of.place, of.head_order, of.head_offset, only)


def _decode_log(rows: Sequence[Row], _: Bucketed, only: pa.Schema) -> list[pa.RecordBatch]:
    return log_batches(rows, only)


def _decode_payloads(rows: Sequence[Row], _: Bucketed, only: pa.Schema) -> list[pa.RecordBatch]:
    return [stored_payloads(rows, only)]


_ALL: Final = (
    Table("messages", LOG_SCHEMA, "ingest", "received_at", _decode_log),
    Table("payloads", PAYLOAD_SCHEMA, "ingest", "", _decode_payloads),
    Table("queues", QUEUES_SCHEMA, "broker"),
    Table("active", ACTIVE_SCHEMA, "broker", "", _decode_active),
    Table("done", DONE_SCHEMA, "broker", "done_at", _list_decoder(done_batch)),
    Table("failed", FAILED_SCHEMA, "broker", "failed_at", _list_decoder(failed_batch)),
    Table("archived", ARCHIVED_SCHEMA, "broker", "archived_at", _list_decoder(archived_batch)),
    Table("attempts", ATTEMPTS_SCHEMA, "broker", "", _list_decoder(attempts_batch)),
)

TABLES: Final = {table.name: table for table in _ALL}


def queues_batch(
    queues: Sequence[tuple[str, QueueConfigRecord, QueueStateRecord]], broker_shard: int
) -> pa.RecordBatch:
    """Queues as columns; there are thousands of them, not millions."""
    rows = [
        {
            "queue": queue,
            "broker_shard": broker_shard,
            "filter": config.filter,
            "max_attempts": config.max_attempts,
            "done_retention_s": config.done_retention_s,
            "failed_retention_s": int(config.settings.get("failed_retention_s", "0")),
            "created_revision": state.created_revision,
            "settings": list(config.settings.items()),
            "waiting_count": sum(lane.waiting_count for lane in state.lanes),
            "in_flight_count": state.in_flight_count,
            "done_count": state.done_count,
            "failed_count": state.failed_count,
            "archived_count": state.archived.messages_count if state.archived else 0,
        }
        for queue, config, state in queues
    ]
    return pa.RecordBatch.from_pylist(rows, schema=QUEUES_SCHEMA)
