"""`slatemq explain` and `slatemq status`: what would happen, and how things stand."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

import slatemq
from slatemq._admin.rates import QueueRates, Sample, rate_fields, rates_between, take_sample
from slatemq._counts import counted
from slatemq.cli.failures import EXIT_UNREACHABLE
from slatemq.cli.output import note, say, write_json, write_table
from slatemq.cli.parameters import (
    DURATION,
    MESSAGE_ID,
    SECONDS,
    TIME,
    WHEN,
    Number,
    flag,
    header_option,
    headers_of,
    queues_option,
)
from slatemq.cli.queue_options import (
    CEL,
    COUNTS,
    count_cells,
    missing_queues,
    queue_fields,
    state_of,
)
from slatemq.cli.session import Session, command
from slatemq.models import Explanation, RouteStatus

if TYPE_CHECKING:
    from slatemq._admin.instance import Status
    from slatemq._admin.queue_models import Queue, QueueDraft
    from slatemq.client import Client


@command("explain")
@header_option("the message")
@click.option(
    "--size",
    "payload_bytes",
    type=Number(min=0),
    default=0,
    metavar="BYTES",
    help="Bytes of the message's payload.",
)
@click.option("--created-at", type=TIME, help="When the message was created.  [default: now]")
@click.option("--delay", type=DURATION, help="The message's own delay.")
@click.option("--visible-at", type=WHEN, help="When the message becomes available.")
@click.option(
    "--retention",
    type=SECONDS,
    default=0,
    help="How long the message is kept.  [default: 0, forever]",
)
@click.option("--id", "message_id", type=MESSAGE_ID, default=0, help="The message's ID.")
@queues_option
@click.option(
    "--filter", "draft_filter", type=CEL, help="Judge by this filter alone; no queue has to exist."
)
@click.option("--priority", "draft_priority", type=CEL, help="The same with a priority.")
def explain(
    session: Session,
    to: str | None,
    pairs: tuple[tuple[str, str], ...],
    queues: tuple[str, ...],
    draft_filter: str | None,
    draft_priority: str | None,
    **message: Any,
) -> None:
    """Show which queues a message with these headers would reach, and why.

    Nothing is published. With --filter or --priority, no queue is asked: try an expression before
    a queue has it.

    Examples:
      slatemq explain --header type=order --header region=eu
      slatemq explain --to orders
      slatemq explain --header type=order --queue eu-orders --size 2000000 --json
      slatemq explain --header region=eu --filter 'headers.region == "eu"'
    """
    headers = headers_of(to, pairs)
    draft = _draft(draft_filter, draft_priority)
    if draft and queues:
        raise click.UsageError("--queue asks queues, --filter and --priority ask none: choose")
    found = session.call(
        lambda client: client.explain(headers, queue_ids=queues, draft=draft, **message)
    )
    if session.json:
        for one in found:
            write_json(asdict(one))
    elif not found:
        note("no queues exist: create one with `slatemq queue create`")
    elif draft:
        (one,) = found
        say(f"matches with priority {one.priority}" if one.matched else "does not match")
        note(one.reason)
    else:
        _show_explanations(found)
        matched = sum(one.matched for one in found)
        note(_matches(matched, len(found)) if matched else _none_matches(to, found))


def _matches(matched: int, count: int) -> str:
    return f"{matched} of {counted(count, 'queue')} {'matches' if matched == 1 else 'match'}"


def _draft(chosen: str | None, priority: str | None) -> QueueDraft | None:
    """What --filter and --priority ask for; without a filter it takes every message."""
    if chosen is None and priority is None:
        return None
    return slatemq.QueueDraft("true" if chosen is None else chosen, priority)


def _show_explanations(found: Sequence[Explanation]) -> None:
    write_table(
        ("queue", "matches", "priority", "why"),
        ((one.queue_id, "yes" if one.matched else "no", one.priority, one.reason) for one in found),
        cuts=("queue",),
    )


def _none_matches(to: str | None, found: Sequence[Explanation]) -> str:
    if to is not None and to not in {one.queue_id for one in found}:
        return f"no queue matches, and queue {to} does not exist"
    return "no queue matches"


@command("status")
@flag("--check", help="Exit with 3 when a service is not serving.")
@click.option(
    "--rates",
    "measured",
    type=DURATION,
    help="Also show the rates at which messages enter and leave each queue, measured this long.",
)
def status(session: Session, check: bool, measured: timedelta | None) -> None:
    """Show every service and shard, the lag of routing, and the depth of the queues.

    Examples:
      slatemq status
      slatemq status --rates 5s
      slatemq status --check && echo all is well
      slatemq status --json | jq '.queues[] | {queue_id, counts}'

    Lag is the number of stored messages that are not yet routed to the queues.
    """
    found, rates = session.call(lambda client: _measured(client, measured))
    if session.json:
        write_json(_fields(found, rates))
    else:
        _show(found, rates)
    if check and not (found.services and all(one.serving for one in found.services)):
        sys.exit(EXIT_UNREACHABLE)


async def _measured(
    client: Client, length: timedelta | None
) -> tuple[Status, Mapping[str, QueueRates] | None]:
    """The status, and the rates of the queues where they are wanted."""
    if length is None:
        return await client.status(), None
    if not length:
        raise click.UsageError("--rates: give time to measure, as in --rates 2s")
    before = await take_sample(client)
    await asyncio.sleep(length.total_seconds())
    now = Sample(await client.status(), time.monotonic())
    return now.status, rates_between(before, now)


def _fields(found: Status, rates: Mapping[str, QueueRates] | None) -> dict[str, Any]:
    return {
        "services": [asdict(one) for one in found.services],
        "routes": [_route_fields(one) for one in found.routes],
        "queues": [
            {
                **queue_fields(one),
                **({} if rates is None else {"rates": rate_fields(rates[one.queue_id])}),
            }
            for one in found.queues
        ],
        "unlisted_brokers": found.unlisted_brokers,
        "instance_number": found.instance_number,
        "settings_problem": found.settings_problem,
        "refusals": found.refusals,
        "store": found.store,
        "wal_store": found.wal_store,
    }


def _lag_of(route: RouteStatus) -> int | str:
    """Where its ingest is down, nothing has said how much the log has."""
    return route.pending_count if route.is_current else "unknown"


def _route_fields(route: RouteStatus) -> dict[str, Any]:
    # Sequences are message IDs: as text, because they exceed what JSON numbers hold safely.
    ids = {"cursor": str(route.cursor), "durable_sequence": str(route.durable_sequence)}
    return {**asdict(route), **ids}


def _show(found: Status, rates: Mapping[str, QueueRates] | None = None) -> None:
    services = [
        (one.service, one.shard, one.address, "serving" if one.serving else "down", one.detail)
        for one in found.services
    ]
    write_table(("service", "shard", "address", "state", "detail"), services)
    if found.wal_store:
        print(f"data in {found.store}, the write-ahead logs in {found.wal_store}")
    for lacking in sorted({one.open_without for one in found.services} - {()}):
        names = ", ".join(
            f"{one.service} {one.shard}" for one in found.services if one.open_without == lacking
        )
        note(
            f"INSECURE: other machines can reach these without {' and '.join(lacking)}: {names}. "
            "See docs/how-to/secure.md"
        )
    if found.settings_problem:
        note(f"no process can read the instance record: {found.settings_problem}")
    older = [one for one in found.services if 0 < one.instance_number < found.instance_number]
    if older:
        names = ", ".join(f"{one.service} {one.shard}" for one in older)
        note(
            f"these run with settings older than instance record {found.instance_number}: "
            f"restart {names}"
        )
    if found.routes:
        print()
        write_table(
            ("ingest", "broker", "lag", "routed to", "stored to"),
            [
                (r.ingest_shard, r.broker_shard, _lag_of(r), r.cursor, r.durable_sequence)
                for r in found.routes
            ],
        )
    if found.queues:
        print()
        shown = () if rates is None else ("in/s", "out/s")
        rows = (
            (one.queue_id, state_of(one), *_rate_cells(one, rates), *count_cells(one))
            for one in found.queues
        )
        write_table(("queue", "state", *shown, *COUNTS), rows, cuts=("queue",))
    for refusal in found.refusals:
        note(refusal)
    if found.unlisted_brokers:
        note(missing_queues(found.unlisted_brokers))


def _rate_cells(queue: Queue, rates: Mapping[str, QueueRates] | None) -> Sequence[str]:
    if rates is None:
        return ()
    one = rates[queue.queue_id]
    return ["-" if rate is None else f"{rate:.1f}" for rate in (one.in_per_s, one.out_per_s)]
