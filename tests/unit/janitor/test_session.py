"""How Spark is started."""

from __future__ import annotations

import pytest

from services.janitor.jobs.contract import JobOptions
from services.janitor.jobs.run import settings_of

ONE_COMPILER = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"


@pytest.mark.parametrize(
    ("job", "options", "text"),
    [
        ("retention", JobOptions(), ONE_COMPILER),
        ("unreferenced", JobOptions(master="local[2]"), ONE_COMPILER),
        ("report", JobOptions(), None),
        ("retention", JobOptions(master="local-cluster[2,1,1024]"), None),
        ("retention", JobOptions(spark={"spark.driver.defaultJavaOptions": "-Da=b"}), "-Da=b"),
    ],
)
def test_java_compiles_little_for_a_job_that_is_brief_unless_it_is_set_otherwise(
    job: str, options: JobOptions, text: str | None
) -> None:
    assert settings_of(job, options).get("spark.driver.defaultJavaOptions") == text
