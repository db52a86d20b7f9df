"""One small Spark for all tests of a run (starting it takes five seconds), and a database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Database
from services.janitor.spark.session import spark_session
from tests.integration.janitor.spark.ready_daemon import MODULE

SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
"""Compiled once, in as much room as ever, and collected in one thread: half of what a Java takes
that ends within a minute is compiling."""

SMALL = {
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    "spark.sql.shuffle.partitions": "2",
    "spark.log.level": "ERROR",
}


READY = {"spark.python.daemon.module": MODULE}
"""Half of what jobs over small instances take are imports."""


@pytest.fixture(scope="session", autouse=True)
def short_lived() -> Iterator[None]:
    """All that is started here starts its Java so, as well: runs, drivers, and clusters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", SHORT_LIVED)
        yield


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""The trace context in which the session was started."""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRACEPARENT", TRACE)
            started = spark_session("local[2]", "512m", {**SMALL, **READY})
            session = stack.enter_context(started)
        yield session


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[tuple[Root, Database]]:
    root = open_root(tmp_path.as_uri())
    database = await root.database("ingest/0", Kind.INGEST)
    yield root, database
    await database.close()
