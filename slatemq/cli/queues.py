"""`slatemq queue`: create, look at, change and delete queues."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import click

from slatemq.cli.durations import format_duration
from slatemq.cli.output import say, write_json, write_table
from slatemq.cli.parameters import DURATION, SECONDS, WORDS
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.models import Queue

F = TypeVar("F", bound=Callable[..., Any])

RESETTABLE = {
    "filter": "filter",
    "priority": "priority",
    "max-attempts": "max_attempts",
    "lease": "lease",
    "max-lease": "max_lease",
    "done-retention": "done_retention",
    "max-in-flight": "max_in_flight",
}

CREATE_EPILOG = """\
\b
Examples:
  slatemq queue create orders
      takes what is published --to orders: the header `queue` is its name
  slatemq queue create eu --filter 'headers["region"] == "eu" && headers["type"] == "order"'
  slatemq queue create big --filter 'size > 1000000' --priority 'int(headers["priority"])'
  slatemq queue create mail --max-attempts 3 --lease 2m --done-retention 7d

\b
Filters and priorities are CEL. They see `headers` (text by text),
`created_at`, `received_at` (times) and `size` (bytes of payload). A filter
that fails, over a header that is not there, say, lets nothing in. Priorities
are 0 to 255, 0 the most urgent; without one every message has 128.
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


def _settings_options(told: Callable[[str], str]) -> Callable[[F], F]:
    """An option for each setting; `told` makes the end of its help of the default."""

    def add(function: F) -> F:
        in_flight, attempts = click.IntRange(1, 1_000_000), click.IntRange(1, 65_535)
        for name, kind, what, default in (
            ("--max-in-flight", in_flight, "Messages claimed at once at most.", "100000"),
            ("--done-retention", SECONDS, "How long done messages stay listed.", "1d"),
            ("--max-lease", DURATION, "The longest lease that may be asked for.", "12h"),
            ("--lease", DURATION, "How long a claim holds a message.", "30s"),
            ("--max-attempts", attempts, "Claims before a message is failed.", "5"),
            ("--priority", WORDS, "CEL expression, 0 to 255, 0 the most urgent.", "128"),
            ("--filter", WORDS, "CEL expression.", "the header `queue` is NAME"),
        ):
            metavar = "CEL" if kind is WORDS else "N" if kind in (in_flight, attempts) else None
            function = click.option(name, type=kind, metavar=metavar, help=what + told(default))(
                function
            )
        return function

    return add


@click.group("queue")
def queue() -> None:
    """Create, list, change and delete queues."""


@queue.command("create", epilog=CREATE_EPILOG)
@click.argument("name", type=WORDS)
@_settings_options(lambda default: f"  [default: {default}]")
@session_options
@pass_session
def create(session: Session, /, name: str, **settings: Any) -> None:
    """Create the queue NAME: 1 to 255 letters, digits, `.`, `_` and `-`.

    It gets every message that is published from now on and that its filter lets in.
    """

    async def work() -> Queue:
        async with session.connect() as client:
            return await client.create_queue(name, **settings)

    _tell(session, run(work()), f"created queue {name}")


@queue.command("ls", epilog="\b\nExamples:\n  slatemq queue ls\n  slatemq queue ls --prefix eu-")
@click.option("--prefix", type=WORDS, default="", help="Only queues whose name begins so.")
@session_options
@pass_session
def ls(session: Session, prefix: str) -> None:
    """List the queues with the counts of their messages."""

    async def work() -> list[Queue]:
        found = []
        async with session.connect() as client:
            async for one in client.list_queues(prefix):
                if session.json:
                    write_json(queue_fields(one))
                else:
                    found.append(one)
        return found

    queues = run(work())
    if not session.json:
        write_table(("queue", *COUNTS, "filter"), (_row(one) for one in queues))


@queue.command("show", epilog="\b\nExample:\n  slatemq queue show orders --json")
@click.argument("name", type=WORDS)
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
        write_table(("setting", "value"), _settings_rows(found))


@queue.command("update", epilog=UPDATE_EPILOG)
@click.argument("name", type=WORDS)
@_settings_options(lambda default: "")
@click.option(
    "--reset",
    type=click.Choice(list(RESETTABLE)),
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

    _tell(session, run(work()), f"updated queue {name}")


@queue.command("delete", epilog="\b\nExample:\n  slatemq queue delete orders --yes")
@click.argument("name", type=WORDS)
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


COUNTS = ("available", "delayed", "in flight", "done", "failed")


def queue_fields(one: Queue) -> dict[str, Any]:
    """A queue for programs, named as in the protos."""
    return asdict(one)


def count_cells(one: Queue) -> list[int]:
    """The columns of `COUNTS`."""
    counts = one.counts
    return [
        counts.available_count,
        counts.delayed_count,
        counts.in_flight_count,
        counts.done_count,
        counts.failed_count,
    ]


def _row(one: Queue) -> list[object]:
    return [one.queue_id, *count_cells(one), one.filter]


def _settings_rows(one: Queue) -> list[tuple[str, str]]:
    counts = zip(COUNTS, count_cells(one), strict=True)
    retention = format_duration(one.done_retention_s * 1000) if one.done_retention_s else "for ever"
    return [
        ("queue", one.queue_id),
        ("filter", one.filter),
        ("priority", one.priority or "128"),
        ("max attempts", str(one.max_attempts)),
        ("lease", format_duration(one.lease_ms)),
        ("max lease", format_duration(one.max_lease_ms)),
        ("done retention", retention),
        ("max in flight", str(one.max_in_flight)),
        *((name, str(count)) for name, count in counts),
        ("broker shard", str(one.broker_shard)),
        ("created", _time(one.created_at_ms)),
        ("updated", _time(one.updated_at_ms)),
        ("etag", one.etag),
    ]


def _time(time_ms: int) -> str:
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _tell(session: Session, one: Queue, text: str) -> None:
    if session.json:
        write_json(queue_fields(one))
    else:
        say(text)
