"""What came of the tasks, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from examples.demo.report import FAULTS_SHOWN
from examples.demo.tasks.judge import TasksVerdict

CAPTION = """\
answered   until the backend had a publish of ten events: the median
applied    stored by the ingest, from its task
lost       answered, but never arrived: anything but 0 would be a fault
twice      stored more than once: anything but 0 would be a fault"""

COUNTS = ("tasks", "published", "applied", "arrived", "lost", "doubled")


def tasks_as_json(verdict: TasksVerdict, backend: str, seconds: float) -> str:
    """One JSON object, on one line."""
    totals = {name: verdict.total(name) for name in COUNTS}
    fields = {"ok": not verdict.faults, "backend": backend, "seconds": round(seconds, 2), **totals}
    phases = {phase.phase: asdict(phase) for phase in verdict.phases}
    return json.dumps({**fields, "phases": phases, "faults": verdict.faults})


def show_tasks_table(console: Console, verdict: TasksVerdict, backend: str, seconds: float) -> None:
    """Print the table, and below it what should not be."""
    published = verdict.total("published")
    table = Table(title=f"{published} events through {backend}, {seconds:.1f} s")
    table.add_column("when")
    for name in ("tasks", "events", "answered", "applied", "arrived", "lost", "twice"):
        table.add_column(name, justify="right")
    for row in verdict.phases:
        tasks, messages, *others = (str(getattr(row, name)) for name in COUNTS)
        table.add_row(row.phase, tasks, messages, f"{row.answer_ms:.1f} ms", *others)
    table.add_section()
    tasks, messages, *others = (str(verdict.total(name)) for name in COUNTS)
    table.add_row("all", tasks, messages, "", *others, style="bold")
    console.print(table)
    console.print(CAPTION, style="dim", highlight=False)
    for fault in verdict.faults[:FAULTS_SHOWN]:
        console.print("wrong:", fault, style="red", markup=False, highlight=False)
    if len(verdict.faults) > FAULTS_SHOWN:
        console.print(f"… and {len(verdict.faults) - FAULTS_SHOWN} more")
    if not verdict.faults:
        console.print("Nothing lost, each task applied once.")
