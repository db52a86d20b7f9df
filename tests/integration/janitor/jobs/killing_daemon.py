"""Spark's daemon for Python workers, which may kill the driver from within a task."""

from __future__ import annotations

from pyspark import daemon

from tests.integration.janitor.jobs.killing import arm
from tests.integration.janitor.spark.ready_daemon import load

if __name__ == "__main__":
    arm()
    load()
    daemon.manager()
