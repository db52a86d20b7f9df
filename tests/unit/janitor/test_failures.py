"""What is told of Spark's errors."""

from __future__ import annotations

import pytest

from services.janitor.spark.failures import cause_of, why_not, without_stack

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
    ("text", "why"),
    [
        (AWAY, "no master answers there, or it refuses"),
        (REFUSED, "org.apache.spark.SparkException: Could not parse Master URL: 'mesos://x'"),
        ("[JAVA_GATEWAY_EXITED] Java gateway process exited", "Java has ended"),
        ("", "Spark gives no reason"),
    ],
)
def test_why_spark_does_not_start_is_reported_in_a_line(text: str, why: str) -> None:
    assert why in why_not(text)
    assert "\n" not in why_not(text)


def test_no_secret_of_a_library_is_reported() -> None:
    text = "GET http://key:SECRET@host:1/b failed"

    for said in (why_not(text), cause_of(OSError(text)), without_stack(OSError(text))):
        assert said == "GET http://***@host:1/b failed"


TASK = """\
Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times: org.apache.spark.api.python:
Traceback (most recent call last):
  File "reading.py", line 90, in read
    raise CorruptRecord("payload pack", why)
libs.storage.errors.CorruptRecord: payload pack: ends too early

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
Caused by: Something: else
"""

QUERY = """\
[UNRESOLVED_COLUMN] A column with name `q` cannot be resolved. SQLSTATE: 42703; line 1 pos 7;
'Project ['q]
+- OneRowRelation

JVM stacktrace:
org.apache.spark.sql.catalyst.ExtendedAnalysisException
\tat org.apache.spark.sql.errors.QueryCompilationErrors$.unresolvedColumn(Errors.scala:9)
"""


def test_of_a_task_that_failed_the_line_of_python_is_reported() -> None:
    assert cause_of(Exception(TASK)) == (
        "libs.storage.errors.CorruptRecord: payload pack: ends too early"
    )
    assert cause_of(Exception("snapshot 5 is gone")) == "snapshot 5 is gone"
    assert cause_of(ValueError()) == "ValueError"


def test_of_a_query_all_is_reported_but_the_stack() -> None:
    assert without_stack(Exception(QUERY)) == QUERY.partition("\n\nJVM")[0]
