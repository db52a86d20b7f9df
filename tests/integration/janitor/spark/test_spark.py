"""`spark.read.format("slatemq")` in a real Spark: SQL over snapshots, and what its scans read."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession

from libs.serving.peers.channels import inherited
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from services.janitor.jobs.moments import at_ms
from services.janitor.spark import scans
from services.janitor.spark.session import spark_session
from services.janitor.spark.snapshots import open_tables
from services.janitor.spark.source import register
from services.janitor.spark.tables import TABLES
from tests.integration.broker.rig import running
from tests.integration.ingest.server import serving
from tests.integration.janitor.conftest import TRACE
from tests.integration.janitor.spark.tables_read import snapshot_of
from tests.integration.janitor.spark.test_broker_tables import many_queues, options_of
from tests.integration.janitor.spark.test_log_tables import A_DAY, DAYS, ENTRIES_A_DAY, fill

PAGE = Path(__file__).resolve().parents[4] / "docs/how-to/analyse.md"

pytestmark = pytest.mark.slow  # Spark takes seconds to start, and tenths of one for each question


def load(spark: SparkSession, options: dict[str, str], table: str) -> DataFrame:
    frame: DataFrame = spark.read.format("slatemq").options(**options).load(table)
    return frame


def chosen(spark: SparkSession, options: dict[str, str], table: str, schema: str) -> DataFrame:
    """A table with the columns of a schema, in Spark's words."""
    reader = spark.read.format("slatemq").options(**options)
    frame: DataFrame = reader.schema(schema).load(table)
    return frame


def scanned_rows(frame: DataFrame) -> int:
    """How many rows the source has given, by Spark's own count; runs the query."""
    executed: Any = frame._jdf.queryExecution().executedPlan()
    executed.executeCollect()
    leaf = executed.collectLeaves().head()
    return int(leaf.metrics().apply("numOutputRows").value())


async def in_thread(work: Callable[[], Any]) -> Any:
    """Spark waits for its answers; the servers of the test go on meanwhile."""
    return await asyncio.to_thread(work)


def answer_of(port: int, request: bytes) -> bytes:
    """What a port of Spark's answers to a request (`RpcRequest` of its network library)."""
    body = struct.pack(">bqi", 3, 1, len(request)) + request
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(struct.pack(">q", 8 + len(body)) + body)
        (size,) = struct.unpack(">q", connection.recv(8, socket.MSG_WAITALL))
        return connection.recv(size - 8, socket.MSG_WAITALL)


def test_the_driver_reads_no_object_of_another_program(spark: SparkSession) -> None:
    port = int(spark.sparkContext.getConf().get("spark.driver.port") or 0)

    answer = answer_of(port, bytes(20))

    assert b"Expected SaslMessage" in answer
    assert b"ObjectInputStream" not in answer


async def log_options(folder: Path) -> dict[str, str]:
    root = open_root(folder.as_uri())
    database = await root.database("ingest/0", Kind.INGEST)
    await fill(database)
    options = await snapshot_of(root, database)
    await database.close()
    return options


async def test_sql_counts_messages_by_day_over_the_whole_log(
    spark: SparkSession, tmp_path: Path
) -> None:
    options = await log_options(tmp_path)

    def ask() -> list[tuple[Any, ...]]:
        load(spark, options, "messages").createOrReplaceTempView("messages")
        found = spark.sql(
            "SELECT day, count(*), min(received_at), max(headers['n']) FROM messages "
            "GROUP BY day ORDER BY day"
        )
        return [tuple(row) for row in found.collect()]

    rows = await in_thread(ask)

    assert len(rows) == DAYS
    first, count, begins, header = rows[0]
    assert (first, count, header) == (date(2026, 1, 1), A_DAY, "2")
    assert begins.astimezone(UTC) == datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    "condition",
    [
        "day = DATE'2026-01-05'",
        "to_date(received_at) = DATE'2026-01-05'",
        "received_at >= '2026-01-05' AND received_at < '2026-01-06'",
        "message_id BETWEEN 241 AND 300",
    ],
)
async def test_a_day_in_a_query_narrows_the_scan(
    spark: SparkSession, tmp_path: Path, condition: str
) -> None:
    options = await log_options(tmp_path)

    def ask() -> tuple[int, int]:
        frame = load(spark, options, "messages").where(condition)
        return frame.count(), scanned_rows(frame)

    counted, scanned = await in_thread(ask)

    assert counted == A_DAY
    # A bound that is a moment, and not a day, may take one more entry along.
    assert A_DAY <= scanned <= A_DAY + A_DAY // ENTRIES_A_DAY


async def test_a_time_that_python_does_not_know_narrows_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    options = await log_options(tmp_path)

    def ask() -> int:
        frame = load(spark, options, "messages")
        return frame.where(frame["received_at"] < at_ms((1 << 48) - 1)).count()

    assert await in_thread(ask) == DAYS * A_DAY


async def test_a_queue_in_a_query_narrows_the_scan_and_tables_join(
    spark: SparkSession, tmp_path: Path
) -> None:
    async with running(tmp_path) as rig:
        await many_queues(rig)
        options = await options_of(rig)

        def ask() -> tuple[int, list[tuple[Any, ...]]]:
            for table in ("active", "done", "queues"):
                load(spark, options, table).createOrReplaceTempView(table)
            joined = spark.sql(
                "SELECT q.queue, q.done_count, count(d.message_id) FROM queues q "
                "JOIN done d USING (queue) GROUP BY ALL ORDER BY q.queue"
            )
            narrow = spark.table("active").where("queue IN ('q3') AND state = 'available'")
            return scanned_rows(narrow), [tuple(row) for row in joined.collect()]

        scanned, joined = await in_thread(ask)

    assert scanned == 5
    assert joined == [(f"q{number}", 5, 5) for number in range(6)]


TWICE = """\
SELECT (SELECT count(*) FROM done WHERE queue = 'q1'), (SELECT count(*) FROM done),
    (SELECT count(*) FROM done a JOIN done b ON a.attempts = b.attempts
    WHERE a.queue = 'q3' AND b.queue IN ('q4', 'q5'))"""
"""Six queues have five done messages each, of one attempt."""


async def test_what_one_scan_of_a_table_wants_is_no_matter_to_the_others(
    spark: SparkSession, tmp_path: Path
) -> None:
    async with running(tmp_path) as rig:
        await many_queues(rig)
        options = await options_of(rig)

        def ask() -> tuple[list[int], tuple[Any, ...]]:
            done = load(spark, options, "done")
            done.createOrReplaceTempView("done")
            one = done.where("queue = 'q2'")
            counts = [one.count(), done.count(), done.where("queue = 'q2' OR attempts = 1").count()]
            return [*counts, scanned_rows(one)], tuple(spark.sql(TWICE).collect()[0])

        counted, twice = await in_thread(ask)

    assert counted == [5, 30, 30, 5]
    assert twice == (5, 30, 50)


async def test_where_scans_cannot_be_kept_apart_they_read_the_whole_table(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Given a Spark whose own class is loaded already
    monkeypatch.setattr(scans, "_MARK", "NOT_THERE")

    async with running(tmp_path) as rig:
        await many_queues(rig)
        options = await options_of(rig)

        def ask() -> list[int]:
            register(spark)
            done = load(spark, options, "done")
            one = done.where("queue = 'q2'")
            return [one.count(), done.count(), scanned_rows(one)]

        found = await in_thread(ask)

    monkeypatch.undo()
    register(spark)
    assert found == [5, 30, 30]
    assert "its own class for them is loaded already" in caplog.text


async def test_the_questions_of_the_how_to_are_answered(
    spark: SparkSession, tmp_path: Path
) -> None:
    async with serving(tmp_path.as_uri()) as ingest, running(tmp_path) as rig:
        await rig.create("orders", max_attempts=1)
        ids = await ingest.send(*[b"x"] * 6)
        await rig.assign(ids, "orders")
        acked, failed = await rig.claim("orders", max_messages=2)
        await rig.ack(acked.lease_token)
        await rig.nack(failed.lease_token, reason="boom")
        questions = re.findall(r"^```sql\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)

        def ask() -> list[list[dict[str, Any]]]:
            with open_tables(spark, tmp_path.as_uri()) as table:
                for name in TABLES:
                    table(name).createOrReplaceTempView(name)
                found = [spark.sql(question).collect() for question in questions]
                return [[row.asDict() for row in rows] for rows in found]

        waits, reasons, took = await in_thread(ask)

    assert [(row["queue"], row["waiting"], row["bytes"]) for row in waits] == [("orders", 4, 4)]
    assert [(row["reason"], row["failed"]) for row in reasons] == [("nack: boom", 1)]
    assert took[0]["acked"] == 1


async def test_every_table_has_the_columns_that_are_documented_even_when_it_is_empty(
    spark: SparkSession, tmp_path: Path
) -> None:
    async with running(tmp_path) as rig:
        options = await options_of(rig)

        def ask() -> dict[str, tuple[list[str], int]]:
            frames = {table: load(spark, options, table) for table in TABLES}
            return {table: (frame.columns, frame.count()) for table, frame in frames.items()}

        found = await in_thread(ask)

    assert found == {table.name: (table.schema.names, 0) for table in TABLES.values()}


async def test_columns_that_are_named_are_those_that_come_in_their_order(
    spark: SparkSession, tmp_path: Path
) -> None:
    options = await log_options(tmp_path)
    names = ["payload_bytes", "headers", "received_at", "message_id"]
    kinds = "payload_bytes bigint, headers map<string, string>, received_at timestamp, "

    def ask() -> list[DataFrame]:
        return [
            load(spark, options, "messages").select(*names),
            load(spark, {**options, "columns": ", ".join(names)}, "messages"),
            chosen(spark, options, "messages", kinds + "message_id bigint"),
        ]

    whole, by_option, by_schema = await in_thread(ask)
    assert whole.columns == by_option.columns == by_schema.columns == names

    def rows() -> list[list[Any]]:
        frames = (whole, by_option, by_schema)
        return [sorted(frame.collect(), key=lambda row: row["message_id"]) for frame in frames]

    result, *others = await in_thread(rows)
    assert result
    assert others == [result, result]


def test_calls_of_workers_have_the_trace_context_of_their_driver(spark: SparkSession) -> None:
    workers = spark.sparkContext.parallelize([0], 1)

    assert workers.map(lambda _: inherited()()).collect() == [(("traceparent", TRACE),)]  # type: ignore[misc]


async def test_a_snapshot_that_is_gone_is_reported_and_so_is_a_wrong_option(
    spark: SparkSession, tmp_path: Path
) -> None:
    options = await log_options(tmp_path)
    gone = {**options, "snapshot": "00000000-0000-4000-8000-000000000000"}

    def ask() -> None:
        with pytest.raises((AnalysisException, PythonException), match="no snapshot 0000"):
            load(spark, gone, "messages").count()
        with pytest.raises(AnalysisException, match="option table: unknown table 'entries'"):
            load(spark, options, "entries")
        with pytest.raises(AnalysisException, match="1 databases, 0 snapshots"):
            load(spark, {**options, "snapshot": ""}, "messages")
        with pytest.raises(AnalysisException, match="'message_id' of messages is bigint, not int"):
            chosen(spark, options, "messages", "message_id int").count()
        with pytest.raises(AnalysisException, match="'delay_ms' of messages may be null"):
            chosen(spark, options, "messages", "delay_ms bigint not null").count()
        with pytest.raises(AnalysisException, match="'id' is not a column of messages, which has"):
            chosen(spark, options, "messages", "id bigint").count()
        with pytest.raises(AnalysisException, match="'id' is not a column of messages, which has"):
            load(spark, {**options, "columns": "message_id, id"}, "messages")

    await in_thread(ask)


async def test_a_process_with_a_session_gets_no_other_master_by_mistake(
    spark: SparkSession,
) -> None:
    def begin() -> None:
        with spark_session("spark://127.0.0.1:1"):
            pass

    with pytest.raises(RuntimeError, match="has a Spark session already"):
        await in_thread(begin)
    assert spark.range(3).count() == 3  # And it goes on.
