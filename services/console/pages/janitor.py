"""Runs of the janitor's jobs, and their reports."""

from __future__ import annotations

from typing import Final
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from services.console.rendering import (
    client_of,
    done,
    field_of,
    is_part,
    link,
    progress_code,
    render,
)
from slatemq._admin.janitor import JobRun
from slatemq.client import Client

RUNS_SHOWN: Final = 50

JOBS: Final = {
    "report": "shows what passed through each queue by day, as a page with pictures.",
    "retention": "removes messages and dead letters that are past their retention.",
    "unreferenced": "removes stored messages that no queue needs, and payloads of no message.",
    "done": "removes done messages that are past their queue's retention of those.",
    "dead-letters": "moves dead letters that failed more than 7 days ago into the archive.",
    "backup": "copies the whole instance to where the janitor's setting backup_root says.",
}
"""The jobs that need only their name; `slatemq janitor run` has all, with their options."""

REPORT_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'self'"
)
"""A report is one document with its own style, and runs no script."""


async def list_runs(request: Request) -> Response:
    client = await client_of(request)
    runs = await _newest(client)
    return render(request, "janitor.html", runs=runs, jobs=JOBS, request_id=str(uuid4()))


async def run_job(request: Request) -> Response:
    client = await client_of(request)
    run = await client.run_job(
        field_of(request, "job"),
        dry_run=field_of(request, "dry_run") == "on",
        request_id=field_of(request, "request_id"),
    )
    return done(request, link("/run", run=run.run_id), f"Run {run.run_id} has begun.")


async def show_run(request: Request) -> Response:
    """A run; while it goes on, its part of the page is asked for again."""
    client = await client_of(request)
    run = await client.get_job_run(field_of(request, "run"))
    has_report = any(path.endswith(".html") for path in run.artifacts)
    name, code = "run.html", 200
    if is_part(request):
        name, code = "_run.html", progress_code(goes_on=not run.ended)
    return render(request, name, code, run=run, has_report=has_report)


async def cancel_run(request: Request) -> Response:
    client = await client_of(request)
    run = await client.cancel_job_run(field_of(request, "run"))
    return done(request, link("/run", run=run.run_id), "The run ends within seconds.")


async def show_report(request: Request) -> Response:
    """The report's own page, for a frame: no script of it runs, and nothing is loaded."""
    client = await client_of(request)
    page = await client.read_report(field_of(request, "run"))
    headers = {"Content-Security-Policy": REPORT_POLICY, "X-Frame-Options": "SAMEORIGIN"}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


async def _newest(client: Client) -> list[JobRun]:
    runs: list[JobRun] = []
    async for run in client.list_job_runs():
        runs.append(run)
        if len(runs) == RUNS_SHOWN:
            break
    return runs
