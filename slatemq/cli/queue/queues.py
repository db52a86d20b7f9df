"""`slatemq queue`: create, look at, change, pause, purge and delete queues."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from slatemq.cli.groups import Group
from slatemq.cli.listings import Listing, listing_of
from slatemq.cli.moments import START
from slatemq.cli.output import CUT_WIDTH, cut, line_width, printable, say, write_json, write_table
from slatemq.cli.parameters import QUEUE, WORDS
from slatemq.cli.queue_options import (
    COUNTS,
    OPEN,
    count_cells,
    priority_rows,
    queue_fields,
    settings_options,
    settings_rows,
    state_of,
)
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.cli.wording import RESETTABLE

if TYPE_CHECKING:
    from slatemq._admin.entry_models import StateName
    from slatemq._admin.queue_models import Queue
    from slatemq.client import Client

FILTER_WIDTH = 8
"""Columns in which a filter is worth its place in a list."""

CREATE_EPILOG = """\
\b
Examples:
  slatemq queue create orders
      takes what is published --to orders: the header `queue` is its name
  slatemq queue create eu --filter 'headers["region"] == "eu" && headers["type"] == "order"'
  slatemq queue create big --filter 'size > 1000000' --priority 'int(headers["priority"])'
  slatemq queue create mail --max-attempts 3 --lease 2m --done-retention 7d
  slatemq queue create calls --backoff exponential:1s..10m,jitter=0.5
  slatemq queue create audited --default-delay 30s
  slatemq queue create stats --filter 'headers["type"] == "order"' --start-from -2h
  slatemq queue create stage-2 --with stage-1

\b
Filters and priorities are CEL. They see `headers` (text by text),
`created_at`, `received_at`, `visible_at` (times), `retention` (a duration),
`size` (bytes of payload) and `message_id`. A filter that fails, over a header
that is not there, say, lets nothing in. Priorities are 0 to 255, 0 the most
urgent; without one every message has 128, and one that fails or gives no
integer gives the fallback priority.

\b
A backoff says how long a message waits after its n-th failed attempt:
fixed:10s, linear:5s..1m (n times 5s, at most 1m), exponential:1s..10m
(doubling; or ,multiplier=3); ,jitter=0.5 takes a random part of up to half
away; none: it comes again at once. A queue with a default delay is a delayed
queue: its messages can be claimed so long after they were received, unless
they have a delay of their own.
"""

UPDATE_EPILOG = """\
\b
Examples:
  slatemq queue update orders --max-attempts 10
  slatemq queue update orders --filter 'headers["type"] == "order"'
  slatemq queue update orders --reset priority --reset lease
  slatemq queue update orders --lease 1m --etag 7       (the etag of queue show)

A new filter or priority judges what is routed later; what is in the queue stays.
"""


PURGE_EPILOG = """\
\b
Examples:
  slatemq queue purge orders
  slatemq queue purge orders --state in-flight      ends their leases
  slatemq queue purge orders --state failed --yes   the same as `failed purge`
"""


@click.group("queue", cls=Group)
def queue() -> None:
    """Create, list, change, pause, purge and delete queues."""


@queue.command("create", epilog=CREATE_EPILOG)
@click.argument("name", type=WORDS)
@settings_options(lambda default: f"  [default: {default}]")
@click.option(
    "--start-from",
    type=START,
    default="now",
    help="Which older messages it gets, too: beginning, a time, or -2h for so long ago.  "
    "[default: now]",
)
@click.option(
    "--with",
    "with_queue",
    type=QUEUE,
    default="",
    metavar="QUEUE",
    help="A queue whose shard it must share, for commands on both that are executed together.",
)
@session_options
@pass_session
def create(
    session: Session, /, name: str, with_queue: str, start_from: Any, **settings: Any
) -> None:
    """Create the queue NAME: 1 to 255 letters, digits, `.`, `_` and `-`.

    It gets every message that is published from now on and that its filter lets in, and older
    ones with --start-from, back to the beginning of the instance's replay window (7 days, unless
    set otherwise): `queue show` tells how far these are brought in.
    """

    async def work() -> Queue:
        async with session.connect() as client:
            return await client.create_queue(
                name, with_queue=with_queue, start_from=start_from, **settings
            )

    _report(session, run(work()), f"created queue {name}")


@queue.command("ls", epilog="\b\nExamples:\n  slatemq queue ls\n  slatemq queue ls --prefix eu-")
@click.option("--prefix", type=WORDS, default="", help="Only queues whose name begins so.")
@session_options
@pass_session
def ls(session: Session, prefix: str) -> None:
    """List the queues with the counts of their messages."""

    async def work() -> Listing[Queue]:
        async with session.connect() as client:
            return await listing_of(client.list_queues(prefix))

    found = run(work())
    if session.json:
        for one in found.items:
            write_json(queue_fields(one))
    else:
        _show_queues(found.items)
    found.check_complete()


@queue.command("show", epilog="\b\nExample:\n  slatemq queue show orders --json")
@click.argument("name", type=QUEUE)
@session_options
@pass_session
def show(session: Session, name: str) -> None:
    """Show the settings of a queue, and how many messages are in which state."""

    async def work() -> Queue:
        async with session.connect() as client:
            return await client.get_queue(name)

    found = run(work())
    if session.json:
        write_json(queue_fields(found))
    else:
        write_table(("setting", "value"), settings_rows(found))
        if found.counts.by_priority:
            say("")
            write_table(("priority", "available", "delayed"), priority_rows(found))


@queue.command("update", epilog=UPDATE_EPILOG)
@click.argument("name", type=QUEUE)
@settings_options(lambda default: "")
@click.option(
    "--reset",
    type=click.Choice(list(RESETTABLE)),
    metavar="SETTING",
    multiple=True,
    help="Take a setting back to its default (see `queue create --help`); repeatable.",
)
@click.option("--etag", type=WORDS, default="", help="Only if nobody changed it since this etag.")
@session_options
@pass_session
def update(
    session: Session, /, name: str, reset: tuple[str, ...], etag: str, **settings: Any
) -> None:
    """Change settings of a queue; those not given stay as they are."""
    changes = {key: value for key, value in settings.items() if value is not None}
    for word in reset:
        if RESETTABLE[word] in changes:
            raise click.UsageError(f"--{word} and --reset {word} are opposites: leave one out")
        changes[RESETTABLE[word]] = None
    if not changes:
        raise click.UsageError("nothing to change: give at least one setting, e.g. --lease 1m")

    async def work() -> Queue:
        async with session.connect() as client:
            return await client.update_queue(name, etag=etag, **changes)

    _report(session, run(work()), f"updated queue {name}")


@queue.command("delete", epilog="\b\nExample:\n  slatemq queue delete orders --yes")
@click.argument("name", type=QUEUE)
@click.option("--yes", is_flag=True, help="Do not ask. Nobody is asked where stdin is no terminal.")
@click.option("--etag", type=WORDS, default="", help="Only if nobody changed it since this etag.")
@session_options
@pass_session
def delete(session: Session, name: str, yes: bool, etag: str) -> None:
    """Delete a queue with everything in it. Other queues keep their messages."""
    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete queue {name} with everything in it?", abort=True, err=True)

    async def work() -> None:
        async with session.connect() as client:
            await client.delete_queue(name, etag=etag)

    run(work())
    if session.json:
        write_json({"queue_id": name, "deleted": True})
    else:
        say(f"deleted queue {name}")


def _show_queues(queues: Sequence[Queue]) -> None:
    """A table as wide as a terminal; what of names and filters does not fit is left out there."""
    archived = any(one.counts.archived_count for one in queues)
    counts = COUNTS if archived else COUNTS[:-1]
    rows: list[list[object]] = []
    for one in queues:
        state = state_of(one)
        rows.append(["" if state == OPEN else f" ({state})", *count_cells(one)[: len(counts)]])
    heads = ("queue", *counts)

    def taken(places: range) -> int:
        return sum(
            max(len(heads[place]), *(len(str(row[place])) for row in rows), 0) + 2
            for place in places
        )

    left = line_width() - taken(range(1, len(heads)))
    for one, row in zip(queues, rows, strict=True):
        row[0] = cut(one.queue_id, max(left - len(str(row[0])), CUT_WIDTH)) + str(row[0])
    left -= taken(range(1))
    if left >= FILTER_WIDTH:
        heads = (*heads, "filter")
        for one, row in zip(queues, rows, strict=True):
            row.append(cut(printable(one.filter).replace("\n", "\\n"), left))
    write_table(heads, rows)


def _report(session: Session, one: Queue, text: str) -> None:
    if session.json:
        write_json(queue_fields(one))
    else:
        say(text)


def _steering(
    word: str, done: str, text: str, steer: Callable[[Client, str], Awaitable[Queue]]
) -> click.Command:
    """A command that sets whether a queue hands out messages."""

    @click.command(word, help=text, epilog=f"\b\nExample:\n  slatemq queue {word} orders")
    @click.argument("name", type=QUEUE)
    @session_options
    @pass_session
    def command(session: Session, name: str) -> None:
        async def work() -> Queue:
            async with session.connect() as client:
                return await steer(client, name)

        _report(session, run(work()), f"{done} queue {name}")

    return command


queue.add_command(
    _steering(
        "pause",
        "paused",
        "Stop handing out messages of a queue. It still takes them in; leases can be finished.",
        lambda client, name: client.pause_queue(name),
    )
)
queue.add_command(
    _steering(
        "resume",
        "resumed",
        "Hand out messages of a paused queue again.",
        lambda client, name: client.resume_queue(name),
    )
)
queue.add_command(
    _steering(
        "lift-quarantine",
        "lifted the quarantine of",
        "Route a queue again whose filter or priority took too long. What waited is judged now. A "
        "change of the filter or priority does so, too.",
        lambda client, name: client.lift_quarantine(name),
    )
)


@queue.command("purge", epilog=PURGE_EPILOG)
@click.argument("name", type=QUEUE)
@click.option(
    "--state",
    "states",
    type=click.Choice(["available", "delayed", "in-flight", "done", "failed", "archived"]),
    multiple=True,
    help="Whose messages go; repeatable.  [default: available and delayed, always together]",
)
@click.option("--yes", is_flag=True, help="Do not ask. Nobody is asked where stdin is no terminal.")
@session_options
@pass_session
def purge(session: Session, name: str, states: tuple[StateName, ...], yes: bool) -> None:
    """Remove all messages of a queue that are in certain states, however many, at once."""
    purge_states(session, name, states, yes)


def purge_states(session: Session, name: str, states: tuple[StateName, ...], yes: bool) -> None:
    """Asks, purges, and tells how many."""
    what = " and ".join(states) or "available and delayed"
    if not yes and sys.stdin.isatty():
        click.confirm(f"Remove all {what} messages of queue {name}?", abort=True, err=True)

    async def work() -> int:
        async with session.connect() as client:
            return await client.purge_queue(name, states)

    count = run(work())
    if session.json:
        write_json({"queue_id": name, "purged_count": count})
    else:
        say(f"purged {count} {what} messages of queue {name}")
