"""The logic of the jobs over random histories, beside plain Python that says what may go."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import spark_partition_id

from services.janitor.jobs.batches import in_list_order
from services.janitor.jobs.dead_letter_jobs import due_dead_letters
from services.janitor.jobs.removable import (
    done_ends,
    expired_entries,
    expired_failed,
    expired_messages,
    judged_positions,
    overdue_done,
    unreferenced_messages,
)
from services.janitor.jobs.removing import ENTRY_KEYS
from tests.forms import examples
from tests.integration.janitor.jobs.frames import tables_of
from tests.integration.janitor.jobs.histories import GRACE_MS, NOW_MS, WINDOW_S, History

pytestmark = [
    pytest.mark.repeated,
    pytest.mark.slow,  # Spark takes seconds to start, and tenths of one for each question
]

HISTORIES = examples(120)


@pytest.fixture(scope="module")
def lived() -> list[History]:
    return [History(number) for number in range(HISTORIES)]


@pytest.fixture(scope="module")
def tables(spark: SparkSession, lived: list[History]) -> dict[str, DataFrame]:
    return {name: frame.cache() for name, frame in tables_of(spark, lived).items()}


def rows(frame: DataFrame, *columns: str) -> list[tuple[object, ...]]:
    return sorted(tuple(row) for row in frame.select(*columns).collect())


def united(sets: Iterable[Iterable[tuple[object, ...]]]) -> list[tuple[object, ...]]:
    return sorted({row for some in sets for row in some})


def judged(spark: SparkSession, lived: list[History]) -> DataFrame:
    """As the snapshots have it: cursors and replays of each history's brokers."""
    found: list[tuple[int, int]] = []
    for history in lived:
        replays = [
            (shard, cursor, end)
            for queue in history.queues.values()
            for shard, (cursor, end) in queue.replay.items()
        ]
        cursors = list(history.cursors.values())
        found += judged_positions(history.shards, cursors, replays).items()
    return spark.createDataFrame(found, "ingest_shard int, judged_sequence bigint")


def test_retention_removes_what_the_model_allows(
    tables: dict[str, DataFrame], lived: list[History]
) -> None:
    messages, active, failed = tables["messages"], tables["active"], tables["failed"]
    entries = expired_entries(active, tables["queues"], NOW_MS, GRACE_MS)
    dead_letters = expired_failed(failed, tables["queues"], NOW_MS, GRACE_MS)
    gone = expired_messages(messages, active, failed, NOW_MS, GRACE_MS, few=False)

    assert rows(entries, "queue", "message_id") == united(h.may_expire_entries() for h in lived)
    for frame in (entries, dead_letters):
        assert not frame.where("created_revision != broker_shard + 1").count()
    # A task has those of a broker together, so that a call has as many as it may.
    ordered = in_list_order(entries, "priority", "timed").withColumn("task", spark_partition_id())
    found = ordered.select("task", *ENTRY_KEYS).collect()
    assert len([*groupby(found)]) == len(set(found))
    assert rows(dead_letters, "queue", "message_id", "failed_at_ms") == united(
        h.may_expire_failed() for h in lived
    )
    assert rows(gone, "message_id") == united(
        ((one,) for one in h.may_expire_messages()) for h in lived
    )
    assert min(entries.count(), dead_letters.count(), gone.count()) > HISTORIES // 2


def test_unreferenced_removes_what_the_model_allows(
    spark: SparkSession, tables: dict[str, DataFrame], lived: list[History]
) -> None:
    before_ms = NOW_MS - 1000 * WINDOW_S - GRACE_MS

    gone = unreferenced_messages(
        tables["messages"],
        tables["active"],
        tables["failed"],
        judged(spark, lived),
        before_ms,
        few=False,
    )

    assert rows(gone, "message_id") == united(
        ((one,) for one in h.may_go_unreferenced()) for h in lived
    )
    assert gone.count() > HISTORIES
    # Each of the rules keeps something in some history, or this shows nothing of it.
    for without in ("cursors", "replays", "entries"):
        assert any(kept_by(history, without) for history in lived), without


def kept_by(history: History, rule: str) -> set[int]:
    """Messages that may not go for this rule alone."""
    allowed = history.may_go_unreferenced()
    match rule:
        case "cursors":
            kept = history.cursors
            history.cursors = {broker: dict.fromkeys(c, 1 << 62) for broker, c in kept.items()}
            more = history.may_go_unreferenced()
            history.cursors = kept
        case "replays":
            replays = {name: queue.replay for name, queue in history.queues.items()}
            for queue in history.queues.values():
                queue.replay = {}
            more = history.may_go_unreferenced()
            for name, replay in replays.items():
                history.queues[name].replay = replay
        case _:
            entries, history.entries = history.entries, {}
            more = history.may_go_unreferenced()
            history.entries = entries
    return more - allowed


def test_done_and_dead_letters_take_what_the_model_allows(
    tables: dict[str, DataFrame], lived: list[History]
) -> None:
    over = overdue_done(tables["done"], done_ends(tables["queues"], NOW_MS, GRACE_MS))
    due = due_dead_letters(tables["failed"], tables["queues"], NOW_MS - 100_000)

    assert rows(over, "queue", "message_id") == united(h.may_prune_done() for h in lived)
    failed_at = due.selectExpr("queue", "message_id", "unix_millis(failed_at) AS failed_at_ms")
    assert rows(failed_at, *failed_at.columns) == united(h.due_letters(100_000) for h in lived)
    assert min(over.count(), due.count()) > HISTORIES // 2


def test_no_message_that_was_removed_is_needed_later() -> None:
    """What the model allows: the tests above hold the jobs to it."""
    for number in range(examples(800)):
        history = History(number)
        history.removed = history.may_expire_messages() | history.may_go_unreferenced()
        removed = history.removed
        history.go_on()
        assert not history.missed, (number, removed, history.missed)
