"""`python -m services`: the whole local stack, each service its own process."""

from __future__ import annotations

import os
import sys

from libs.storage.objects.durability import write_privately
from services.stack.launcher import run

if __name__ == "__main__":
    write_privately()
    sys.exit(run(sys.argv[1:], os.environ))
