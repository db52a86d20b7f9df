"""Times as the jobs compare them: milliseconds in Python, timestamps in Spark."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as sf

from libs.storage.arrow.columns import LAST_MS


def at_ms(moment_ms: int) -> Column:
    """The time as a timestamp, which narrows scans; bounded by the latest time that tables have."""
    return sf.timestamp_millis(sf.lit(min(max(0, moment_ms), LAST_MS)))


def ms_of(column: str) -> Column:
    """The time of a column in milliseconds; null where it has none."""
    return sf.unix_millis(sf.col(column))
