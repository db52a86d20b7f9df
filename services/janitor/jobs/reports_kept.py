"""How many reports stay: each run of `report` writes one, and forgets the oldest."""

from __future__ import annotations

import asyncio
import re
from typing import Final

from libs.storage.objects.small_objects import Objects

__all__ = ["FOLDER", "HTML", "PARQUET", "forget_reports"]

FOLDER: Final = "reports"
HTML: Final = "report.html"
PARQUET: Final = "report.parquet"

_RUN: Final = re.compile(r"(\d{8})[-T](\d{6})")
"""The beginning of a run's name: when it began."""


async def forget_reports(objects: Objects, kept: int) -> int:
    """Remove all but the newest reports, and nothing else that is there; gives how many went."""
    files: dict[tuple[str, str], list[str]] = {}
    for path in await objects.list(FOLDER):
        run, _, name = path.removeprefix(f"{FOLDER}/").partition("/")
        began = _RUN.match(run)
        if began is not None and name in (HTML, PARQUET):
            files.setdefault(("".join(began.groups()), run), []).append(path)
    old = sorted(files)[:-kept]
    for report in old:
        await asyncio.gather(*(objects.delete(path) for path in files[report]))
    return len(old)
