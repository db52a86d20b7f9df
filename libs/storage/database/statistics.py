"""What SlateDB has counted of one database since it was opened, in our words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from slatedb.uniffi import DefaultMetricsRecorder

_KINDS: Final = {
    "get": "get",
    "get_range": "get",
    "get_ranges": "get",
    "head": "head",
    "list": "list",
    "list_with_offset": "list",
    "list_with_delimiter": "list",
    "put": "put",
    "multipart_init": "put",
    "multipart_part": "put",
    "multipart_complete": "put",
    "delete": "delete",
}
"""The kind of a request, as stores charge for them, by SlateDB's name of its call."""

_WRITTEN: Final = {
    "slatedb.wal.wal_flush_bytes": "wal",
    "slatedb.db.l0_flush_bytes": "table",
    "slatedb.compactor.bytes_compacted": "compaction",
}
_MEMORY: Final = {
    "slatedb.db.total_mem_size_bytes": "memtables",
    "slatedb.wal.wal_buffer_estimated_bytes": "wal",
}
_STALLS: Final = ("slatedb.db.l0_stall_count", "slatedb.db.backpressure_count")


@dataclass(frozen=True)
class Statistics:
    """Counts since the opening; `memory_bytes` and `uncompacted_tables` are of now.

    Attributes:
        requests: To the root's store, by kind (get, head, list, put, delete).
        wal_requests: The same to the store of the WAL, where that is another one.
        errors: Of these, the ones that ended in an error. SlateDB looks for objects that may be
            absent, and creates some that may be there, so "not found" is among them.
        written_bytes: Bytes written, by what they are: wal, table, compaction.
        cache: Look-ups in the block cache, by kind of entry and whether it was there.
        memory_bytes: Bytes held: memtables, and the wal's buffer.
        stalls: How often a write waited because memory or tables were full.
        uncompacted_tables: Sorted tables that wait to be compacted.
    """

    requests: Counter[str] = field(default_factory=Counter)
    wal_requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    written_bytes: Counter[str] = field(default_factory=Counter)
    cache: Counter[tuple[str, bool]] = field(default_factory=Counter)
    memory_bytes: Counter[str] = field(default_factory=Counter)
    stalls: int = 0
    uncompacted_tables: int = 0


def statistics_of(recorder: DefaultMetricsRecorder) -> Statistics:
    """Read what the recorder has; it takes some 3 ms."""
    requests, errors = Counter[str](), Counter[str]()
    wal_requests = Counter[str]()
    written, memory = Counter[str](), Counter[str]()
    cache = Counter[tuple[str, bool]]()
    stalls = uncompacted = 0
    for metric in recorder.snapshot():
        name, labels = metric.name, {label.key: label.value for label in metric.labels}
        if name == "slatedb.object_store.request_count":
            of_wal = labels["store_type"] == "wal"
            (wal_requests if of_wal else requests)[_KINDS[labels["api"]]] += _number(metric)
        elif name == "slatedb.object_store.error_count":
            errors[_KINDS[labels["api"]]] += _number(metric)
        elif name in _WRITTEN:
            written[_WRITTEN[name]] += _number(metric)
        elif name in _MEMORY:
            memory[_MEMORY[name]] += _number(metric)
        elif name == "slatedb.db_cache.access_count":
            cache[labels["entry_kind"], labels["result"] == "hit"] += _number(metric)
        elif name in _STALLS:
            stalls += _number(metric)
        elif name == "slatedb.db.l0_sst_count":
            uncompacted = _number(metric)
    return Statistics(requests, wal_requests, errors, written, cache, memory, stalls, uncompacted)


def _number(metric: Any) -> int:
    return int(metric.value[0])
