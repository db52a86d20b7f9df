"""Times as the jobs compare them: milliseconds in Python, timestamps in Spark."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as sf

__all__ = ["at_ms", "ms_of"]

LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, where later times stand in the tables: Python knows none."""


def at_ms(moment_ms: int) -> Column:
    """This time as a timestamp, which a scan can be narrowed by."""
    return sf.timestamp_millis(sf.lit(min(max(0, moment_ms), LATEST_MS)))


def ms_of(column: str) -> Column:
    """The time of a column in milliseconds; null where it has none."""
    return sf.unix_millis(sf.col(column))
