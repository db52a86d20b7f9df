"""`slatemq failed`: dead letters, and moving them back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from slatemq._admin.entry_models import EntryState
from slatemq.cli.failures import EXIT_REFUSED, error_fields
from slatemq.cli.groups import Group, Place
from slatemq.cli.listings import Listing, listing_of
from slatemq.cli.output import CUT_WIDTH, cut, line_width, note, say, write_json, write_table
from slatemq.cli.parameters import MESSAGE_ID, QUEUE, WHICH, WORDS
from slatemq.cli.progress import progress
from slatemq.cli.queue.queues import purge_states
from slatemq.cli.repair.messages import finished_listing, show_message
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.errors import NotFound, SlateMQError

if TYPE_CHECKING:
    from slatemq._admin.redrives import Redrive
    from slatemq.client import Client

LOOKED_UP_MAX = 100
"""Messages named by ID that are looked for before a redrive: each look reads lists of the queue."""

LOOKS_AT_ONCE = 8

REDRIVE_EPILOG = """\
\b
Examples:
  slatemq failed redrive orders
  slatemq failed redrive orders --into orders-mended --rate 100
  slatemq failed redrive orders --filter 'reason.contains("timeout") && attempts < 9'
  slatemq failed redrive orders --id 500 --id 501

\b
It runs in the broker, each message exactly once, also when this command ends:
Ctrl-C stops the looking, `failed cancel` the redrive. Filters see, as a
queue's filter does, headers, created_at, received_at, size and message_id, and
`reason`, `attempts` and `failed_at`. Letters that fail after it began are not taken. What
is named by --id (up to 100) and is no dead letter of the queue is told: exit
code 1; the others are moved.
"""


SHOW_EPILOG = """\
\b
Examples:
  slatemq failed show orders/1f4/f687f67c52d00
  slatemq failed show 500 --in orders --json

\b
Handles come from `failed ls`. By its ID a message is searched, and shown in
whatever state it is, as by `message show`.
"""


@click.group(
    "failed",
    cls=Group,
    places={
        "edit": Place(
            "slatemq.cli.repair.failed_edit",
            "edit",
            "Edit the dead letters of QUEUE: send them again, mended or as they are, or drop them.",
        )
    },
)
def failed() -> None:
    """Look at dead letters, mend them, move them back, or throw them away."""


failed.add_command(
    finished_listing(
        EntryState.FAILED,
        "failed",
        "List the dead letters of QUEUE by time, with the reason of each.",
        "\b\nExamples:\n  slatemq failed ls orders\n"
        "  slatemq failed ls orders --newest --limit 10 --headers --json\n"
        "  slatemq failed ls orders --archived --from 2026-11-01T00:00:00Z",
    )
)


@failed.command("show", epilog=SHOW_EPILOG)
@click.argument("which", type=WHICH, metavar="HANDLE|ID")
@click.option("--in", "queues", type=QUEUE, multiple=True, metavar="QUEUE", help="Search only it.")
@session_options
@pass_session
def show(session: Session, which: str, queues: tuple[str, ...]) -> None:
    """Show a dead letter: why it failed, its attempts, headers and payload."""
    show_message(session, which, queues)


@failed.command("purge", epilog="\b\nExample:\n  slatemq failed purge orders --yes")
@click.argument("queue", type=QUEUE)
@click.option("--yes", is_flag=True, help="Do not ask. Nobody is asked where stdin is no terminal.")
@session_options
@pass_session
def purge(session: Session, queue: str, yes: bool) -> None:
    """Throw away all dead letters of QUEUE."""
    purge_states(session, queue, ("failed",), yes)


@failed.command("redrive", epilog=REDRIVE_EPILOG)
@click.argument("queue", type=QUEUE)
@click.option("--into", type=QUEUE, default="", metavar="QUEUE", help="Another queue.")
@click.option("--filter", "expression", type=WORDS, default="", metavar="CEL", help="Only these.")
@click.option(
    "--id",
    "ids",
    type=MESSAGE_ID,
    multiple=True,
    metavar="ID",
    help="Only the message with this ID; repeatable.",
)
@click.option(
    "--rate",
    type=click.IntRange(0, 100_000),
    default=0,
    metavar="N",
    help="Messages per second at most, up to 100000; 0, the default: as fast as it goes.",
)
@click.option(
    "--no-wait",
    is_flag=True,
    help="Do not wait for its end: print its ID, for `failed redrives` and `cancel`.",
)
@session_options
@pass_session
def redrive(
    session: Session,
    queue: str,
    into: str,
    expression: str,
    ids: tuple[int, ...],
    rate: int,
    no_wait: bool,
) -> None:
    """Make dead letters of QUEUE available again, with no attempts counted."""
    unknown: list[int] = []

    async def work() -> Redrive | None:
        async with session.connect() as client:
            unknown.extend(await _no_dead_letters(client, queue, ids))
            _report_unknown(session, queue, unknown)
            chosen = [one for one in ids if one not in unknown]
            if ids and not chosen:
                return None
            begun = await client.start_redrive(
                queue, into=into, filter=expression, message_ids=chosen, rate=rate
            )
            if no_wait:
                return begun
            note(f"redrive {begun.redrive_id} has begun")
            try:
                with progress(not session.json, "redrive", None) as update:
                    return await client.wait_redrive(
                        begun,
                        on_progress=lambda one: update(
                            total=one.total_count, completed=one.examined_count
                        ),
                        every=0.2,
                    )
            except (asyncio.CancelledError, SlateMQError):
                name = begun.redrive_id
                note(f"it goes on without us; `slatemq failed cancel {name}` stops it")
                raise

    result = run(work())
    if result is not None and no_wait and not session.json:
        say(result.redrive_id)
    elif result is not None:
        _report(session, result)
    if unknown:
        sys.exit(EXIT_REFUSED)


async def _no_dead_letters(client: Client, queue: str, ids: Sequence[int]) -> list[int]:
    """Those that are no dead letters of the queue. Of very many nobody is asked."""
    looks = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def is_dead_letter(message_id: int) -> bool:
        async with looks:
            found = [entry.state async for entry in client.find_message(message_id, [queue])]
        return EntryState.FAILED in found

    asked = list(dict.fromkeys(ids))
    if len(asked) > LOOKED_UP_MAX:
        return []
    known = await asyncio.gather(*map(is_dead_letter, asked))
    return [one for one, is_known in zip(asked, known, strict=True) if not is_known]


def _report_unknown(session: Session, queue: str, ids: Sequence[int]) -> None:
    for one in ids:
        error = NotFound("message", str(one), f"message {one} is no dead letter of {queue}")
        if session.json:
            write_json({"message_id": str(one), "ok": False, "error": error_fields(error)})
        else:
            note(error.message)


@failed.command("redrives", epilog="\b\nExample:\n  slatemq failed redrives orders")
@click.argument("queue", type=WORDS, required=False, default="")
@session_options
@pass_session
def redrives(session: Session, queue: str) -> None:
    """List the redrives of QUEUE, or of all queues, the newest first."""

    async def work() -> Listing[Redrive]:
        async with session.connect() as client:
            return await listing_of(client.list_redrives(queue))

    found = run(work())
    if session.json:
        for one in found.items:
            write_json(asdict(one))
        found.check_complete()
        return
    _show_redrives(found.items)
    for one in found.items:
        if one.error:
            note(f"redrive {one.redrive_id}: {one.error}")
    found.check_complete()


def _show_redrives(found: Sequence[Redrive]) -> None:
    """A table as wide as a terminal; what of the names does not fit is left out there."""
    heads = ("redrive", "state", "moved", "looked at", "queue")
    rows: list[list[object]] = [
        [
            one.redrive_id,
            one.state.value,
            one.redriven_count,
            f"{one.examined_count} of {one.total_count}",
        ]
        for one in found
    ]
    left = line_width() - sum(
        max(len(heads[place]), *(len(str(row[place])) for row in rows), 0) + 2
        for place in range(len(heads) - 1)
    )
    for one, row in zip(found, rows, strict=True):
        names = [one.queue_id]
        if one.target_queue_id != one.queue_id:
            names.append(one.target_queue_id)
        if len(" into ".join(names)) > left:
            width = (left - len(" into ") * (len(names) - 1)) // len(names)
            names = [cut(name, max(width, CUT_WIDTH)) for name in names]
        row.append(" into ".join(names))
    write_table(heads, rows)


@failed.command("cancel", epilog="\b\nExample:\n  slatemq failed cancel REDRIVE")
@click.argument("redrive_id", type=WORDS, metavar="REDRIVE")
@session_options
@pass_session
def cancel(session: Session, redrive_id: str) -> None:
    """Stop a redrive; what it has moved stays moved."""
    _steer(session, lambda client: client.cancel_redrive(redrive_id))


@failed.command("resume", epilog="\b\nExample:\n  slatemq failed resume REDRIVE")
@click.argument("redrive_id", type=WORDS, metavar="REDRIVE")
@session_options
@pass_session
def resume(session: Session, redrive_id: str) -> None:
    """Go on with a redrive that was cancelled, or has failed."""
    _steer(session, lambda client: client.resume_redrive(redrive_id))


def _steer(session: Session, steer: Callable[[Client], Awaitable[Redrive]]) -> None:
    async def work() -> Redrive:
        async with session.connect() as client:
            return await steer(client)

    _report(session, run(work()))


def _report(session: Session, one: Redrive) -> None:
    if session.json:
        write_json(asdict(one))
    else:
        say(
            f"redrive {one.redrive_id} is {one.state.value}: {one.redriven_count} moved into "
            f"{one.target_queue_id}, {one.examined_count} of {one.total_count} looked at"
        )
    if one.state == "failed":
        note(f"{one.error}; `slatemq failed resume {one.redrive_id}` tries again")
        sys.exit(EXIT_REFUSED)
