"""`python -m services.scaler`: one scaler process."""

from __future__ import annotations

import os
import sys

from libs.serving.process.exits import exit_with
from libs.serving.process.process_config import load_own
from services.scaler.config import ScalerConfig
from services.scaler.service import run

if __name__ == "__main__":
    exit_with(run(load_own(ScalerConfig, "python -m services.scaler", sys.argv[1:], os.environ)))
