"""What a janitor holds of a run while it has not ended, and how much of those that have."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from services.janitor.runs.child import Child
from services.janitor.runs.history import Run, State, Stored

__all__ = ["Active", "HistoryLimits"]


@dataclass(frozen=True)
class HistoryLimits:
    """How much of the history is kept: so many runs, each so long after its end (0: for ever)."""

    runs: int
    for_ms: int


@dataclass
class Active:
    """A run of this process that has not ended.

    Attributes:
        run: As it is now; `stored` is what was last written of it.
        changed: Set, and replaced, with each change.
        why: Why it is to end before its time.
    """

    stored: Stored
    run: Run
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    child: Child | None = None
    why: State | None = None
    replaced: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def update(self, **changes: Any) -> None:
        """Change these fields of the run, and wake those who watch it."""
        self.run = replace(self.run, **changes)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
