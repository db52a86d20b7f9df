"""`slatemq queue`: create, show, change, pause, purge and delete queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from slatemq._counts import counted
from slatemq.cli.output import CUT_WIDTH, cut, printable, say, width_beside, write_json, write_table
from slatemq.cli.parameters import QUEUE, START, WORDS, Number, confirm, etag_option, yes_option
from slatemq.cli.queue_options import (
    COUNTS,
    OPEN,
    SETTINGS,
    count_cells,
    partition_rows,
    priority_rows,
    queue_fields,
    settings_options,
    settings_rows,
    state_of,
)
from slatemq.cli.session import Group, Session, write_listing

if TYPE_CHECKING:
    from slatemq._admin.entry_models import StateName
    from slatemq._admin.queue_models import Queue

FILTER_WIDTH = 8
"""The least width at which a list shows filters."""

_RESETTABLE = {one.option: one.keyword for one in SETTINGS}

_NAME = click.argument("name", type=QUEUE)


@click.group("queue", cls=Group)
def queue() -> None:
    """Create, list, change, pause, purge and delete queues."""


@queue.command("create")
@click.argument("name", type=WORDS)
@settings_options(lambda default: f"  [default: {default}]")
@click.option(
    "--start-from",
    type=START,
    default="now",
    help="Take older messages too: beginning, a time, or -2h for the last 2 hours.  [default: now]",
)
@click.option(
    "--with",
    "with_queue",
    type=QUEUE,
    default="",
    help="Place it on this queue's shard, for commands that change both in one step.",
)
@click.option(
    "--shard",
    type=Number(min=0),
    metavar="N",
    help="Place it on this broker shard.  [default: one with little load]",
)
@click.option(
    "--partitions",
    type=Number(min=1),
    metavar="N",
    help="Spread it over this many broker shards, for more load than one can take.",
)
@click.option(
    "--ordering-header",
    type=WORDS,
    default="",
    help="Messages with the same value of this header go to the same partition.",
)
def create(
    session: Session,
    /,
    name: str,
    with_queue: str,
    shard: int | None,
    partitions: int | None,
    ordering_header: str,
    start_from: Any,
    **settings: Any,
) -> None:
    """Create the queue NAME: 1 to 255 letters, digits, `.`, `_` and `-`.

    It takes the messages that match its filter, of those published from now on. With --start-from
    it takes older ones too, as far as the instance's replay window goes back (7 days unless set
    otherwise); `queue show` reports the progress.

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
      slatemq queue create clicks --partitions 4 --ordering-header customer

    A queue lives on one broker shard. Without --shard and --with, the command asks
    two brokers for their load (queues, messages, processor time), and creates the
    queue on the one with less.

    With --partitions it lives on several shards, and keeps order within each.
    Repeat the command if it breaks off. The number of partitions cannot change:
    create another queue, and move what is left.

    Filters and priorities are CEL. They see `headers` (a map of strings),
    `created_at`, `received_at`, `visible_at` (timestamps), `retention` (a
    duration), `size` (bytes of payload) and `message_id`. A filter that fails,
    for example on a missing header, matches nothing. Priorities are 0 to 255, 0
    the most urgent, and 128 unless --priority says otherwise; an expression that
    fails or does not return an integer gives the fallback priority.

    A backoff says how long a message waits after its n-th failed attempt:
    fixed:10s, linear:5s..1m (n times 5s, at most 1m), exponential:1s..10m
    (doubling; ,multiplier=3 triples); ,jitter=0.5 shortens the wait by a random
    part of up to half; none: no wait. A queue with a default delay is a delayed
    queue: a message becomes available that long after it was received, unless it
    has a delay of its own.
    """
    one = session.call(
        lambda client: client.create_queue(
            name,
            with_queue=with_queue,
            shard=shard,
            partitions=partitions,
            ordering_header=ordering_header,
            start_from=start_from,
            **settings,
        )
    )
    session.show(queue_fields(one), f"created queue {name}")


@queue.command("ls", epilog="Examples:\n  slatemq queue ls\n  slatemq queue ls --prefix eu-")
@click.option("--prefix", type=WORDS, default="", help="Only queues whose names begin with TEXT.")
def ls(session: Session, prefix: str) -> None:
    """List the queues with the counts of their messages."""
    write_listing(session, lambda client: client.list_queues(prefix), queue_fields, _show_queues)


@queue.command("show", epilog="Example:\n  slatemq queue show orders --json")
@_NAME
def show(session: Session, name: str) -> None:
    """Show the settings of a queue, and the counts of its messages."""
    found = session.call(lambda client: client.get_queue(name))
    if session.json:
        write_json(queue_fields(found))
        return
    write_table(("setting", "value"), settings_rows(found))
    if found.counts.by_priority:
        say("")
        write_table(("priority", "available", "delayed"), priority_rows(found))
    if found.partitions_count:
        say("")
        write_table(("partition", "broker shard", "state", *COUNTS), partition_rows(found))


@queue.command("update")
@_NAME
@settings_options(lambda default: "")
@click.option(
    "--reset",
    type=click.Choice(list(_RESETTABLE)),
    metavar="SETTING",
    multiple=True,
    help="Reset a setting to its default (see `queue create --help`); repeatable.",
)
@etag_option
def update(
    session: Session, /, name: str, reset: tuple[str, ...], etag: str, **settings: Any
) -> None:
    """Change settings of a queue; all others stay as they are.

    Examples:
      slatemq queue update orders --max-attempts 10
      slatemq queue update orders --filter 'headers["type"] == "order"'
      slatemq queue update orders --reset priority --reset lease
      slatemq queue update orders --lease 1m --etag 7       (the etag of queue show)

    A new filter or priority applies to what is routed later; messages in the
    queue stay.
    """
    changes = {key: value for key, value in settings.items() if value is not None}
    for word in reset:
        if _RESETTABLE[word] in changes:
            raise click.UsageError(f"--{word} and --reset {word} contradict: leave one out")
        changes[_RESETTABLE[word]] = None
    if not changes:
        raise click.UsageError("nothing to change: give at least one setting, e.g. --lease 1m")
    one = session.call(lambda client: client.update_queue(name, etag=etag, **changes))
    session.show(queue_fields(one), f"updated queue {name}")


@queue.command("delete", epilog="Example:\n  slatemq queue delete orders --yes")
@_NAME
@yes_option
@etag_option
def delete(session: Session, name: str, yes: bool, etag: str) -> None:
    """Delete a queue with everything in it. Other queues keep their messages."""
    confirm(yes, f"Delete queue {name} with everything in it?")
    session.call(lambda client: client.delete_queue(name, etag=etag))
    session.show({"queue_id": name, "deleted": True}, f"deleted queue {name}")


def _show_queues(queues: Sequence[Queue]) -> None:
    """A table; on a terminal, names and filters that do not fit are cut."""
    archived = any(one.counts.archived_count for one in queues)
    counts = COUNTS if archived else COUNTS[:-1]
    rows: list[list[object]] = []
    for one in queues:
        state = state_of(one)
        rows.append(["" if state == OPEN else f" ({state})", *count_cells(one)[: len(counts)]])
    heads = ("queue", *counts)
    left = width_beside(counts, [row[1:] for row in rows])
    for one, row in zip(queues, rows, strict=True):
        row[0] = cut(one.queue_id, max(left - len(str(row[0])), CUT_WIDTH)) + str(row[0])
    left = width_beside(heads, rows)
    if left >= FILTER_WIDTH:
        heads = (*heads, "filter")
        for one, row in zip(queues, rows, strict=True):
            row.append(cut(printable(one.filter).replace("\n", "\\n"), left))
    write_table(heads, rows)


def _steering(word: str, done: str, method: str, text: str) -> None:

    @queue.command(word, help=text, epilog=f"Example:\n  slatemq queue {word} orders")
    @_NAME
    def command(session: Session, name: str) -> None:
        one: Queue = session.call(lambda client: getattr(client, method)(name))
        session.show(queue_fields(one), f"{done} queue {name}")


_steering(
    "pause",
    "paused",
    "pause_queue",
    "Stop delivering messages of a queue. It still takes messages in; claimed ones can be acked.",
)
_steering("resume", "resumed", "resume_queue", "Deliver messages of a paused queue again.")
_steering(
    "lift-quarantine",
    "lifted the quarantine of",
    "lift_quarantine",
    "Route a queue again whose filter or priority took too long. Messages that waited are judged "
    "now. Changing the filter or priority lifts the quarantine, too.",
)


@queue.command("purge")
@_NAME
@click.option(
    "--state",
    "states",
    type=click.Choice(["available", "delayed", "in-flight", "done", "failed", "archived"]),
    multiple=True,
    help="Remove messages in this state; repeatable.  [default: available and delayed, which "
    "always go together]",
)
@yes_option
def purge(session: Session, name: str, states: tuple[StateName, ...], yes: bool) -> None:
    """Remove all messages of a queue that are in certain states, in one step.

    Examples:
      slatemq queue purge orders
      slatemq queue purge orders --state in-flight      also ends their leases
      slatemq queue purge orders --state failed --yes   the same as `failed purge`
    """
    purge_states(session, name, states, yes)


def purge_states(session: Session, name: str, states: tuple[StateName, ...], yes: bool) -> None:
    what = " and ".join(states) or "available and delayed"
    confirm(yes, f"Remove all {what} messages of queue {name}?")
    count = session.call(lambda client: client.purge_queue(name, states))
    fields = {"queue_id": name, "purged_count": count}
    session.show(fields, f"purged {counted(count, f'{what} message')} of queue {name}")
