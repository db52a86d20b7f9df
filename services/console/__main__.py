"""`python -m services.console`: one console process."""

from __future__ import annotations

import os
import sys

from libs.serving.process.exits import exit_with
from libs.serving.process.process_config import load_own
from services.console.config import ConsoleConfig
from services.console.service import run

if __name__ == "__main__":
    exit_with(run(load_own(ConsoleConfig, "python -m services.console", sys.argv[1:], os.environ)))
