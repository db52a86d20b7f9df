"""What a process measures of its store, its commits and its memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from libs.serving.process.exits import FatalError
from libs.serving.process.store_costs import costs_of, parse_prices
from libs.serving.process.store_measures import (
    StoreMeasures,
    measure_caches,
    measure_commits,
    measure_memory,
)
from libs.storage.database.addresses import parse_root
from libs.storage.database.clocks import HybridClock
from libs.storage.database.commits import GroupCommit
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import ObjectNotFound, StoreUnavailable
from libs.storage.objects.requests import RequestCounts

pytestmark = pytest.mark.usefixtures("watched_openings")

Found = dict[str, dict[tuple[object, ...], Any]]


def read(reader: InMemoryMetricReader) -> Found:
    """Values, or counts of histograms, by metric and labels."""
    data = reader.get_metrics_data()
    assert data is not None
    found: Found = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            labels = dict(point.attributes or {})
            value = point.value if hasattr(point, "value") else point.count
            key = tuple(labels[name] for name in sorted(labels))
            found.setdefault(metric.name, {})[key] = value
    return found


class Rows:
    """A source of commits with a row each."""

    async def drain(self, batch: Batch) -> None:
        batch.put(b"\x01k%d" % batch.commit, b"v" * 1000)


async def test_what_a_store_is_asked_costs_and_holds_is_measured(tmp_path: Path) -> None:
    # Given a database, and its measures
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("slatemq")
    root = open_root(tmp_path.as_uri())
    database = await root.database("broker/0", Kind.BROKER)
    before = database.statistics()
    costs = costs_of("put=1000000", "", root.address, root.address)
    counts = root.objects.counts
    store = StoreMeasures(meter, counts, lambda: database, lambda: root.folders, lambda: costs)
    measure_caches(meter, store.cache_lookups, lambda: {"payloads": (5, 2)})
    measure_memory(meter, lambda: {"lanes": 7, **store.memory_parts()})
    commits = GroupCommit(database, HybridClock(0), Rows())
    measure_commits(meter, commits)
    puts_count = counts.requests["put"]

    # When three commits are made, sorted into a table and read, and small objects put and got
    running = asyncio.create_task(commits.run())
    for _ in range(3):
        commits.mark_dirty()
        await commits.durable()
    await database.flush_memtable()
    await database.get(b"\x01k1")
    await root.objects.put("topology/x", b"four")
    assert await root.objects.get("topology/x") == b"four"
    with pytest.raises(ObjectNotFound):
        await root.objects.get("topology/y")
    await commits.close()
    await running

    # Then all of it is in the metrics
    found = read(reader)
    assert found["slatemq.commit.duration"] == {(): 3}
    assert found["slatemq.commit.size"] == {(): 3}
    requests = found["slatemq.store.requests"]
    assert requests["objects", "put"] == puts_count + 1
    assert requests["slatedb", "put"] > before.requests["put"]
    assert requests["objects", "get"] == 2
    assert found["slatemq.store.request.errors"]["objects", "get"] == 0
    assert (
        found["slatemq.store.cost"][()] == requests["objects", "put"] + requests["slatedb", "put"]
    )
    assert found["slatemq.store.written"][("wal",)] > 3000
    assert found["slatemq.store.written"][("table",)] > 3000
    assert found["slatemq.store.written"][("object",)] >= 4
    assert found["slatemq.store.read"] == {("object",): 4}
    assert found["slatemq.store.uncompacted.tables"][()] >= 1
    assert found["slatemq.store.uncompacted.tables.max"] == {(): 32}
    assert found["slatemq.store.stalls"] == {(): 0}
    disk = found["slatemq.store.disk.free"], found["slatemq.store.disk.size"]
    assert 0 < disk[0]["data",] <= disk[1]["data",]
    assert found["slatemq.memory"][("lanes",)] == 7
    assert ("slatedb_memtables",) in found["slatemq.memory"]
    assert found["process.memory.usage"][()] > 1 << 20
    assert found["process.cpu.time"][()] > 0
    assert found["process.uptime"][()] > 0
    assert found["slatemq.cache.lookups"]["payloads", "miss"] == 2
    assert found["slatemq.cache.lookups"]["slatedb_data_block", "hit"] >= 1
    await database.close()


async def test_a_request_that_fails_counts_as_an_error(tmp_path: Path) -> None:
    objects = open_root((tmp_path / "data").as_uri()).objects
    (tmp_path / "data" / "topology").write_bytes(b"a file where a folder is to be")

    with pytest.raises(StoreUnavailable):
        await objects.put("topology/x", b"")

    assert objects.counts == RequestCounts({"put": 1}, {"put": 1})  # type: ignore[arg-type]


def test_prices_are_those_of_s3_unless_set_and_none_for_a_folder() -> None:
    s3, folder = parse_root("s3://data"), parse_root("file:///data")
    assert parse_prices("store_prices", "", s3)["put"] == 5.0
    assert parse_prices("store_prices", "", folder)["put"] == 0.0
    assert parse_prices("store_prices", "put=6.5, get=1", folder) == {
        "delete": 0.0, "get": 1.0, "head": 0.0, "list": 0.0, "put": 6.5,
    }  # fmt: skip


@pytest.mark.parametrize("wrong", ["put", "put=", "put=-1", "puts=1", "put=1;get=2", "put=1e3"])
def test_wrong_prices_name_the_setting_and_end_the_process(wrong: str) -> None:
    with pytest.raises(
        FatalError, match=r"store_prices: .* must be a price such as put=5\.0"
    ) as raised:
        parse_prices("store_prices", wrong, parse_root("s3://data"))

    assert raised.value.cause.code == 2
