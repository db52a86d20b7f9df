"""`slatemq top`: the queues of an instance, as they change."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

import click

from slatemq.cli.parameters import DURATION, flag, format_duration
from slatemq.cli.session import Session, command

SHORTEST: Final = timedelta(milliseconds=500)
"""Between two looks: each asks every process, and lists all queues."""


@command("top")
@click.option(
    "--interval",
    type=DURATION,
    default="2s",
    show_default=True,
    help="How long to wait between two samples; at least 500ms.",
)
@flag("--once", help="Print one table, of two samples, and end; so does top without a terminal.")
def top(session: Session, interval: timedelta, once: bool) -> None:
    """Show the queues live: rates, depth, age of the oldest message, lag of routing.

    Examples:
      slatemq top
      slatemq top --interval 10s
      slatemq top --once
      slatemq top --json | jq '.queues[] | {queue_id, in_per_s, out_per_s}'

    Keys: q ends, s and S sort by the next or previous column, r reverses the
    order, / filters by name, p pauses, the arrows scroll. in/s are messages that
    came into a queue, out/s those acked, retry/s those put back after a nack or
    the end of a lease; oldest is how long the first message has been claimable;
    lag counts stored messages that are not yet routed to the queue's broker.

    A sample asks each process once, and the next one begins only after its answer.
    With --json, each sample but the first is an object on a line, until Ctrl-C.
    """
    if interval < SHORTEST:
        raise click.UsageError("--interval must be at least 500ms: each sample lists all queues")
    is_terminal = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM") != "dumb"
    view: Any = import_module("slatemq.cli.monitor.view")  # Loads the client, and rich.
    if session.json:
        session.call(lambda client: view.write_objects(client, interval, once=once))
    elif once or not is_terminal:
        session.call(lambda client: view.write_once(client, interval))
    else:
        shown = format_duration(int(interval / timedelta(milliseconds=1)))
        board = view.Board(session.address, shown)
        session.call(lambda client: view.Top(client, board, interval.total_seconds()).run())
