"""The names of the janitor's jobs, apart: the command line completes them without the client."""

from __future__ import annotations

from typing import Final

JOBS: Final = (
    "retention",
    "unreferenced",
    "done",
    "dead-letters",
    "report",
    "restore",
    "backup",
    "verify",
    "repair",
)
