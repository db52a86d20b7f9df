"""Times as the jobs compare them: milliseconds in Python, timestamps in Spark."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as sf

from libs.storage.arrow.columns import LAST_MS

__all__ = ["at_ms", "ms_of"]


def at_ms(moment_ms: int) -> Column:
    """This time as a timestamp, which a scan can be narrowed by; the tables know no later ones."""
    return sf.timestamp_millis(sf.lit(min(max(0, moment_ms), LAST_MS)))


def ms_of(column: str) -> Column:
    """The time of a column in milliseconds; null where it has none."""
    return sf.unix_millis(sf.col(column))
