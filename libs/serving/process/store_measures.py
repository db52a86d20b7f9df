"""What a process measures of its store, its commits and its memory; see docs/how-to/operate.md.

All but the commits is counted anyway, and read when metrics are: in a thread, and once for all
instruments that have it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from libs.serving.process.process_measures import measure_process
from libs.serving.process.store_costs import KINDS, StoreCosts
from libs.storage.database.commits import GroupCommit
from libs.storage.database.slate import Database
from libs.storage.database.statistics import Statistics
from libs.storage.objects.requests import RequestCounts

REMEMBER_S: Final = 1.0
"""For how long one reading of SlateDB's counts, which takes 3 ms, serves all instruments."""

COMMIT_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30),
)
COMMIT_BUCKETS_BYTES: Final = tuple(4**n << 10 for n in range(9))
"""1 KiB to 64 MiB."""

Labels = Mapping[str, str]
Reading = Iterable[tuple[float, Labels]]


class StoreMeasures:
    """Registers what a process asks of its store, and what that costs."""

    def __init__(
        self,
        meter: Meter,
        counts: RequestCounts,
        database: Callable[[], Database | None],
        folders: Callable[[], Mapping[str, Path]],
        costs: Callable[[], StoreCosts],
    ) -> None:
        """`counts` are of small objects; `database` is open, or None; `folders` are of file://.

        `costs` are asked once the database is open: which store has its WAL is known then.
        """
        self._counts = counts
        self._database = database
        self._costs = costs
        self._statistics = Statistics()
        self._read_at_s = float("-inf")

        def count(name: str, read: Callable[[], Reading], unit: str, description: str) -> None:
            meter.create_observable_counter(name, [_observe(read)], unit, description)

        def gauge(name: str, read: Callable[[], Reading], unit: str, description: str) -> None:
            meter.create_observable_gauge(name, [_observe(read)], unit, description)

        count("slatemq.store.requests", self._requests, "{request}", "Requests to the object store")
        count(
            "slatemq.store.request.errors",
            self._errors,
            "{request}",
            "Requests to the object store that ended in an error; of SlateDB's, 'not found' too",
        )
        count("slatemq.store.written", self._written, "By", "Bytes written to the object store")
        count(
            "slatemq.store.read",
            self._read,
            "By",
            "Bytes of small objects read from the object store",
        )
        count("slatemq.store.cost", self._cost, "{USD}", "What the requests cost, by store_prices")
        count(
            "slatemq.store.stalls",
            self._stalls,
            "{stall}",
            "Writes that waited since SlateDB's memory or tables were full",
        )
        gauge(
            "slatemq.store.uncompacted.tables",
            self._tables,
            "{table}",
            "Sorted tables that wait to be compacted",
        )
        gauge(
            "slatemq.store.uncompacted.tables.max",
            self._tables_max,
            "{table}",
            "Sorted tables that may wait to be compacted: with as many, writes wait",
        )
        _measure_disk(meter, folders)

    def cache_lookups(self) -> Reading:
        """Look-ups in SlateDB's cache, as of `measure_caches`."""
        for (kind, is_hit), count in self._now().cache.items():
            yield count, _lookup(f"slatedb_{kind}", is_hit)

    def memory_parts(self) -> Mapping[str, int]:
        """Bytes that SlateDB holds; its cache has a bound instead."""
        return {f"slatedb_{part}": size for part, size in self._now().memory_bytes.items()}

    def _now(self) -> Statistics:
        database, now_s = self._database(), time.monotonic()
        if database is not None and now_s - self._read_at_s > REMEMBER_S:
            self._statistics = database.statistics()
            self._read_at_s = now_s
        return self._statistics

    def _stalls(self) -> Reading:
        yield self._now().stalls, {}

    def _tables(self) -> Reading:
        yield self._now().uncompacted_tables, {}

    def _tables_max(self) -> Reading:
        database = self._database()
        if database is not None:
            yield database.uncompacted_tables_max, {}

    def _requests(self) -> Reading:
        found = self._now()
        yield from _by_client({"slatedb": found.requests, "objects": self._counts.requests})
        if found.wal_requests:
            yield from _by_client({"wal": found.wal_requests})

    def _errors(self) -> Reading:
        return _by_client({"slatedb": self._now().errors, "objects": self._counts.errors})

    def _written(self) -> Reading:
        for content, size_bytes in self._now().written_bytes.items():
            yield size_bytes, {"slatemq.store.content": content}
        yield self._counts.written_bytes, {"slatemq.store.content": "object"}

    def _read(self) -> Reading:
        yield self._counts.read_bytes, {"slatemq.store.content": "object"}

    def _cost(self) -> Reading:
        yield self._costs().usd(self._now(), self._counts), {}


def _measure_disk(meter: Meter, folders: Callable[[], Mapping[str, Path]]) -> None:
    meter.create_observable_gauge(
        "slatemq.store.disk.free",
        [_observe(lambda: _of_each(folders(), lambda folder: shutil.disk_usage(folder).free))],
        "By",
        "Bytes free on the disk of the data folder, and of that of the write-ahead logs",
    )
    meter.create_observable_gauge(
        "slatemq.store.disk.size",
        [_observe(lambda: _of_each(folders(), lambda folder: shutil.disk_usage(folder).total))],
        "By",
        "Bytes that the disk of the folder has",
    )


def _of_each(folders: Mapping[str, Path], read: Callable[[Path], int]) -> Reading:
    for name, folder in folders.items():
        yield read(folder), {"slatemq.store.disk": name}


def measure_commits(meter: Meter, commits: GroupCommit) -> None:
    """Records how long each commit takes, and its size."""
    durations = meter.create_histogram(
        "slatemq.commit.duration",
        unit="s",
        description="From the beginning of a commit until it is durable",
        explicit_bucket_boundaries_advisory=COMMIT_BUCKETS_S,
    )
    sizes = meter.create_histogram(
        "slatemq.commit.size",
        unit="By",
        description="Keys and values of a commit",
        explicit_bucket_boundaries_advisory=COMMIT_BUCKETS_BYTES,
    )

    def record(duration_s: float, size_bytes: int) -> None:
        durations.record(duration_s)
        sizes.record(size_bytes)

    commits.measure = record


def measure_memory(meter: Meter, parts: Callable[[], Mapping[str, int]]) -> None:
    """Registers what the process takes of the machine, and the bytes of its `parts`."""
    measure_process(meter)
    meter.create_observable_gauge(
        "slatemq.memory",
        callbacks=[_observe(lambda: [(size, {PART: part}) for part, size in parts().items()])],
        unit="By",
        description="Bytes that a part of the process holds",
    )


def measure_caches(
    meter: Meter,
    of_slatedb: Callable[[], Reading],
    own: Callable[[], Mapping[str, tuple[int, int]]],
) -> None:
    """Registers look-ups in caches; `own` has hits and misses by the name of the cache."""

    def read() -> Reading:
        yield from of_slatedb()
        for name, (hits, misses) in own().items():
            yield hits, _lookup(name, is_hit=True)
            yield misses, _lookup(name, is_hit=False)

    meter.create_observable_counter(
        "slatemq.cache.lookups",
        callbacks=[_observe(read)],
        unit="{lookup}",
        description="Look-ups in a cache, by whether it had what was wanted",
    )


PART: Final = "slatemq.memory.part"


def _lookup(name: str, is_hit: bool) -> Labels:
    return {"slatemq.cache.name": name, "slatemq.cache.result": "hit" if is_hit else "miss"}


def _by_client(clients: Mapping[str, Mapping[str, int]]) -> Reading:
    for client, counts in clients.items():
        for kind in KINDS:
            facts = {"slatemq.store.request": kind, "slatemq.store.client": client}
            yield counts[kind], facts


def _observe(read: Callable[[], Reading]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, dict[str, Any](labels)) for value, labels in read()]

    return observe
