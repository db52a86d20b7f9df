"""`slatemq janitor`: runs of the jobs that clean up, archive and report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from slatemq._admin.job_names import JOBS
from slatemq.cli.failures import EXIT_REFUSED
from slatemq.cli.job_runs import cancelled, end_of
from slatemq.cli.output import note, say, write_items, write_json
from slatemq.cli.parameters import (
    QUEUE,
    SECONDS,
    TIME,
    WORDS,
    Number,
    flag,
    format_duration,
    ids_option,
    queues_option,
)
from slatemq.cli.session import Group, Session

if TYPE_CHECKING:
    from slatemq._admin.janitor import JobRun
    from slatemq.client import Client

_RUN = click.argument("run_id", type=WORDS, metavar="RUN")


@click.group("janitor", cls=Group)
def janitor() -> None:
    """Run the jobs that clean up, archive and report."""


@janitor.command("run")
@click.argument("job", type=click.Choice(JOBS), metavar="JOB")
@flag("--dry-run", help="Count what would be removed; remove nothing.")
@queues_option
@click.option("--older-than", type=SECONDS, help="dead-letters: least time since they failed.")
@click.option("--days", type=Number(1, 3_660), help="report: days covered.")
@click.option("--into", type=QUEUE, default="", help="restore: into this queue.")
@ids_option
@click.option("--failed-from", type=TIME, help="restore: only what failed then or later.")
@click.option("--failed-until", type=TIME, help="restore: only what failed before then.")
@flag("--no-wait", help="Print the run's ID; do not wait for its end.")
def run_job(
    session: Session,
    job: str,
    queues: tuple[str, ...],
    days: int | None,
    ids: tuple[int, ...],
    no_wait: bool,
    **options: Any,
) -> None:
    """Run JOB, and wait for its end.

    JOB is retention, unreferenced, done, dead-letters, report, restore, backup,
    verify or repair; for the last two, `slatemq verify` and `slatemq repair` show
    more. --id selects the messages to restore.

    Examples:
      slatemq janitor run retention --dry-run
      slatemq janitor run dead-letters --older-than 30d --queue orders
      slatemq janitor run unreferenced --no-wait
      slatemq janitor run restore --queue orders --into orders-restored
      slatemq janitor run backup

    The janitor executes the run, and continues when this command ends: Ctrl-C
    asks whether to cancel it, `janitor show RUN --follow` follows it again, and
    `janitor cancel RUN` ends it. What it removed before stays removed. A janitor
    runs one job at a time. Exit code 1: the run did not complete.
    """
    begun = session.call(
        lambda client: client.run_job(
            job, queue_ids=queues, days=days or 0, message_ids=ids, **options
        )
    )
    if no_wait:
        session.show(_fields(begun), begun.run_id)
        return
    note(f"run {begun.run_id} is requested: it starts when no other run is active")
    ended = end_of(session, begun)
    _report(session, ended)
    if ended.state != "done":
        sys.exit(EXIT_REFUSED)


@janitor.command("runs", epilog="Example:\n  slatemq janitor runs retention --limit 5")
@click.argument("job", type=click.Choice(JOBS), required=False, metavar="[JOB]")
@click.option("--limit", type=Number(1), default=20, help="At most N runs.  [default: 20]")
def runs(session: Session, job: str | None, limit: int) -> None:
    """List the runs of JOB, or of all jobs, the newest first."""

    async def collect(client: Client) -> list[JobRun]:
        found: list[JobRun] = []
        async for one in client.list_job_runs(job or ""):
            found.append(one)
            if len(found) == limit:
                break
        return found

    found = session.call(collect)
    if session.json:
        for one in found:
            write_json(_fields(one))
        return
    _show_runs(found)


def _show_runs(found: Sequence[JobRun]) -> None:
    if not found:
        note("no janitor run found")
        return
    write_items(
        found,
        {
            "run": lambda one: one.run_id,
            "state": lambda one: one.state.value,
            "started by": lambda one: "schedule" if one.scheduled else "request",
            "took": _took,
            "result": lambda one: (
                ("dry run: " if one.dry_run else "") + (one.error or _counts(one) or _phase(one))
            ),
        },
    )


@janitor.command("show")
@_RUN
@flag("--follow", help="Wait for its end.")
def show(session: Session, run_id: str, follow: bool) -> None:
    """Show how far a run is, or what it did.

    Examples:
      slatemq janitor show RUN
      slatemq janitor show RUN --follow
      slatemq janitor show RUN --json | jq .counts
    """
    one = session.call(lambda client: client.get_job_run(run_id))
    if follow and not one.ended:
        one = end_of(session, one)
    _report(session, one)
    if follow and one.state != "done":
        sys.exit(EXIT_REFUSED)


@janitor.command("cancel", epilog="Example:\n  slatemq janitor cancel RUN")
@_RUN
def cancel(session: Session, run_id: str) -> None:
    """Cancel a run; what it has removed stays removed."""
    _report(session, cancelled(session, run_id))


def _report(session: Session, one: JobRun) -> None:
    if session.json:
        write_json(_fields(one))
        return
    dry = " (dry run: nothing was changed)" if one.dry_run else ""
    took = f" after {_took(one)}" if one.ended and one.started_at_ms else ""
    say(f"run {one.run_id} is {one.state.value}{took}{dry}")
    if not one.ended and one.progress is not None:
        say(f"  {_phase(one)}")
    for phase, took_ms in one.phases:
        say(f"  {phase}: {format_duration(took_ms)}")
    for name, count in one.counts.items():
        kind, _, queue = name.partition("/")
        say(f"    of {queue}: {count}" if queue else f"  {kind.replace('_', ' ')}: {count}")
    for path in one.artifacts:
        say(f"  wrote {path}")
    if one.error:
        note(one.error)


def _fields(one: JobRun) -> dict[str, Any]:
    phases = [{"phase": phase, "took_ms": took_ms} for phase, took_ms in one.phases]
    return {**asdict(one), "phases": phases}


def _counts(one: JobRun) -> str:
    return ", ".join(
        f"{count} {name.replace('_', ' ')}"
        for name, count in one.counts.items()
        if "/" not in name  # of single queues or parts
    )


def _phase(one: JobRun) -> str:
    value = one.progress
    if value is None or one.ended:
        return ""
    tasks = f", {value.tasks_done} of {value.tasks_count} tasks" if value.tasks_count else ""
    return f"{value.phase} ({value.phase_number} of {value.phases_count}{tasks})"


def _took(one: JobRun) -> str:
    if not one.started_at_ms or not one.ended:
        return ""
    return format_duration(max(0, one.ended_at_ms - one.started_at_ms))
