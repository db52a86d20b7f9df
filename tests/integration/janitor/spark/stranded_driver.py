"""A driver on a cluster that has no room for its executors: prints why its job has failed.

python -m tests.integration.janitor.spark.stranded_driver ROOT JOB
"""

from __future__ import annotations

import sys
from dataclasses import replace

from services.janitor.jobs import work
from services.janitor.jobs.contract import JobFailed
from services.janitor.jobs.run import run_job
from tests.integration.janitor.conftest import SMALL
from tests.integration.janitor.instances import OPTIONS

MASTER = "local-cluster[1,1,1024]"
SETTINGS = {
    **SMALL,
    "spark.executor.cores": "2",  # the one worker has one
    "spark.executor.memory": "512m",
    "spark.driver.bindAddress": "127.0.0.1",
}

if __name__ == "__main__":
    root, job = sys.argv[1:]
    work.UNTAKEN_S = 0.0  # type: ignore[misc]
    try:
        run_job(job, root, replace(OPTIONS, master=MASTER, memory="512m", spark=SETTINGS))
    except JobFailed as error:
        sys.stdout.write(f"{error}\n")
