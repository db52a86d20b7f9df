"""What the janitor measures: its runs, when they end."""

from __future__ import annotations

from typing import Final

from libs.serving.telemetry import Telemetry
from services.janitor.jobs.contract import JOBS
from services.janitor.runs.history import Run, State

RUN_BUCKETS_S: Final = (5, 10, 20, 30, 60, 120, 300, 600, 1_800, 3_600, 10_800)
"""Spark alone takes 5 to 10 s to start."""


class RunMeasures:
    def __init__(self, telemetry: Telemetry) -> None:
        """Make the instruments."""
        meter = telemetry.meter
        self._runs = meter.create_counter(
            "slatemq.janitor.runs", unit="{run}", description="Runs that have ended, by their end"
        )
        for job in JOBS:  # From 0 on, so that the first one that fails is an increase.
            for state in (State.DONE, State.FAILED, State.INTERRUPTED):
                self._runs.add(0, {"slatemq.job": job, "slatemq.run.state": str(state)})
        self._durations = meter.create_histogram(
            "slatemq.janitor.run.duration",
            unit="s",
            description="From the beginning of a run to its end",
            explicit_bucket_boundaries_advisory=RUN_BUCKETS_S,
        )

    def ended(self, run: Run) -> None:
        job = {"slatemq.job": run.ask.job}
        self._runs.add(1, {**job, "slatemq.run.state": str(run.state)})
        # The end of an interrupted one may be when its successor found it, days later.
        if run.started_at_ms and run.state is not State.INTERRUPTED:
            self._durations.record((run.ended_at_ms - run.started_at_ms) / 1000, job)
