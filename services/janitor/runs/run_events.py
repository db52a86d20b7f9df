"""What others are told of runs: nothing, as in direct mode. `OwedEvents` makes events of them."""

from __future__ import annotations

from services.janitor.runs.history import Run

__all__ = ["RunEvents"]


class RunEvents:
    """Called once a run is written down that has begun, or ended.

    Attributes:
        mark: What new runs have as `events`.
    """

    mark: str = ""

    def changed(self, run: Run) -> None:
        """A run has begun, or ended."""
