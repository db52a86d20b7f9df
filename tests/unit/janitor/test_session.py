"""How Spark is started."""

from __future__ import annotations

import pytest

from services.janitor.jobs.contract import JobOptions
from services.janitor.jobs.run import settings_of
from services.janitor.spark.session import variables_of_workers

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


def test_calls_of_workers_have_the_trace_and_the_tls_of_the_drivers() -> None:
    environ = {
        "TRACEPARENT": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "TRACESTATE": "vendor=1",
        "SLATEMQ_TLS_CA": "/tls/ca.crt",
        "SLATEMQ_TLS_CERT": "/tls/tls.crt",
        "SLATEMQ_TLS_KEY": "/tls/tls.key",
        "SLATEMQ_SERVICE_IDENTITY": "spiffe://slatemq/service",
    }

    found = variables_of_workers({**environ, "HOME": "/root"})

    assert found == {f"spark.executorEnv.{name}": value for name, value in environ.items()}
