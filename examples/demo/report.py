"""What came of it, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo.judge import Verdict

FAULTS_SHOWN = 10

CAPTION = """\
failed       dead letters: refused by the consumers at every attempt, on purpose
redelivered  came again: a consumer failed, let its lease end, or was cut off
lost         neither acked nor failed: anything but 0 would be a fault"""


def as_json(verdict: Verdict, seconds: float) -> str:
    """One JSON object, on one line."""
    fields: dict[str, Any] = {
        "ok": not verdict.faults,
        "published": verdict.published,
        "lost": verdict.lost,
        "seconds": round(seconds, 2),
        "queues": {
            queue.queue_id: {
                "routed": queue.routed,
                "acked": queue.acked,
                "failed": queue.failed,
                "redelivered": queue.redelivered,
                "lost": queue.lost,
            }
            for queue in verdict.queues
        },
        "faults": verdict.faults,
    }
    return json.dumps(fields)


def show(console: Console, verdict: Verdict, seconds: float) -> None:
    """Print the table, and below it what should not be."""
    table = Table(title=f"{verdict.published} messages published, {seconds:.1f} s")
    table.add_column("queue")
    for name in ("routed", "acked", "failed", "redelivered", "lost"):
        table.add_column(name, justify="right")
    rows = [
        (q.queue_id, q.routed, q.acked, q.failed, q.redelivered, q.lost) for q in verdict.queues
    ]
    for name, *counts in rows:
        table.add_row(name, *map(str, counts))
    table.add_section()
    totals = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    table.add_row("all", *map(str, totals), style="bold")
    console.print(table)
    console.print(CAPTION, style="dim", highlight=False)
    for fault in verdict.faults[:FAULTS_SHOWN]:
        console.print(f"[red]wrong:[/red] {fault}", highlight=False)
    if len(verdict.faults) > FAULTS_SHOWN:
        console.print(f"… and {len(verdict.faults) - FAULTS_SHOWN} more")
    if not verdict.faults:
        console.print("Nothing lost, nothing routed wrongly, nothing delivered without a reason.")
