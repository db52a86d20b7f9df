"""`python -m services`: the whole local stack, each service its own process."""

from __future__ import annotations

import os
import sys

from services.stack.launcher import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], os.environ))
