"""The numbers of a report, of entries made by hand, and the tables of dead letters."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from services.janitor.jobs.dead_letter_jobs import due_dead_letters, with_content
from services.janitor.jobs.report import queue_days, written
from tests.integration.janitor.jobs.frames import table

pytestmark = pytest.mark.slow  # Spark takes seconds to start, and tenths of one for each question

FIRST = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND = FIRST + timedelta(days=1)
SINCE_MS = int(FIRST.timestamp() * 1000)


def message(message_id: int, at: datetime, size: int = 10) -> dict[str, Any]:
    return {"message_id": message_id, "received_at": at, "payload_bytes": size}


def done(message_id: int, at: datetime, took_ms: int, **more: Any) -> dict[str, Any]:
    ended = {"done_at": at + timedelta(milliseconds=took_ms), "first_claimed_at": at}
    return {"message_id": message_id, "attempts": 1, **ended, **more}


def days(spark: SparkSession, **rows: list[dict[str, Any]]) -> DataFrame:
    names = ("messages", "active", "done", "failed")
    frames = [table(spark, name, rows.get(name, [])) for name in names]
    return queue_days(frames[0], frames[1], frames[2], frames[3], SINCE_MS)


def report(spark: SparkSession, **rows: list[dict[str, Any]]) -> dict[tuple[Any, date], Any]:
    return {(row["queue"], row["day"]): row.asDict() for row in days(spark, **rows).collect()}


def test_each_day_of_a_queue_has_its_numbers(spark: SparkSession) -> None:
    messages = [message(n, FIRST) for n in range(100)] + [message(100, SECOND, 7)]
    rows = report(
        spark,
        messages=[*messages, message(200, FIRST - timedelta(days=1))],
        active=[
            {"message_id": 98, "visible_at": None},
            {"message_id": 99, "state": "in-flight", "attempts": 2},
            {"message_id": 100, "attempts": 0},
        ],
        done=[done(n, FIRST, n * 10, attempts=1 + n // 90) for n in range(1, 98)],
        failed=[{"message_id": 0, "failed_at": SECOND, "attempts": 7}],
    )

    one, two = rows["q", FIRST.date()], rows["q", SECOND.date()]
    assert (one["published_count"], one["published_bytes"]) == (100, 1000)
    assert (one["waiting_count"], one["oldest_waiting_at"].astimezone(UTC)) == (1, FIRST)
    assert (one["acked_count"], one["failed_count"]) == (97, 0)
    assert (one["attempts_1_count"], one["attempts_2_count"]) == (89, 8)
    assert (one["ack_ms_p50"], one["ack_ms_p95"], one["ack_ms_p99"]) == (490, 930, 970)
    assert one["claim_ms_p99"] == 0
    assert (two["published_count"], two["published_bytes"]) == (1, 7)
    assert (two["failed_count"], two["attempts_6_or_more_count"]) == (1, 1)
    assert two["ack_ms_p50"] is None
    assert FIRST.date() - timedelta(days=1) not in {day for _, day in rows}


def test_what_waits_since_before_the_days_of_a_report_is_in_it_and_what_it_took_to_ack_it(
    spark: SparkSession,
) -> None:
    before = FIRST - timedelta(days=40)
    rows = report(
        spark,
        messages=[message(n, before) for n in (1, 2, 3)],
        active=[{"message_id": 1}, {"message_id": 2, "state": "in-flight"}],
        done=[done(3, FIRST, 5)],
    )

    old, new = rows["q", before.date()], rows["q", FIRST.date()]
    assert (old["waiting_count"], old["oldest_waiting_at"].astimezone(UTC)) == (1, before)
    assert (old["published_count"], old["published_bytes"]) == (0, 0)
    assert (new["acked_count"], new["ack_ms_p50"]) == (1, 40 * 86_400_000 + 5)


def test_all_queues_together_have_a_row_and_what_was_moved_on_counts_where_it_is(
    spark: SparkSession,
) -> None:
    rows = report(
        spark,
        messages=[message(1, FIRST), message(2, FIRST)],
        active=[{"message_id": 1, "queue": "b"}, {"message_id": 2, "queue": "a"}],
        done=[
            done(1, FIRST, 5, queue="a", transferred_to="b"),
            done(2, FIRST, 5, queue="b"),
        ],
    )

    counts = {queue: rows[queue, FIRST.date()]["published_count"] for queue in ("a", "b", None)}
    assert counts == {"a": 1, "b": 2, None: 3}
    assert rows["a", FIRST.date()]["acked_count"] == 0
    assert rows[None, FIRST.date()]["acked_count"] == 1


def test_a_clock_that_was_behind_takes_no_time_back(spark: SparkSession) -> None:
    (row,) = (
        row
        for (queue, _), row in report(
            spark, messages=[message(1, FIRST)], done=[done(1, FIRST, -500)]
        ).items()
        if queue
    )
    assert row["ack_ms_p50"] == 0


def test_a_report_has_the_same_columns_where_nothing_happened(
    spark: SparkSession, tmp_path: Path
) -> None:
    written(days(spark), tmp_path.as_uri(), "nothing.parquet")
    written(
        days(spark, messages=[message(1, FIRST)], done=[done(1, FIRST, 5)]),
        *(tmp_path.as_uri(), "all.parquet"),
    )

    nothing, all_ = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("nothing", "all"))
    assert (nothing.num_rows, all_.num_rows) == (0, 2)
    assert nothing.schema.equals(all_.schema)


def test_dead_letters_have_their_history_in_order_and_none_is_lost_with_its_message(
    spark: SparkSession,
) -> None:
    failed = [
        {"message_id": n, "failed_at": FIRST + timedelta(seconds=n), "attempts": 2}
        for n in (1, 2, 9)
    ]
    attempts = [
        {"message_id": 1, "attempt": n, "outcome": f"nack: {n}", "claimed_at": FIRST}
        for n in (2, 1)
    ]
    due = due_dead_letters(
        table(spark, "failed", failed),
        table(spark, "queues", [{"queue": "q", "created_revision": 5}]),
        SINCE_MS + 5_000,
    )
    whole = with_content(
        due,
        table(spark, "messages", [{**message(1, FIRST), "headers": {"a": "b"}}]),
        table(spark, "attempts", attempts),
    )

    first, second = sorted(whole.collect(), key=lambda row: row["message_id"])
    assert (first["created_revision"], first["headers"]) == (5, {"a": "b"})
    assert [one["outcome"] for one in first["history"]] == ["nack: 1", "nack: 2"]
    assert first["failed_at_ms"] == SINCE_MS + 1000
    assert (second["message_id"], second["headers"], second["history"]) == (2, None, None)
