"""`python -m services.janitor.runs.worker`: the child that a janitor starts for a run."""

from __future__ import annotations

import sys

from services.janitor.jobs.run import run_job
from services.janitor.runs.working import work

if __name__ == "__main__":
    sys.exit(work(run_job))
