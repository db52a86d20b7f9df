"""The page about the tables, and what the filters of queries make of them."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)
from pyspark.sql.pandas.types import from_arrow_schema

from services.janitor.spark.source import SlateMQSource
from services.janitor.spark.tables import TABLES
from services.janitor.spark.wanted import EVERYTHING, RowFilter, wanted_by

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/tables.md"

DAY_MS = 86_400_000
FIRST_MS = 1_767_225_600_000  # 2026-01-01
FIRST_DAY_MS = -62_135_596_800_000
LAST_DAY_MS = 253_402_214_400_000


def test_the_page_shows_every_column_of_every_table_with_its_type_in_order() -> None:
    fields: dict[str, list[tuple[str, str]]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        name, _, rest = section.partition("\n")
        fields[name] = re.findall(r"^\| `(\w+)` \| ([A-Z<>,]+) \|", rest, re.MULTILINE)

    columns = {
        table.name: [
            (field.name, field.dataType.simpleString().upper())
            for field in from_arrow_schema(table.schema)
        ]
        for table in TABLES.values()
    }
    assert fields == columns


SNAPSHOT = "5f5818cf-92dc-4367-8cae-3b5d530224c6"

QUEUE, DAY, DONE_AT, ID = ("queue",), ("day",), ("done_at",), ("message_id",)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], EVERYTHING),
        ([EqualTo(QUEUE, "a")], RowFilter(queues=frozenset("a"))),
        ([In(QUEUE, ("a", "b")), EqualNullSafe(QUEUE, "b")], RowFilter(queues=frozenset("b"))),
        ([In(("broker_shard",), (1, 2))], RowFilter(shards=frozenset((1, 2)))),
        (
            [EqualTo(DAY, date(2026, 1, 2))],
            RowFilter(first_ms=FIRST_MS + DAY_MS, last_ms=FIRST_MS + 2 * DAY_MS - 1),
        ),
        ([GreaterThan(DAY, date(2026, 1, 1))], RowFilter(first_ms=FIRST_MS + DAY_MS)),
        ([LessThan(DAY, date(2026, 1, 1))], RowFilter(last_ms=FIRST_MS - 1)),
        # Days that have none beside them, as those mean them who want no bound.
        (
            [EqualTo(DAY, date.max)],
            RowFilter(first_ms=LAST_DAY_MS, last_ms=LAST_DAY_MS + DAY_MS - 1),
        ),
        ([GreaterThan(DAY, date.max)], RowFilter(first_ms=LAST_DAY_MS)),
        ([LessThan(DAY, date.min)], RowFilter(last_ms=FIRST_DAY_MS + DAY_MS - 1)),
        (
            [
                GreaterThanOrEqual(DONE_AT, datetime(2026, 1, 1, 0, 0, 0, 1999, UTC)),
                LessThan(DONE_AT, datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)),
                GreaterThan(DONE_AT, datetime(2025, 1, 1, tzinfo=UTC)),
            ],
            RowFilter(first_ms=FIRST_MS + 1, last_ms=FIRST_MS + 1000),
        ),
        ([GreaterThan(ID, 4), LessThanOrEqual(ID, 9)], RowFilter(first_id=5, last_id=9)),
        ([In(ID, (7, 3, None))], RowFilter(first_id=3, last_id=7)),
        # What narrows no keys: Spark applies it.
        ([GreaterThan(QUEUE, "a"), StringContains(QUEUE, "a")], EVERYTHING),
        ([Not(EqualTo(QUEUE, "a")), IsNotNull(QUEUE), EqualTo(QUEUE, None)], EVERYTHING),
        ([EqualTo(("headers", "queue"), "a"), EqualTo(("consumer",), "a")], EVERYTHING),
        ([In(QUEUE, (None,))], EVERYTHING),
    ],
)
def test_filters_narrow_what_is_wanted_and_nothing_else(
    filters: list[Filter], expected: RowFilter
) -> None:
    assert wanted_by(filters, "done_at") == expected


def test_a_table_without_an_order_of_time_is_not_narrowed_by_days() -> None:
    assert wanted_by([EqualTo(DAY, date(2026, 1, 2))], "") == EVERYTHING


def test_bounds_that_leave_nothing_are_known_for_it() -> None:
    assert RowFilter(first_id=2, last_id=1).nothing
    assert RowFilter(first_ms=2, last_ms=1).nothing
    assert not RowFilter(first_ms=2, last_id=1).nothing


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"table": "entries"}, "option table: unknown table 'entries'"),
        ({"root": ""}, "option root"),
        ({"database": "ingest/0,broker/0"}, "2 databases, 1 snapshots"),
        ({"database": "ingest"}, "'ingest' must be such as ingest/0"),
        ({"database": "router/0"}, "'router/0' must be such as"),
        ({"database": "broker/²"}, "'broker/²' must be such as"),
        ({"snapshot": "s"}, "option snapshot: 's' is not the ID"),
        ({"partitions": "many"}, "option partitions: 'many'"),
        ({"partitions": "0"}, "option partitions: '0'"),
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, str], text: str) -> None:
    good = {"root": "file:///x", "table": "done", "database": "broker/0", "snapshot": SNAPSHOT}
    assert SlateMQSource(good).schema() is not None

    with pytest.raises(ValueError, match=re.escape(text)):
        SlateMQSource({**good, **wrong}).schema()
