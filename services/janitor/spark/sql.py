"""`python -m services.janitor sql 'SELECT …'`: a question to an instance, answered by Spark.

Takes snapshots, asks, prints, releases the snapshots. stdout has the answer alone.
"""

from __future__ import annotations

import argparse
import base64
import csv
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final, TextIO

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StructType,
    TimestampNTZType,
)

from libs.storage.errors import StorageError
from services.janitor.spark.failures import without_stack
from services.janitor.spark.session import LOCAL_MASTER, QUIET, spark_session
from services.janitor.spark.snapshots import open_tables
from services.janitor.spark.tables import TABLES
from slatemq.errors import SlateMQError
from slatemq.variables import unknown_variables

INTERRUPTED: Final = 130
"""After Ctrl-C: 128 and the number of the signal, as shells do it."""

READER_GONE: Final = 141
"""128 and the number of SIGPIPE: the reader, such as `head`, has read enough."""

SHOWN_ROWS: Final = 1000
"""Rows of a table for people; the other forms have all."""

EPILOG: Final = f"""\
tables: {", ".join(TABLES)}

examples:
  python -m services.janitor sql --root file:///var/lib/slatemq 'SELECT * FROM queues'
  python -m services.janitor sql "SELECT queue, count(*) FROM failed WHERE day = '2026-01-01' \
GROUP BY queue"

SLATEMQ_ROOT is the root where none is given. Exit codes: 0 answered, 1 failed, 2 wrong
usage, 130 after Ctrl-C."""


@dataclass(frozen=True)
class Question:
    """A query in Spark SQL; `form` is `table`, `csv` or `json` (an object per line)."""

    sql: str
    root: str
    master: str = LOCAL_MASTER
    memory: str = "1g"
    form: str = "table"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Question:
    """Raises SystemExit: 0 after `--help`, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m services.janitor", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    sql = commands.add_parser(
        "sql",
        description="Questions to an instance, answered by Spark from snapshots of its shards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sql.add_argument("sql", metavar="QUERY", help="such as 'SELECT * FROM queues'")
    sql.add_argument("--root", default=environ.get("SLATEMQ_ROOT"), help="URL of the root")
    sql.add_argument("--master", default=LOCAL_MASTER, help="Spark master (default %(default)s)")
    sql.add_argument("--memory", default="1g", help="heap of the driver (default %(default)s)")
    sql.add_argument(
        "--format",
        dest="form",
        choices=("table", "csv", "json"),
        default="table",
        help="a table of at most 1,000 rows, csv with a header, or an object per line",
    )
    args = parser.parse_args(argv)
    if not args.root:
        sql.error("--root or SLATEMQ_ROOT is required")
    return Question(args.sql, args.root, args.master, args.memory, args.form)


def ask(question: Question, out: TextIO) -> None:
    """Answer a question on `out`. Raises SlateMQError, StorageError, ValueError, errors of Spark.

    A snapshot that is lost meanwhile fails the tasks that read it.
    """
    with spark_session(question.master, question.memory, QUIET) as spark:
        if threading.current_thread() is threading.main_thread():
            # Spark's own asks the JVM to end its jobs, in the middle of another question to it.
            signal.signal(signal.SIGINT, _interrupt)
        with open_tables(spark, question.root) as table:
            for name in _named(question.sql):
                table(name).createOrReplaceTempView(name)
            write_answer(spark.sql(question.sql), question.form, out)


def _interrupt(_number: int, _frame: object) -> None:
    logging.disable()  # py4j logs it at length
    raise KeyboardInterrupt


def _named(sql: str) -> list[str]:
    """The tables that a query is about: Spark starts a process for each."""
    if re.search(r"\bshow\s+(tables|views)\b", sql, re.IGNORECASE):
        return list(TABLES)
    return [name for name in TABLES if re.search(rf"\b{name}\b", sql, re.IGNORECASE)]


def write_answer(frame: DataFrame, form: str, out: TextIO) -> None:
    if form == "table":
        with redirect_stdout(out):
            frame.show(SHOWN_ROWS, truncate=False)
    elif form == "csv":
        _write_csv(frame, out)
    else:
        _check_names(frame.columns)
        for row in frame.toLocalIterator():
            json.dump(plain(row, frame.schema), out, allow_nan=False, ensure_ascii=False)
            out.write("\n")


def _check_names(columns: Sequence[str]) -> None:
    """Raises ValueError where an object would lose a column."""
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise ValueError(f"several columns are named {', '.join(twice)}: name them apart with AS")


def _write_csv(frame: DataFrame, out: TextIO) -> None:
    writer = csv.writer(out)
    writer.writerow(frame.columns)
    kinds = [field.dataType for field in frame.schema.fields]
    for row in frame.toLocalIterator():
        values = [_text(value, kind) for value, kind in zip(row, kinds, strict=True)]
        writer.writerow(json.dumps(one) if isinstance(one, dict | list) else one for one in values)


def _text(value: Any, kind: DataType) -> Any:
    """Like `plain`, with all digits of a decimal."""
    return f"{value:f}" if isinstance(value, Decimal) else plain(value, kind)


def plain(value: Any, kind: DataType) -> Any:
    """A value of a column of this type in the types of JSON; a row becomes an object."""
    match value, kind:
        case Row(), StructType():
            columns = zip(kind.fields, value, strict=True)
            return {field.name: plain(one, field.dataType) for field, one in columns}
        case Mapping(), MapType():
            return {
                str(plain(key, kind.keyType)): plain(one, kind.valueType)
                for key, one in value.items()
            }
        case list(), ArrayType():
            return [plain(one, kind.elementType) for one in value]
        case datetime(), _:
            # Spark's moments come in the time of this machine, and do not say so.
            return value.isoformat() if isinstance(kind, TimestampNTZType) else _rfc_3339(value)
        case date(), _:
            return value.isoformat()
        case bytes() | bytearray(), _:
            return base64.b64encode(value).decode()
        case Decimal(), _:
            return int(value) if value == value.to_integral_value() else float(value)
        case float(), _:
            return value if math.isfinite(value) else None
        case bool() | int() | str() | None, _:
            return value
    return str(value)


def _rfc_3339(moment: datetime) -> str:
    precision = "microseconds" if moment.microsecond % 1000 else "milliseconds"
    text = moment.astimezone(UTC).isoformat(timespec=precision)
    return text.removesuffix("+00:00") + "Z"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Answer the question of a command line; returns the exit code."""
    question = parse(argv, environ)
    # Spark makes moments in the time of this process, where the last may be in the year 10000.
    os.environ["TZ"] = "UTC"
    time.tzset()
    if unknown := unknown_variables(environ):
        sys.stderr.write(f"warning: {unknown}\n")
    # It logs each mistake in a query as a page of JSON; we print a line.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        ask(question, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in buffers must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except (SlateMQError, StorageError, PySparkException, Py4JError, ValueError) as error:
        sys.stderr.write(f"{without_stack(error)}\n")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
