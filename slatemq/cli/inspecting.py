"""`slatemq explain` and `slatemq status`: what would happen, and how things stand."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from slatemq.cli.failures import EXIT_UNREACHABLE
from slatemq.cli.output import note, write_json, write_table
from slatemq.cli.parameters import TIME, header_option, headers_of, queues_option
from slatemq.cli.queue_options import COUNTS, count_cells, queue_fields, state_of
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.models import Explanation, RouteStatus, Status

EXPLAIN_EPILOG = """\
\b
Examples:
  slatemq explain --header type=order --header region=eu
  slatemq explain --to orders
  slatemq explain --header type=order --queue eu-orders --size 2000000 --json
"""

STATUS_EPILOG = """\
\b
Examples:
  slatemq status
  slatemq status --check && echo all is well
  slatemq status --json | jq '.queues[] | {queue_id, counts}'

\b
Lag is the number of messages that are stored and not yet told to the
queues. Depth is what waits in each queue.
"""


@click.command("explain", epilog=EXPLAIN_EPILOG)
@header_option("the message")
@click.option(
    "--size", type=click.IntRange(min=0), default=0, metavar="BYTES", help="Of its payload."
)
@click.option("--created-at", type=TIME, help="When it was made.  [default: now]")
@queues_option
@session_options
@pass_session
def explain(
    session: Session,
    to: str | None,
    pairs: tuple[tuple[str, str], ...],
    size: int,
    created_at: int | None,
    queues: tuple[str, ...],
) -> None:
    """Tell which queues a message with these headers would reach, and why.

    Nothing is published.
    """
    headers = headers_of(to, pairs)

    async def work() -> list[Explanation]:
        async with session.connect() as client:
            return await client.explain(
                headers, created_at=created_at, payload_bytes=size, queue_ids=queues
            )

    found = run(work())
    if session.json:
        for one in found:
            write_json(asdict(one))
        return
    if not found:
        note("there are no queues: create one with `slatemq queue create`")
    else:
        columns = ("queue", "matches", "priority", "why")
        write_table(
            columns,
            (
                (one.queue_id, "yes" if one.matched else "no", one.priority, one.reason)
                for one in found
            ),
        )


@click.command("status", epilog=STATUS_EPILOG)
@click.option("--check", is_flag=True, help="Exit with 3 when a service does not serve.")
@session_options
@pass_session
def status(session: Session, check: bool) -> None:
    """Show every service and shard, how far routing lags, and how deep the queues are."""

    async def work() -> Status:
        async with session.connect() as client:
            return await client.status()

    found = run(work())
    if session.json:
        write_json(_fields(found))
    else:
        _show(found)
    if check and not (found.services and all(one.serving for one in found.services)):
        sys.exit(EXIT_UNREACHABLE)


def _fields(found: Status) -> dict[str, Any]:
    return {
        "services": [asdict(one) for one in found.services],
        "routes": [_route_fields(one) for one in found.routes],
        "queues": [queue_fields(one) for one in found.queues],
    }


def _route_fields(route: RouteStatus) -> dict[str, Any]:
    # Sequences are message IDs: text, since JSON's numbers are too small for them.
    fields = asdict(route)
    return {
        **fields,
        "cursor": str(route.cursor),
        "durable_sequence": str(route.durable_sequence),
    }


def _show(found: Status) -> None:
    services = [
        (one.service, one.shard, one.address, "serving" if one.serving else "away", one.detail)
        for one in found.services
    ]
    write_table(("service", "shard", "address", "state", "detail"), services)
    if found.routes:
        print()
        write_table(
            ("ingest shard", "broker shard", "lag", "routed to", "stored to"),
            [
                (r.ingest_shard, r.broker_shard, r.pending_count, r.cursor, r.durable_sequence)
                for r in found.routes
            ],
        )
    if found.queues:
        print()
        rows = ((one.queue_id, state_of(one), *count_cells(one)) for one in found.queues)
        write_table(("queue", "state", *COUNTS), rows)
