"""One small Spark for all tests of a run: starting it takes five seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from services.janitor.session import spark_session
from tests.integration.janitor.ready_daemon import MODULE

SMALL = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m",
    "spark.sql.shuffle.partitions": "2",
    "spark.log.level": "ERROR",
}


READY = {"spark.python.daemon.module": MODULE}
"""Half of what jobs over small instances take are imports."""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with spark_session("local[2]", "512m", {**SMALL, **READY}) as session:
        yield session
