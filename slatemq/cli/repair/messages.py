"""`slatemq message` and `slatemq done`: single messages in their queues."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import click

from slatemq._admin.entry_models import Entry, EntryState, EntryView, SearchProgress
from slatemq._cancelling import end_all
from slatemq._counts import counted
from slatemq.cli.entry_output import (
    entry_fields,
    listing_options,
    listing_view,
    show_entry,
    write_entries,
)
from slatemq.cli.output import note, progress
from slatemq.cli.parameters import (
    HEADER,
    WHEN,
    WHICH,
    WORDS,
    etag_option,
    queue_argument,
    search_option,
)
from slatemq.cli.publish.publishing import STDIN, read_all
from slatemq.cli.session import Group, Session, in_thread
from slatemq.errors import FailedPrecondition, NotFound

if TYPE_CHECKING:
    from slatemq._admin.watching import DelayedWatch
    from slatemq.client import Client

LOOK_S = 0.5
"""How often `message watch` checks for an outage."""

_ONE = click.argument("which", type=WHICH, metavar="HANDLE|ID")
_SEVERAL = click.argument("which", type=WHICH, nargs=-1, required=True, metavar="HANDLE|ID...")


@click.group("message", cls=Group)
def message() -> None:
    """Show, cancel, reschedule and edit single messages."""


@message.command("ls")
@queue_argument
@click.option(
    "--state",
    type=click.Choice(["available", "delayed", "in-flight", "done", "failed", "archived"]),
    default="available",
    help="List messages in this state.  [default: available]",
)
@listing_options()
def ls(session: Session, queue: str, state: str, limit: int | None, headers: bool) -> None:
    """List messages of QUEUE that are in one state.

    Examples:
      slatemq message ls orders
      slatemq message ls orders --state delayed --limit 20 --headers
      slatemq message ls orders --state in-flight --json | jq .consumer_id
      slatemq message ls orders --limit 0 | less        all of them

    Nothing is claimed. Available and delayed messages are listed in the order of
    their delivery. The handle says where a message is: show, cancel, reschedule
    and edit take it, and find the message immediately however deep the queue is.
    `done ls` and `failed ls` list by time, and can start with the newest.
    """
    list_entries(session, queue, EntryState(state.replace("-", "_")), limit, headers)


def list_entries(
    session: Session,
    queue: str,
    state: EntryState,
    limit: int | None,
    with_headers: bool,
    **bounds: Any,
) -> None:
    async def work(client: Client) -> int:
        view = listing_view(session, with_headers)
        entries = client.list_entries(queue, state, view=view, **bounds)
        return await write_entries(session, entries, state, limit, with_headers)

    if not session.call(work) and not session.json:
        note(f"nothing in {queue} is {state.replace('_', ' ')}")


@message.command("show")
@_ONE
@search_option
def show(session: Session, which: str, queues: tuple[str, ...]) -> None:
    """Show a message: its state, attempts, headers and payload; by ID, in every queue.

    Examples:
      slatemq message show orders/1f4/a128.r.38266ddb6aa0002
      slatemq message show 500              searches all queues
      slatemq message show 500 --in orders

    Given an ID, it searches in the background: some seconds per million messages.
    Handles come from `message ls`, `failed ls` and `done ls`.
    """
    show_message(session, which, queues)


def show_message(session: Session, which: str, queues: tuple[str, ...]) -> None:
    """Print an entry, or all entries of a message. Raises NotFound."""

    async def work(client: Client) -> None:
        if "/" in which:
            show_entry(session, await client.get_entry(which))
            return
        is_found = False
        async for found in _search(session, client, which, queues):
            is_found = True
            try:
                entry = await client.get_entry(found.handle, view=EntryView.FULL)
            except (NotFound, FailedPrecondition):
                entry = found  # it has moved since
            show_entry(session, entry)
        if not is_found:
            raise _not_found(which, queues, "is not in", "ENTRY_UNKNOWN")

    session.call(work)


async def _search(
    session: Session, client: Client, which: str, queues: tuple[str, ...]
) -> AsyncIterator[Entry]:
    columns = ("SpinnerColumn", "{task.description}")
    with progress(not session.json, "searching", None, columns) as update:

        def report(found: SearchProgress) -> None:
            update(
                description=f"searched {found.queues_searched_count} of "
                f"{counted(found.queues_count, 'queue')}, {counted(found.rows_read_count, 'row')}"
            )

        async for found in client.find_message(int(which), queues, on_progress=report):
            yield found


def _not_found(which: str, queues: tuple[str, ...], what: str, reason: str) -> NotFound:
    where = " or ".join(queues) if queues else "any queue"
    others = "; leave out --in to search all queues" if queues else ""
    return NotFound("message", which, f"message {which} {what} {where}{others}", reason=reason)


async def _waiting(
    session: Session,
    client: Client,
    which: str,
    queues: tuple[str, ...],
    *states: EntryState,
) -> list[str]:
    """The given handle, or those of all entries of a message that are in one of these states."""
    if "/" in which:
        return [which]
    found = [
        entry.handle
        async for entry in _search(session, client, which, queues)
        if entry.state in states
    ]
    if not found:
        what = "does not wait in" if EntryState.AVAILABLE in states else "is not delayed in"
        raise _not_found(which, queues, what, "OTHER_STATE")
    return found


def _each_waiting(
    session: Session,
    which: tuple[str, ...],
    queues: tuple[str, ...],
    change: Callable[[Client, str], Any],
) -> None:
    """Apply `change`, a coroutine function, to the handle of each entry that waits."""

    async def work(client: Client) -> None:
        states = (EntryState.AVAILABLE, EntryState.DELAYED)
        for one in which:
            for handle in await _waiting(session, client, one, queues, *states):
                await change(client, handle)

    session.call(work)


@message.command(
    "cancel",
    epilog="Examples:\n  slatemq message cancel HANDLE\n"
    "  slatemq message cancel 500 --in orders      searches for it",
)
@_SEVERAL
@search_option
def cancel(session: Session, which: tuple[str, ...], queues: tuple[str, ...]) -> None:
    """Remove available or delayed messages from their queues: they will not be delivered."""

    async def change(client: Client, handle: str) -> None:
        await client.cancel_entry(handle)
        session.show({"handle": handle, "cancelled": True}, f"cancelled {handle}")

    _each_waiting(session, which, queues, change)


@message.command(
    "reschedule",
    epilog="Examples:\n  slatemq message reschedule HANDLE --visible-at +1h\n"
    "  slatemq message reschedule 500 --in orders      now",
)
@_SEVERAL
@search_option
@click.option("--visible-at", type=WHEN, help="A time, or +5m from now.  [default: now]")
def reschedule(
    session: Session, which: tuple[str, ...], queues: tuple[str, ...], visible_at: int | None
) -> None:
    """Set when available or delayed messages can be claimed."""

    async def change(client: Client, handle: str) -> None:
        entry = await client.reschedule_entry(handle, visible_at)
        session.show(entry_fields(entry), f"rescheduled {entry.handle}")

    _each_waiting(session, which, queues, change)


@message.command("edit")
@_ONE
@click.argument("text", required=False)
@search_option
@click.option("--file", "file", type=click.Path(), metavar="F", help="Read the payload from F.")
@click.option("--header", "pairs", type=HEADER, multiple=True, help="A new header; repeatable.")
@etag_option
def edit(
    session: Session,
    which: str,
    text: str | None,
    queues: tuple[str, ...],
    file: str | None,
    pairs: tuple[tuple[str, str], ...],
    etag: str,
) -> None:
    """Replace the payload of a delayed message (TEXT, a file, or - for stdin), or its headers.

    Examples:
      slatemq message edit HANDLE '{"id": 7, "checked": true}'
      slatemq message edit HANDLE --file fixed.json --etag 5f0e    (the etag of message show)
      slatemq message edit HANDLE --header type=order --header checked=yes
      slatemq message edit 500 --in orders 'better'    searches for it

    Only a delayed message can be edited. It changes in every queue that has not
    delivered it, and is not routed again. --header replaces all headers.
    """
    if text is not None and file is not None:
        raise click.UsageError("give one of TEXT, - (stdin) and --file F")
    if text is None and file is None and not pairs:
        raise click.UsageError("nothing to change: give TEXT, --file F or --header k=v")

    async def work(client: Client) -> tuple[str, str]:
        payload = os.fsencode(text) if text is not None else None
        if text == STDIN or file is not None:
            payload = await in_thread(lambda: read_all(file or STDIN))
        # One is enough: it changes in all queues that have not delivered it.
        handle = (await _waiting(session, client, which, queues, EntryState.DELAYED))[0]
        headers = dict(pairs) if pairs else None
        changed = await client.edit_message(handle, payload=payload, headers=headers, etag=etag)
        return handle, changed

    handle, changed = session.call(work)
    session.show({"handle": handle, "etag": changed}, f"edited {handle}, etag {changed}")


@message.command("watch")
@queue_argument
@click.option("--position", type=WORDS, default="", help="Continue where an earlier watch ended.")
def watch(session: Session, queue: str, position: str) -> None:
    """Print the delayed messages of QUEUE, each before it can be claimed, until Ctrl-C.

    Examples:
      slatemq message watch reminders
      slatemq message watch reminders --json | ./audit.sh
      slatemq message watch reminders --position QERd2Tn6AABof2fR8kEAAAAA

    Prints the messages that are delayed now, then each new one. A message that is
    rescheduled is printed again; one that was cancelled meanwhile may be printed.
    At the end it prints the position from which --position continues: no message
    is missed, some may be printed again. It waits up to --timeout for a broker
    that restarts.
    """
    where = ""

    async def print_all(seen: DelayedWatch) -> None:
        nonlocal where
        async for entry in seen:
            show_entry(session, entry)
            where = seen.position

    async def work(client: Client) -> None:
        async with client.watch_delayed(queue, position=position) as seen:
            printing = asyncio.create_task(print_all(seen))
            try:
                while not printing.done():
                    await asyncio.wait([printing], timeout=LOOK_S)
                    # During an outage a watch waits, which looks like a queue without messages.
                    if seen.outage is not None:
                        seen.outage.check(session.timeout.total_seconds())
                await printing
            finally:
                await end_all([printing])

    try:
        session.call(work)
    finally:
        if where:
            note(f"continue with --position {where}")


@click.group("done", cls=Group)
def done() -> None:
    """List the messages that are done."""


@done.command("ls")
@queue_argument
@listing_options("done")
def list_done(
    session: Session, queue: str, limit: int | None, headers: bool, **bounds: Any
) -> None:
    """List the done messages of QUEUE by time, for as long as its done retention keeps them.

    Example:
      slatemq done ls orders --newest --limit 10
    """
    list_entries(session, queue, EntryState.DONE, limit, headers, **bounds)
