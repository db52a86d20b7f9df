"""What is told of a Spark that does not start."""

from __future__ import annotations

import pytest

from services.janitor.session import why_not

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
