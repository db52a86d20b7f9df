"""What reading the tables of a snapshot costs: rows in this process, then through Spark.

python -m benchmarks.scan_tables [--messages 1000000] [--payload-bytes 100] [--entry 500]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libs.storage.arrow.log import log_batches
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.layout.buckets import BucketKind, bucket_number, order_of
from libs.storage.layout.keys import (
    active_key,
    config_key,
    done_key,
    log_key,
    queue_state_key,
)
from libs.storage.records.configs import QueueConfigRecord, encode_config
from libs.storage.records.metadata import decode_log_entry, encode_headers, encode_log_columns
from libs.storage.records.payload_packs import payload_rows
from libs.storage.records.queues import AvailableMessage, DoneMessage, encode_active, encode_done
from libs.storage.records.states import LaneRecord, QueueStateRecord, encode_queue_state
from services.janitor.snapshots import SnapshotName
from services.janitor.spark.session import spark_session
from services.janitor.spark.source import FORMAT, SlateMQSource, options_of

NOW_MS = 1_767_225_600_000
BUCKET = 1000
MIB = 1 << 20


async def fill_log(database: Database, count: int, entry: int, payload_bytes: int) -> None:
    kinds = [
        encode_headers({"type": kind, "region": f"eu-{n}", "tier": "gold"})
        for kind in ("order", "invoice", "refund")
        for n in range(100)
    ]
    # Random, so that they are read as large as they are.
    payloads: list[bytes | None] = [os.urandom(payload_bytes) for _ in range(entry)]
    batch = Batch()
    for first in range(1, count + 1, entry):
        headers = [kinds[(first + n) % len(kinds)] for n in range(min(entry, count + 1 - first))]
        size = len(headers)
        received_ms = NOW_MS + first // 100
        columns = ([received_ms] * size, [604_800] * size, headers, [payload_bytes] * size)
        batch.put(log_key(first), encode_log_columns(first, received_ms, *columns))
        batch.put_all(list(payload_rows(first, payloads[:size])))
        if batch.size_bytes > 8 * MIB:
            await database.commit(batch)
            batch = Batch()
    await database.commit(batch)


async def fill_queue(database: Database, count: int) -> None:
    """Half of the messages wait, half are done."""
    half = count // 2
    batch = Batch()
    for first in range(1, half + 1, BUCKET):
        order = order_of(0, NOW_MS + first // 100, 0)
        ids = range(first, first + BUCKET)
        waiting = [AvailableMessage(one, 128, 0, NOW_MS, 0) for one in ids]
        number = bucket_number(128, BucketKind.READY, order)
        batch.put(active_key("q", number), encode_active(waiting, []))
        done = [DoneMessage(half + one, NOW_MS, 1, "worker", NOW_MS, one) for one in ids]
        batch.put(done_key("q", order), encode_done(done))
    first_order, last_order = order_of(0, NOW_MS, 0), order_of(0, NOW_MS + half, 0)
    lane = LaneRecord(128, BucketKind.READY, first_order, 0, last_order, half)
    state = QueueStateRecord(0, False, last_order, (), 1, 0, half, 0, 0, first_order, 0, (lane,))
    batch.put(config_key("q"), encode_config(QueueConfigRecord("true", 5, 0)))
    batch.put(queue_state_key("q"), encode_queue_state(state))
    await database.commit(batch)


async def filled(root: Root, count: int, entry: int, payload_bytes: int) -> list[SnapshotName]:
    names = []
    for kind in (Kind.INGEST, Kind.BROKER):
        database = await root.database(f"{kind}/0", kind)
        if kind is Kind.INGEST:
            await fill_log(database, count, entry, payload_bytes)
        else:
            await fill_queue(database, count)
        snapshot_id = await root.snapshots(database).take(3_600_000)
        names.append(SnapshotName(database.name, snapshot_id))
        await database.close()
    return names


def log_rows(count: int, entry: int) -> list[tuple[bytes, bytes]]:
    rows = []
    for first in range(1, count + 1, entry):
        headers = [
            encode_headers({"type": "order", "region": f"eu-{n}", "tier": "gold"})
            for n in range(first, first + entry)
        ]
        columns = ([NOW_MS] * entry, [604_800] * entry, headers, [100] * entry)
        rows.append((log_key(first), encode_log_columns(first, NOW_MS, *columns)))
    return rows


def compare_decoders() -> None:
    for entry in (1, 10, 1000, 50_000):
        rows = log_rows(50_000, entry)
        log_batches(rows[:10])
        began = time.perf_counter()
        log_batches(rows)
        report(f"log entries of {entry} as columns", 50_000, time.perf_counter() - began)
        began = time.perf_counter()
        for _, value in rows:
            decode_log_entry(value)
        report(f"log entries of {entry}, message by message", 50_000, time.perf_counter() - began)


def report(what: str, rows: int, seconds: float) -> None:
    print(f"{what:<42} {rows:>10,} rows {seconds:>7.2f} s {seconds / rows * 1e6:>7.2f} µs a row")


def scan_here(root: str, names: Sequence[SnapshotName]) -> None:
    for name in ("messages", "payloads", "active", "done"):
        source: Any = SlateMQSource(options_of(root, names) | {"table": name})
        reader = source.reader(source.schema())
        began = time.perf_counter()
        rows = 0
        for partition in reader.partitions():
            rows += sum(one.num_rows for one in reader.read(partition))
        report(f"{name}, in this process, one core", rows, time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"peak of this process, the filling included: {peak} MiB")


QUERIES = {
    "messages": "SELECT count(*), max(received_at) FROM messages",
    "headers": "SELECT sum(n) FROM (SELECT headers['type'], count(*) n FROM messages GROUP BY 1)",
    "payloads": "SELECT count(*), sum(length(payload)) FROM payloads",
    "waiting": "SELECT count(*), min(retention_deadline) FROM active",
    "anti join": "SELECT count(*) FROM messages LEFT ANTI JOIN done USING (message_id)",
}


def scan_with_spark(root: str, names: Sequence[SnapshotName]) -> None:
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    began = time.perf_counter()
    with spark_session("local[2]", "1g", quiet) as spark:
        print(f"Spark started in {time.perf_counter() - began:.1f} s")
        for table in ("messages", "payloads", "active", "done"):
            options = options_of(root, names)
            frame = spark.read.format(FORMAT).options(**options).load(table)
            frame.createOrReplaceTempView(table)
        spark.sql("SELECT count(*) FROM done").collect()
        for what, query in QUERIES.items():
            began = time.perf_counter()
            (row,) = spark.sql(query).collect()
            report(f"Spark, local[2]: {what}", int(row[0]), time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--payload-bytes", type=int, default=100)
    parser.add_argument("--entry", type=int, default=500, help="messages per log entry")
    given = parser.parse_args()
    compare_decoders()
    with tempfile.TemporaryDirectory() as folder:
        root = open_root(Path(folder).as_uri(), sync=False)
        began = time.perf_counter()
        names = asyncio.run(filled(root, given.messages, given.entry, given.payload_bytes))
        print(f"filled in {time.perf_counter() - began:.1f} s")
        scan_here(root.url, names)
        scan_with_spark(root.url, names)


if __name__ == "__main__":
    main()
