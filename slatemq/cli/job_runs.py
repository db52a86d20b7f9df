"""Follows runs of the janitor's jobs to their end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from slatemq.cli.failures import Interrupted
from slatemq.cli.output import note, progress
from slatemq.cli.session import Session
from slatemq.errors import SlateMQError

if TYPE_CHECKING:
    from slatemq._admin.janitor import JobRun
    from slatemq.client import Client

COLUMNS = ("{task.description}", "BarColumn", "{task.fields[tasks]}", "TimeElapsedColumn")
"""Of a progress bar."""


def end_of(session: Session, begun: JobRun) -> JobRun:
    """Wait for the end of a run; when interrupted, ask whether to cancel it."""
    name = begun.run_id
    how_to_follow = (
        f"the run continues; `slatemq janitor show {name} --follow` follows it, "
        f"`slatemq janitor cancel {name}` cancels it"
    )

    async def wait(client: Client) -> JobRun:
        try:
            with _progress(session) as report:
                return await client.wait_job_run(begun, on_progress=report)
        except SlateMQError:
            note(how_to_follow)
            raise

    try:
        return session.call(wait)
    except Interrupted:
        if not _wants_end():
            note(how_to_follow)
            raise
        return cancelled(session, name)


def _wants_end() -> bool:
    """Ask whether to cancel the run; without a terminal the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    try:
        return click.confirm("\nThe run continues in the janitor. Cancel it?", err=True)
    except click.Abort:
        print(file=sys.stderr)
        return False


def cancelled(session: Session, run_id: str) -> JobRun:
    """Cancel a run, and wait for its end."""

    async def cancel(client: Client) -> JobRun:
        return await client.wait_job_run(await client.cancel_job_run(run_id))

    return session.call(cancel)


@contextmanager
def _progress(session: Session) -> Iterator[Callable[[JobRun], None]]:
    """A bar on stderr, where that is a terminal; yields the function that updates it."""
    with progress(not session.json, "waiting", None, COLUMNS, tasks="") as update:

        def report(one: JobRun) -> None:
            value = one.progress
            if value is None or one.state != "running":
                what = "starting" if one.state == "running" else one.state.value
                update(description=what, total=None, tasks="")
                return
            update(
                description=f"{value.phase} ({value.phase_number} of {value.phases_count})",
                total=value.tasks_count or None,
                completed=value.tasks_done,
                tasks=f"{value.tasks_done}/{value.tasks_count}" if value.tasks_count else "",
            )

        yield report
