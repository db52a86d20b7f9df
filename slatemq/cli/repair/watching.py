"""`slatemq message watch`: what is delayed in a queue, as it comes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from slatemq.cli.entry_output import show_entry
from slatemq.cli.output import note
from slatemq.cli.parameters import QUEUE, WORDS
from slatemq.cli.session import Session, pass_session, run, session_options

if TYPE_CHECKING:
    from slatemq._admin.watching import DelayedWatch

LOOK_S = 0.5
"""How often it is looked whether the broker is away."""

WATCH_EPILOG = """\
\b
Examples:
  slatemq message watch reminders
  slatemq message watch reminders --json | ./audit.sh
  slatemq message watch reminders --position QERd2Tn6AABof2fR8kEAAAAA

\b
First those that are delayed now, then each as it comes. One that is
rescheduled comes again; one that was cancelled meanwhile may come. At its end
it tells the position from which --position goes on: none is missed, some may
come again. A broker that restarts is waited for, for as long as --timeout.
"""


@click.command("watch", epilog=WATCH_EPILOG)
@click.argument("queue", type=QUEUE)
@click.option("--position", type=WORDS, default="", help="Go on where a watch before had come to.")
@session_options
@pass_session
def watch(session: Session, queue: str, position: str) -> None:
    """Print the delayed messages of QUEUE, each before it can be claimed, until Ctrl-C."""
    where = ""

    async def show(seen: DelayedWatch) -> None:
        nonlocal where
        async for entry in seen:
            show_entry(session, entry)
            where = seen.position

    async def work() -> None:
        async with (
            session.connect() as client,
            client.watch_delayed(queue, position=position) as seen,
        ):
            showing = asyncio.create_task(show(seen))
            try:
                while not showing.done():
                    await asyncio.wait([showing], timeout=LOOK_S)
                    # A watch waits for ever, which looks like a queue without messages.
                    if seen.outage is not None:
                        seen.outage.check(session.timeout.total_seconds())
                await showing
            finally:
                showing.cancel()
                await asyncio.gather(showing, return_exceptions=True)

    try:
        run(work())
    finally:
        if where:
            note(f"go on from here with --position {where}")
