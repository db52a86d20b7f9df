"""The tables that `format("slatemq")` reads: their columns, and where their rows lie.

docs/reference/tables.md tells them for users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from libs.storage.arrow_log import LOG_SCHEMA, PAYLOAD_SCHEMA, log_batches, payload_batch
from libs.storage.arrow_queues import (
    ACTIVE_SCHEMA,
    ARCHIVED_SCHEMA,
    ATTEMPTS_SCHEMA,
    DONE_SCHEMA,
    FAILED_SCHEMA,
    Place,
    active_batches,
    archived_batch,
    attempts_batch,
    done_batch,
    failed_batch,
)
from libs.storage.configs import QueueConfigRecord
from libs.storage.fastffi import Row
from libs.storage.states import QueueStateRecord

__all__ = ["QUEUES_SCHEMA", "TABLES", "Bucketed", "Table", "queues_batch"]

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

    place: Place
    head_order: int = 0
    head_offset: int = 0


Decode = Callable[[Sequence[Row], Bucketed], list[pa.RecordBatch]]


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        name: Its name in SQL.
        schema: Its columns.
        service: Whose databases have it, `ingest` or `broker`.
        time_column: The column by whose time its rows lie in order; empty: they don't.
        decode: Makes columns of stored rows; None for `queues`, which are planned with.
    """

    name: str
    schema: pa.Schema
    service: str
    time_column: str = ""
    decode: Decode | None = None


_ALL: Final = (
    Table("messages", LOG_SCHEMA, "ingest", "received_at", lambda rows, _: log_batches(rows)),
    Table("payloads", PAYLOAD_SCHEMA, "ingest", "", lambda rows, _: [payload_batch(rows)]),
    Table("queues", QUEUES_SCHEMA, "broker"),
    Table(
        "active",
        ACTIVE_SCHEMA,
        "broker",
        "",
        lambda rows, of: active_batches(rows, of.place, of.head_order, of.head_offset),
    ),
    Table("done", DONE_SCHEMA, "broker", "done_at", lambda rows, of: [done_batch(rows, of.place)]),
    Table(
        "failed",
        FAILED_SCHEMA,
        "broker",
        "failed_at",
        lambda rows, of: [failed_batch(rows, of.place)],
    ),
    Table(
        "archived",
        ARCHIVED_SCHEMA,
        "broker",
        "archived_at",
        lambda rows, of: [archived_batch(rows, of.place)],
    ),
    Table(
        "attempts",
        ATTEMPTS_SCHEMA,
        "broker",
        "",
        lambda rows, of: [attempts_batch(rows, of.place)],
    ),
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
