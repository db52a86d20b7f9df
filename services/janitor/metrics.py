"""What the janitor measures: its runs, when they end, and how old the newest backup is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from opentelemetry.metrics import CallbackOptions, Observation

from libs.serving.telemetry import Telemetry
from services.janitor.runs.history import Run, State
from slatemq._admin.job_names import JOBS

RUN_BUCKETS_S: Final = (5, 10, 20, 30, 60, 120, 300, 600, 1_800, 3_600, 10_800)
"""Spark alone takes 5 to 10 s to start."""


class RunMeasures:
    def __init__(self, telemetry: Telemetry, now_ms: Callable[[], int]) -> None:
        """Make the instruments."""
        self._now_ms = now_ms
        self._backup_ms = 0
        meter = telemetry.meter
        meter.create_observable_gauge(
            "slatemq.janitor.backup.age",
            callbacks=[self._backup_age],
            unit="s",
            description="Since the newest backup began; nothing where none is known",
        )
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

    def note_backup(self, run: Run) -> None:
        """Remember when a backup began, if this run made one."""
        if run.ask.job == "backup" and run.state is State.DONE and not run.ask.dry_run:
            self._backup_ms = max(self._backup_ms, run.started_at_ms)

    def _backup_age(self, _: CallbackOptions) -> Iterator[Observation]:
        if self._backup_ms:
            yield Observation((self._now_ms() - self._backup_ms) / 1000)

    def ended(self, run: Run) -> None:
        self.note_backup(run)
        job = {"slatemq.job": run.ask.job}
        self._runs.add(1, {**job, "slatemq.run.state": str(run.state)})
        # The end of an interrupted one may be when its successor found it, days later.
        if run.started_at_ms and run.state is not State.INTERRUPTED:
            self._durations.record((run.ended_at_ms - run.started_at_ms) / 1000, job)
