"""Spark's daemon for Python workers, with what they need loaded before they are forked.

Spark asks a worker of its own for each table's columns, conditions and partitions: half a second of
a processor each, some twenty times a job, if each has to load Arrow and SlateDB first. A worker
collects garbage after each task, and need not look at what was loaded.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import Final

from pyspark import daemon

MODULE: Final = "tests.integration.janitor.spark.ready_daemon"

_NEEDED: Final = (
    "pyspark.worker",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.plan_data_source_read",
    "services.janitor.spark.source",
    "services.janitor.jobs.dead_letter_jobs",
    "services.janitor.jobs.leftovers",
    "services.janitor.jobs.removing",
)


def load() -> None:
    """Load it; no thread may begin that a fork would leave behind, and OpenBLAS has some."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for module in _NEEDED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    load()
    daemon.manager()
