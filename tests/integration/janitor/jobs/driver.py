"""A driver that may be killed: runs one job.

python -m tests.integration.janitor.jobs.driver ROOT JOB [NOW_MS]

NOW_MS is the time to judge by: a clock that stands still.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from services.janitor.jobs import verifying
from services.janitor.jobs.contract import VERIFYING, Progress
from services.janitor.jobs.run import run_job
from tests.integration.janitor.conftest import SMALL
from tests.integration.janitor.instances import OPTIONS
from tests.integration.janitor.jobs.killing import DAEMON, DRIVER, arm, begin


def report(progress: Progress) -> None:
    begin(progress.phase)


if __name__ == "__main__":
    root, job, *still = sys.argv[1:]
    now_ms = int(still[0]) if still else None
    os.environ[DRIVER] = str(os.getpid())
    arm()
    # One task at a time: what is killed within one leaves nothing that goes on.
    spark = {**SMALL, **DAEMON}
    options = replace(OPTIONS, master="local[1]", memory="512m", spark=spark, now_ms=now_ms)
    do = verifying.run_job if job in VERIFYING else run_job
    do(job, root, options, report)
