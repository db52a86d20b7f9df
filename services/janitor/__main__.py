"""`python -m services.janitor sql 'SELECT …'`."""

from __future__ import annotations

import os
import sys

from services.janitor.sql import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
