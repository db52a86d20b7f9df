"""`slatemq events status`: how far events are published to the backend of event queues."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from slatemq.cli.failures import EXIT_UNREACHABLE
from slatemq.cli.output import say, write_json, write_table
from slatemq.cli.session import Session, pass_session, run, session_options

if TYPE_CHECKING:
    from slatemq._admin.events_status import EventsStatus

STATUS_EPILOG = """\
\b
Examples:
  slatemq events status
  slatemq events status --json | jq .lag_count
  slatemq events status --check

\b
The lag is in events of what is durable that the backend does not have yet;
its age is that of the first one. The cursor of an ingest is a message, that of
a broker counts its events, that of a janitor its looks at runs.
docs/how-to/write-through.md says what happens while a backend is away.
"""


@click.command("status", epilog=STATUS_EPILOG)
@click.option("--check", is_flag=True, help="End with 3 where a process or backend is away.")
@session_options
@pass_session
def status(session: Session, check: bool) -> None:
    """Show each process's backend, whether it answers, and the lag behind."""

    async def work() -> list[EventsStatus]:
        async with session.connect() as client:
            return await client.events_status()

    found = run(work())
    if session.json:
        for one in found:
            # Message IDs are text, since JSON's numbers are too small for them.
            ids = {"cursor": str(one.cursor), "durable_sequence": str(one.durable_sequence)}
            write_json({**asdict(one), **ids})
    else:
        _show(found)
    if check and any(one.problem or (one.enabled and not one.answering) for one in found):
        sys.exit(EXIT_UNREACHABLE)


def _show(found: list[EventsStatus]) -> None:
    write_table(
        ("process", "backend", "mode", "state", "lag", "age", "cursor", "lost"),
        (
            (
                f"{one.service} {one.shard}",
                one.backend or "-",
                one.consistency or "direct",
                _state(one),
                one.lag_count,
                f"{one.lag_ms / 1000:.1f}s" if one.lag_ms else "",
                one.cursor,
                one.lost_count + one.dropped_count,
            )
            for one in found
        ),
        cuts=("mode", "state", "backend"),
    )
    for one in found:
        error = one.problem or ("" if one.answering else one.last_error)
        if error:
            say(f"{one.service} {one.shard}: {error}")


def _state(one: EventsStatus) -> str:
    if one.problem:
        return "process away"
    if not one.enabled:
        return "off"
    return "answers" if one.answering else "backend away"
