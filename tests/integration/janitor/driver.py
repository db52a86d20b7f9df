"""A driver that may be killed: runs one job, and tells each phase as it begins.

python -m tests.integration.janitor.driver ROOT JOB
"""

from __future__ import annotations

import sys
from dataclasses import replace

from services.janitor.jobs.contract import JobInstance, Progress
from services.janitor.jobs.run import run_job
from tests.integration.janitor.conftest import SMALL
from tests.integration.janitor.instances import OPTIONS


def tell(progress: Progress) -> None:
    """Tell the parent."""
    sys.stdout.write(f"{progress.phase}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    root, job = sys.argv[1:]
    options = replace(OPTIONS, master="local[2]", memory="512m", spark=SMALL)
    run_job(job, JobInstance(root), options, tell)
