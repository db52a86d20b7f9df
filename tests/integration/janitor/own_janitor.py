"""A real janitor, as a process, with the jobs of own_worker."""

from __future__ import annotations

import sys
from functools import partial

from libs.serving.main import main
from services.janitor.config import JanitorConfig
from services.janitor.service import JanitorProcess

WORKER = (sys.executable, "-m", "tests.integration.janitor.own_worker")

if __name__ == "__main__":
    main("janitor", JanitorConfig, partial(JanitorProcess, worker=WORKER))
