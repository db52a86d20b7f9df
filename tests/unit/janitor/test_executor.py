"""The command line of an executor that Spark has started as a pod."""

from __future__ import annotations

import pytest

from services.janitor.spark.executor import command_of

ENVIRON = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@10.0.0.7:7078",
    "SPARK_EXECUTOR_ID": "2",
    "SPARK_EXECUTOR_CORES": "1",
    "SPARK_EXECUTOR_MEMORY": "1g",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.9",
    "SPARK_EXECUTOR_POD_NAME": "slatemq-janitor-1-exec-2",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    **{f"SPARK_JAVA_OPT_{number}": f"-Dnumber={number}" for number in (10, 2, 0)},
}


def test_it_has_what_spark_says_by_the_environment() -> None:
    java, *words = command_of(ENVIRON, "/java")
    assert java == "/java/bin/java"
    assert words[:5] == ["-Dnumber=0", "-Dnumber=2", "-Dnumber=10", "-Xms1g", "-Xmx1g"]
    flag, classes, main, *arguments = words[5:]
    assert flag == "-cp"
    assert classes.endswith("/pyspark/jars/*")
    assert main.endswith(".KubernetesExecutorBackend")
    assert dict(zip(arguments[::2], arguments[1::2], strict=True)) == {
        "--driver-url": "spark://CoarseGrainedScheduler@10.0.0.7:7078",
        "--executor-id": "2",
        "--cores": "1",
        "--app-id": "spark-1",
        "--hostname": "10.0.0.9",
        "--resourceProfileId": "0",
        "--podName": "slatemq-janitor-1-exec-2",
    }


def test_classes_of_the_settings_come_before_those_of_spark() -> None:
    words = command_of({**ENVIRON, "SPARK_CLASSPATH": "/more/*"}, "/java")
    assert words[words.index("-cp") + 1].startswith("/more/*:")


@pytest.mark.parametrize("name", ["SPARK_DRIVER_URL", "SPARK_EXECUTOR_MEMORY"])
def test_what_lacks_is_named(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        command_of({key: value for key, value in ENVIRON.items() if key != name}, "/java")
