"""A service whose WAL objects are collected without delay, and not when they are minutes old.

python -m tests.faults.collecting ingest --root ...

What a frozen owner finds gone after minutes is gone after a second or two.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace

from libs.storage.database import settings

COLLECTING = {
    "garbage_collector_options.wal_options.interval": "100ms",
    "garbage_collector_options.wal_options.min_age": "0s",
}
FLUSHED = settings.ReplayBound(20, 0.5)
"""What a start would have to replay is not collected: so little of it is left."""


def collect_at_once() -> None:
    """From now on databases of this process are opened so."""
    for kind, tuning in settings._TABLE.items():
        collected = replace(tuning, replay=FLUSHED, settings={**tuning.settings, **COLLECTING})
        settings._TABLE[kind] = collected  # type: ignore[index]


if __name__ == "__main__":
    service = sys.argv.pop(1)
    collect_at_once()
    runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)
