"""`python -m MODULE SERVICE` is that service, as a standby that no stall of an owner deceives.

Where no supervisor starts an owner again, a test that is about something else must not lose one
that a busy machine keeps waiting for seconds. An owner whose process is gone is replaced as ever.
"""

from __future__ import annotations

import runpy
import sys
from typing import Final

import services.broker.service
import services.ingest.service  # noqa: F401 - forks of tests.ready_process have both loaded
from libs.serving.process import standby

MODULE: Final = "tests.patient_standby"

SILENT_LOOKS: Final = 20
"""Of half a second each."""

if __name__ == "__main__":
    standby.SILENT_LOOKS = SILENT_LOOKS  # type: ignore[misc]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
