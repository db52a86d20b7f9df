"""`python -m services.janitor.spark.executor`: an executor of Spark, in a pod.

Spark's own image starts executors with a shell script. This does the same with what the janitor's
image has, so that driver and executors are of one version. Spark says by the environment
what a pod is to do.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyspark

from services.janitor.spark.session import java_environment

_MAIN: Final = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"

_ARGUMENTS: Final = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}

_JAVA_OPTION: Final = re.compile(r"SPARK_JAVA_OPT_(\d+)")


def command_of(environ: Mapping[str, str], java_home: str) -> list[str]:
    """The command line of the executor that the environment describes. Raises KeyError."""
    options = {
        int(found[1]): value
        for name, value in environ.items()
        if (found := _JAVA_OPTION.fullmatch(name))
    }
    heap = environ["SPARK_EXECUTOR_MEMORY"]
    folders = [environ.get("SPARK_CLASSPATH", ""), f"{Path(pyspark.__path__[0]) / 'jars'}/*"]
    return [
        f"{java_home}/bin/java",
        *(options[number] for number in sorted(options)),
        f"-Xms{heap}",
        f"-Xmx{heap}",
        *("-cp", ":".join(filter(None, folders))),
        _MAIN,
        *(part for flag, name in _ARGUMENTS.items() for part in (flag, environ[name])),
    ]


def main() -> None:
    """Become the executor."""
    java = java_environment(os.environ)
    try:
        command = command_of(os.environ, java["JAVA_HOME"])
    except KeyError as error:
        sys.exit(f"{error.args[0]} is not set: Spark starts this in the pods of its executors")
    os.execve(command[0], command, {**os.environ, **java})


if __name__ == "__main__":
    main()
