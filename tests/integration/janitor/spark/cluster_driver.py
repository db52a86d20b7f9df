"""A driver for a cluster: prints whose code its executors have, and runs a job.

python -m tests.integration.janitor.spark.cluster_driver ROOT MASTER JOB
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

import services
from services.janitor.jobs.run import run_on
from services.janitor.spark.session import spark_session
from tests.integration.janitor.conftest import SMALL
from tests.integration.janitor.instances import OPTIONS

SETTINGS = {**SMALL, "spark.executor.memory": "512m", "spark.driver.bindAddress": "127.0.0.1"}


def places(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        yield pa.RecordBatch.from_pydict({"place": [str(services.__path__[0])]})


places.__module__ = "__main__"  # it goes along whole: executors do not have the tests

if __name__ == "__main__":
    root, master, job = sys.argv[1:]
    with spark_session(master, "512m", SETTINGS) as spark:
        found = spark.range(0, 1, 1, 1).mapInArrow(places, "place string").collect()
        options = replace(OPTIONS, master=master)
        result = run_on(spark, job, root, options, lambda _: None)
    fields = {"places": [row["place"] for row in found], "counts": result.counts}
    sys.stdout.write(f"{json.dumps(fields)}\n")
