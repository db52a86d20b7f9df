"""`python -m services.janitor.worker`: the child that a janitor starts for a run (see `child`)."""

from __future__ import annotations

import sys

from services.janitor.jobs.run import run_job
from services.janitor.working import work

if __name__ == "__main__":
    sys.exit(work(run_job))
