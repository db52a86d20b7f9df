"""`slatemq failed`: dead letters, and moving them back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from slatemq._admin.entry_models import EntryState
from slatemq.cli.entry_output import listing_options
from slatemq.cli.failures import EXIT_REFUSED, error_fields
from slatemq.cli.output import (
    CUT_WIDTH,
    cut,
    note,
    progress,
    say,
    width_beside,
    write_json,
    write_table,
)
from slatemq.cli.parameters import (
    QUEUE,
    WHICH,
    WORDS,
    Number,
    flag,
    ids_option,
    queue_argument,
    search_option,
    yes_option,
)
from slatemq.cli.queue.queues import purge_states
from slatemq.cli.repair.messages import list_entries, show_message
from slatemq.cli.session import CommandEntry, Group, Session, write_listing
from slatemq.errors import NotFound, SlateMQError

if TYPE_CHECKING:
    from slatemq._admin.redrives import Redrive
    from slatemq.client import Client

LOOKUPS_MAX = 100
"""With more IDs a redrive does not look them up first: each lookup reads lists of the queue."""

LOOKUPS_AT_ONCE = 8

_REDRIVE = click.argument("redrive_id", type=WORDS, metavar="REDRIVE")


@click.group(
    "failed",
    cls=Group,
    places={
        "edit": CommandEntry(
            "slatemq.cli.repair.failed_edit",
            "edit",
            "Edit the dead letters of QUEUE, to send them again, changed or not, or drop them.",
        )
    },
)
def failed() -> None:
    """Show, edit, redrive and remove dead letters."""


@failed.command("ls")
@queue_argument
@flag("--archived", help="List those whose content is in the archive, by the time of the move.")
@listing_options("failed")
def ls(
    session: Session, queue: str, archived: bool, limit: int | None, headers: bool, **bounds: Any
) -> None:
    """List the dead letters of QUEUE by time, with the reason of each.

    Examples:
      slatemq failed ls orders
      slatemq failed ls orders --newest --limit 10 --headers --json
      slatemq failed ls orders --archived --from 2026-11-01T00:00:00Z
    """
    state = EntryState.ARCHIVED if archived else EntryState.FAILED
    list_entries(session, queue, state, limit, headers, **bounds)


@failed.command("show")
@click.argument("which", type=WHICH, metavar="HANDLE|ID")
@search_option
def show(session: Session, which: str, queues: tuple[str, ...]) -> None:
    """Show a dead letter: why it failed, its attempts, headers and payload.

    Examples:
      slatemq failed show orders/1f4/f687f67c52d00
      slatemq failed show 500 --in orders --json

    Handles come from `failed ls`. Given an ID, it searches, and shows the message
    in any state, as `message show` does.
    """
    show_message(session, which, queues)


@failed.command("purge", epilog="Example:\n  slatemq failed purge orders --yes")
@queue_argument
@yes_option
def purge(session: Session, queue: str, yes: bool) -> None:
    """Remove all dead letters of QUEUE."""
    purge_states(session, queue, ("failed",), yes)


@failed.command("redrive")
@queue_argument
@click.option("--into", type=QUEUE, default="", help="Move them to this queue.")
@click.option(
    "--filter", "expression", type=WORDS, default="", metavar="CEL", help="Only matching ones."
)
@ids_option
@click.option(
    "--rate",
    type=Number(0, 100_000),
    default=0,
    help="Move at most N messages per second, up to 100000.  [default: 0, no limit]",
)
@flag("--no-wait", help="Print the redrive's ID; do not wait for its end.")
def redrive(
    session: Session,
    queue: str,
    into: str,
    expression: str,
    ids: tuple[int, ...],
    rate: int,
    no_wait: bool,
) -> None:
    """Make dead letters of QUEUE available again, with no attempts counted.

    Examples:
      slatemq failed redrive orders
      slatemq failed redrive orders --into orders-retry --rate 100
      slatemq failed redrive orders --filter 'reason.contains("timeout") && attempts < 9'
      slatemq failed redrive orders --id 500 --id 501

    The broker executes the redrive, each message exactly once, and continues when
    this command ends: Ctrl-C stops only the waiting, `failed cancel` stops the
    redrive. Filters see headers, created_at, received_at, size and message_id, as
    a queue's filter does, and `reason`, `attempts` and `failed_at`. Messages that
    fail after its start are not included. An --id (of up to 100) that is not a
    dead letter of the queue is reported, with exit code 1; the others are moved.
    """
    unknown: list[int] = []

    async def work(client: Client) -> Redrive | None:
        unknown.extend(await _unknown_ids(client, queue, ids))
        _report_unknown(session, queue, unknown)
        chosen = [one for one in ids if one not in unknown]
        if ids and not chosen:
            return None
        begun = await client.start_redrive(
            queue, into=into, filter=expression, message_ids=chosen, rate=rate
        )
        return begun if no_wait else await _wait(session, client, begun)

    result = session.call(work)
    if result is not None and no_wait and not session.json:
        say(result.redrive_id)
    elif result is not None:
        _report(session, result)
    if unknown:
        sys.exit(EXIT_REFUSED)


async def _wait(session: Session, client: Client, begun: Redrive) -> Redrive:
    name = begun.redrive_id
    note(f"redrive {name} has started")
    try:
        with progress(not session.json, "redrive", None) as update:
            return await client.wait_redrive(
                begun,
                on_progress=lambda one: update(total=one.total_count, completed=one.examined_count),
                every=0.2,
            )
    except (asyncio.CancelledError, SlateMQError):
        note(f"the redrive continues; `slatemq failed cancel {name}` stops it")
        raise


async def _unknown_ids(client: Client, queue: str, ids: Sequence[int]) -> list[int]:
    """The IDs that are not dead letters of the queue; empty where too many were given."""
    lookups = asyncio.Semaphore(LOOKUPS_AT_ONCE)

    async def is_dead_letter(message_id: int) -> bool:
        async with lookups:
            found = [entry.state async for entry in client.find_message(message_id, [queue])]
        return EntryState.FAILED in found

    asked = list(dict.fromkeys(ids))
    if len(asked) > LOOKUPS_MAX:
        return []
    known = await asyncio.gather(*map(is_dead_letter, asked))
    return [one for one, is_known in zip(asked, known, strict=True) if not is_known]


def _report_unknown(session: Session, queue: str, ids: Sequence[int]) -> None:
    for one in ids:
        error = NotFound("message", str(one), f"message {one} is not a dead letter of {queue}")
        if session.json:
            write_json({"message_id": str(one), "ok": False, "error": error_fields(error)})
        else:
            note(error.message)


@failed.command("redrives", epilog="Example:\n  slatemq failed redrives orders")
@click.argument("queue", type=WORDS, required=False, default="")
def redrives(session: Session, queue: str) -> None:
    """List the redrives of QUEUE, or of all queues, the newest first."""
    write_listing(session, lambda client: client.list_redrives(queue), asdict, _show_redrives)


def _show_redrives(found: Sequence[Redrive]) -> None:
    """A table; on a terminal, names that do not fit are cut."""
    heads = ("redrive", "state", "moved", "examined", "queue")
    rows: list[list[object]] = [
        [
            one.redrive_id,
            one.state.value,
            one.redriven_count,
            f"{one.examined_count} of {one.total_count}",
        ]
        for one in found
    ]
    left = width_beside(heads[:-1], rows)
    for one, row in zip(found, rows, strict=True):
        names = [one.queue_id]
        if one.target_queue_id != one.queue_id:
            names.append(one.target_queue_id)
        if len(" into ".join(names)) > left:
            width = (left - len(" into ") * (len(names) - 1)) // len(names)
            names = [cut(name, max(width, CUT_WIDTH)) for name in names]
        row.append(" into ".join(names))
    write_table(heads, rows)
    for one in found:
        if one.error:
            note(f"redrive {one.redrive_id}: {one.error}")


@failed.command("cancel", epilog="Example:\n  slatemq failed cancel REDRIVE")
@_REDRIVE
def cancel(session: Session, redrive_id: str) -> None:
    """Stop a redrive; messages that it has moved stay moved."""
    _report(session, session.call(lambda client: client.cancel_redrive(redrive_id)))


@failed.command("resume", epilog="Example:\n  slatemq failed resume REDRIVE")
@_REDRIVE
def resume(session: Session, redrive_id: str) -> None:
    """Continue a redrive that was cancelled or has failed."""
    _report(session, session.call(lambda client: client.resume_redrive(redrive_id)))


def _report(session: Session, one: Redrive) -> None:
    session.show(
        asdict(one),
        f"redrive {one.redrive_id} is {one.state.value}: {one.redriven_count} moved to "
        f"{one.target_queue_id}, {one.examined_count} of {one.total_count} examined",
    )
    if one.state == "failed":
        note(f"{one.error}; `slatemq failed resume {one.redrive_id}` retries")
        sys.exit(EXIT_REFUSED)
