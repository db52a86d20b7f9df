"""`slatemq message` and `slatemq done`: look at messages in their queues, and repair them."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from slatemq._admin.entry_models import Entry, EntryState, EntryView, SearchProgress
from slatemq.cli.entry_output import (
    entry_fields,
    listing_options,
    listing_view,
    show_entry,
    write_entries,
)
from slatemq.cli.groups import Group, Place
from slatemq.cli.moments import WHEN
from slatemq.cli.output import note, say, write_json
from slatemq.cli.parameters import HEADER, QUEUE, WHICH, WORDS
from slatemq.cli.publish.publishing import STDIN, read_all
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.cli.threads import in_thread
from slatemq.errors import FailedPrecondition, NotFound

if TYPE_CHECKING:
    from slatemq.client import Client

LS_EPILOG = """\
\b
Examples:
  slatemq message ls orders
  slatemq message ls orders --state delayed --limit 20 --headers
  slatemq message ls orders --state in-flight --json | jq .consumer_id
  slatemq message ls orders --limit 0 | less        all of them

\b
Nothing is claimed by it. Available and delayed messages come in the order of
their delivery. The handle says where a message is: show, cancel, reschedule
and edit take it, and find the message at once however deep the queue is.
`done ls` and `failed ls` go by time, and can begin with the newest.
"""

SHOW_EPILOG = """\
\b
Examples:
  slatemq message show orders/1f4/a128.r.38266ddb6aa0002
  slatemq message show 500              searches all queues
  slatemq message show 500 --in orders

\b
By its ID alone a message is searched in the background: some seconds per
million messages. Handles come from `message ls`, `failed ls` and `done ls`.
"""

EDIT_EPILOG = """\
\b
Examples:
  slatemq message edit HANDLE '{"id": 7, "checked": true}'
  slatemq message edit HANDLE --file mended.json --etag 5f0e    (of message show)
  slatemq message edit HANDLE --header type=order --header checked=yes
  slatemq message edit 500 --in orders 'better'    searches for it

\b
Only a message that is delayed can be edited. It changes in every queue that
has not handed it out, and is not routed anew. --header replaces all headers.
"""

_WHICH = click.argument("which", type=WHICH, nargs=-1, required=True, metavar="HANDLE|ID...")
_QUEUES = click.option(
    "--in", "queues", type=QUEUE, multiple=True, metavar="QUEUE", help="Search only it; repeatable."
)


@click.group(
    "message",
    cls=Group,
    places={
        "watch": Place(
            "slatemq.cli.repair.watching",
            "watch",
            "Print the delayed messages of QUEUE, each before it can be claimed, until Ctrl-C.",
        )
    },
)
def message() -> None:
    """Look at messages in their queues without consuming them, and repair."""


@message.command("ls", epilog=LS_EPILOG)
@click.argument("queue", type=QUEUE)
@click.option(
    "--state",
    type=click.Choice(["available", "delayed", "in-flight", "done", "failed", "archived"]),
    default="available",
    help="Which ones.  [default: available]",
)
@listing_options()
@session_options
@pass_session
def ls(session: Session, queue: str, state: str, limit: int | None, headers: bool) -> None:
    """List messages of QUEUE that are in one state."""
    list_entries(session, queue, EntryState(state.replace("-", "_")), limit, headers)


def list_entries(
    session: Session,
    queue: str,
    state: EntryState,
    limit: int | None,
    with_headers: bool,
    **bounds: Any,
) -> None:
    """Lists, and says so when there is nothing."""

    async def work() -> int:
        async with session.connect() as client:
            entries = client.list_entries(
                queue, state, view=listing_view(session, with_headers), **bounds
            )
            return await write_entries(session, entries, state, limit, with_headers)

    if not run(work()) and not session.json:
        note(f"nothing in {queue} is {state.replace('_', ' ')}")


@message.command("show", epilog=SHOW_EPILOG)
@click.argument("which", type=WHICH, metavar="HANDLE|ID")
@_QUEUES
@session_options
@pass_session
def show(session: Session, which: str, queues: tuple[str, ...]) -> None:
    """Show a message: its state, attempts, headers and payload; by ID, in every queue."""
    show_message(session, which, queues)


def show_message(session: Session, which: str, queues: tuple[str, ...]) -> None:
    """Shows an entry, or all of a message. Raises NotFound when there is none."""

    async def work() -> None:
        async with session.connect() as client:
            if "/" in which:
                show_entry(session, await client.get_entry(which))
                return
            is_found = False
            async for found in _search(session, client, which, queues):
                is_found = True
                show_entry(session, await _whole(client, found))
            if not is_found:
                raise _nowhere(which, queues, "is not in", "ENTRY_UNKNOWN")

    run(work())


async def _whole(client: Client, found: Entry) -> Entry:
    """The entry with its message; as it was found, when it has moved since."""
    try:
        return await client.get_entry(found.handle, view=EntryView.FULL)
    except (NotFound, FailedPrecondition):
        return found


async def _search(
    session: Session, client: Client, which: str, queues: tuple[str, ...]
) -> AsyncIterator[Entry]:
    """The entries of a message by its ID, as they are found."""
    with _searching(session) as update:

        def report(progress: SearchProgress) -> None:
            update(
                f"searched {progress.queues_searched_count} of {progress.queues_count} "
                f"queues, {progress.rows_read_count} rows"
            )

        async for found in client.find_message(int(which), queues, on_progress=report):
            yield found


@contextmanager
def _searching(session: Session) -> Iterator[Callable[[str], None]]:
    """A line on stderr, where that is a terminal; gives the function that changes its text."""
    if session.json or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("searching") as status:
        yield status.update


def _nowhere(which: str, queues: tuple[str, ...], what: str, reason: str) -> NotFound:
    where = " or ".join(queues) if queues else "any queue"
    others = "; without --in all queues are searched" if queues else ""
    return NotFound("message", which, f"message {which} {what} {where}{others}", reason=reason)


async def _waiting(
    session: Session,
    client: Client,
    which: str,
    queues: tuple[str, ...],
    states: Container[EntryState] = (EntryState.AVAILABLE, EntryState.DELAYED),
) -> list[str]:
    """The handles of what waits: the one given, or all of a message."""
    if "/" in which:
        return [which]
    found = [
        entry.handle
        async for entry in _search(session, client, which, queues)
        if entry.state in states
    ]
    if not found:
        what = "does not wait in" if EntryState.AVAILABLE in states else "is not delayed in"
        raise _nowhere(which, queues, what, "OTHER_STATE")
    return found


@message.command(
    "cancel",
    epilog="\b\nExamples:\n  slatemq message cancel HANDLE\n"
    "  slatemq message cancel 500 --in orders      searches for it",
)
@_WHICH
@_QUEUES
@session_options
@pass_session
def cancel(session: Session, which: tuple[str, ...], queues: tuple[str, ...]) -> None:
    """Take available or delayed messages out of their queues: they will not be delivered."""

    async def work() -> None:
        async with session.connect() as client:
            for one in which:
                for handle in await _waiting(session, client, one, queues):
                    await client.cancel_entry(handle)
                    if session.json:
                        write_json({"handle": handle, "cancelled": True})
                    else:
                        say(f"cancelled {handle}")

    run(work())


@message.command(
    "reschedule",
    epilog="\b\nExamples:\n  slatemq message reschedule HANDLE --visible-at +1h\n"
    "  slatemq message reschedule 500 --in orders      at once",
)
@_WHICH
@_QUEUES
@click.option("--visible-at", type=WHEN, help="A time, or +5m from now.  [default: at once]")
@session_options
@pass_session
def reschedule(
    session: Session, which: tuple[str, ...], queues: tuple[str, ...], visible_at: int | None
) -> None:
    """Set from when on available or delayed messages may be claimed."""

    async def work() -> None:
        async with session.connect() as client:
            for one in which:
                for handle in await _waiting(session, client, one, queues):
                    entry = await client.reschedule_entry(handle, visible_at)
                    if session.json:
                        write_json(entry_fields(entry))
                    else:
                        say(f"rescheduled {entry.handle}")

    run(work())


@message.command("edit", epilog=EDIT_EPILOG)
@click.argument("which", type=WHICH, metavar="HANDLE|ID")
@click.argument("text", required=False)
@_QUEUES
@click.option("--file", "file", type=click.Path(), metavar="F", help="The payload: a file's bytes.")
@click.option("--header", "pairs", type=HEADER, multiple=True, help="Of the new headers.")
@click.option("--etag", type=WORDS, default="", help="Only if nobody changed it since this etag.")
@session_options
@pass_session
def edit(
    session: Session,
    which: str,
    text: str | None,
    queues: tuple[str, ...],
    file: str | None,
    pairs: tuple[tuple[str, str], ...],
    etag: str,
) -> None:
    """Replace the payload of a delayed message: TEXT, a file, or stdin (-); or its headers."""
    if text is not None and file is not None:
        raise click.UsageError("give one of TEXT, - (stdin) and --file F")
    if text is None and file is None and not pairs:
        raise click.UsageError("nothing to change: give TEXT, --file F or --header k=v")

    async def work() -> tuple[str, str]:
        payload = os.fsencode(text) if text is not None else None
        if text == STDIN or file is not None:
            payload = await in_thread(lambda: read_all(file or STDIN))
        async with session.connect() as client:
            delayed = (EntryState.DELAYED,)
            # One is enough: it changes in all queues that have not handed it out.
            handle = (await _waiting(session, client, which, queues, delayed))[0]
            headers = dict(pairs) if pairs else None
            return handle, await client.edit_message(
                handle, payload=payload, headers=headers, etag=etag
            )

    handle, changed = run(work())
    if session.json:
        write_json({"handle": handle, "etag": changed})
    else:
        say(f"edited {handle}, etag {changed}")


@click.group("done", cls=Group)
def done() -> None:
    """Look at the messages that are done."""


def finished_listing(state: EntryState, word: str, text: str, examples: str) -> click.Command:
    """`ls` of a list that goes by time; `word` says what happened to its messages."""

    @click.command("ls", help=text, epilog=examples)
    @click.argument("queue", type=QUEUE)
    @listing_options(word)
    @session_options
    @pass_session
    def listing(
        session: Session,
        queue: str,
        limit: int | None,
        headers: bool,
        newest: bool,
        since: int | None,
        until: int | None,
        archived: bool = False,
    ) -> None:
        bounds = {"newest_first": newest, "finished_from": since, "finished_until": until}
        which = EntryState.ARCHIVED if archived else state
        list_entries(session, queue, which, limit, headers, **bounds)

    if state is EntryState.FAILED:
        help_text = "Those whose content was moved into the archive; times are when that was."
        listing.params.append(click.Option(["--archived"], is_flag=True, help=help_text))
    return listing


done.add_command(
    finished_listing(
        EntryState.DONE,
        "done",
        "List the done messages of QUEUE by time, as long as its done retention keeps them.",
        "\b\nExample:\n  slatemq done ls orders --newest --limit 10",
    )
)
