"""How Spark is started, and what is told when it does not."""

from __future__ import annotations

import pytest

from services.janitor.jobs.contract import JobOptions
from services.janitor.jobs.run import settings_of
from services.janitor.session import why_not

ONE_COMPILER = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"

AWAY = """\
An error occurred while calling None.org.apache.spark.sql.classic.SparkSession.
: java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.
This stopped SparkContext was created at:
"""

REFUSED = """\
An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: Could not parse Master URL: 'mesos://x'
\tat org.apache.spark.SparkContext$.createTaskScheduler(SparkContext.scala:3364)
"""


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (AWAY, "no master answers there, or it refuses"),
        (REFUSED, "org.apache.spark.SparkException: Could not parse Master URL: 'mesos://x'"),
        ("[JAVA_GATEWAY_EXITED] Java gateway process exited", "Java has ended"),
        ("", "it does not say why"),
    ],
)
def test_why_spark_does_not_start_is_told_in_a_line(told: str, why: str) -> None:
    assert why in why_not(told)
    assert "\n" not in why_not(told)


@pytest.mark.parametrize(
    ("job", "options", "told"),
    [
        ("retention", JobOptions(), ONE_COMPILER),
        ("unreferenced", JobOptions(master="local[2]"), ONE_COMPILER),
        ("report", JobOptions(), None),
        ("retention", JobOptions(master="local-cluster[2,1,1024]"), None),
        ("retention", JobOptions(spark={"spark.driver.defaultJavaOptions": "-Da=b"}), "-Da=b"),
    ],
)
def test_java_compiles_little_for_a_job_that_is_brief_unless_it_is_told_otherwise(
    job: str, options: JobOptions, told: str | None
) -> None:
    assert settings_of(job, options).get("spark.driver.defaultJavaOptions") == told
