"""`slatemq publish`: one message, or every line of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, BinaryIO

import click

from slatemq.cli.failures import BadInput
from slatemq.cli.moments import WHEN, FromNow
from slatemq.cli.output import note, say, write_json
from slatemq.cli.parameters import DURATION, SECONDS, TIME, WORDS, header_option, headers_of
from slatemq.cli.publish.jsonl import publish_lines
from slatemq.cli.publish.lines import LineReader
from slatemq.cli.publish.pointers import Pointer, parse_pointers
from slatemq.cli.publish.reach import (
    check_queue,
    check_taken,
    note_reach,
    note_unheeded_delay,
    queues_reached,
)
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.cli.threads import in_thread

PAYLOAD_BYTES_MAX = 1 << 30
"""No instance takes more, whatever its settings."""

STDIN = "-"

EPILOG = """\
\b
Examples:
  slatemq publish --to orders '{"id": 7}'
  slatemq publish --header type=order --header region=eu --file order.json
  date | slatemq publish --to clock --retention 1h -
  slatemq publish --to mail --visible-at +5m 'later'
  slatemq publish --to orders --dedupe-key order-7 '{"id": 7}'
  slatemq publish --jsonl events.jsonl --headers-from /type,/actor/login
  slatemq publish --jsonl events.jsonl --headers-from /type,/actor/login --skip 12000

\b
--jsonl makes a message of each line, byte for byte without its newline; an
empty line is an empty message. --headers-from takes headers out of lines
that are JSON, by RFC 6901 pointers (~1 for /, ~0 for ~): /actor/login makes
the header `login`. Strings are taken as they are, numbers, true and false as
they are written; what is missing or null makes no header; an object or an
array is an error with the line's number.

\b
At the end, also after a failure or Ctrl-C, --jsonl prints the durable count:
so many lines from the start of the file are stored for certain. --skip goes
on from there. Lines after those may be stored too; when you go on within 10
minutes, on the same machine, with the same file and options, they are not
stored twice (while there may be such lines, a file under
~/.local/state/slatemq/publish remembers the run until it is complete, for a
day at most). A number that you make up loses or doubles lines.
"""


@click.command("publish", epilog=EPILOG)
@click.argument("text", required=False)
@click.option("--file", "file", type=click.Path(), metavar="F", help="The payload: a file's bytes.")
@click.option("--jsonl", type=click.Path(), metavar="F", help="Publish each line; - reads stdin.")
@click.option(
    "--headers-from",
    type=WORDS,
    multiple=True,
    metavar="POINTERS",
    help="Headers from each JSON line, e.g. /type,/region.",
)
@click.option(
    "--skip", type=click.IntRange(min=0), metavar="N", help="Leave out the first N lines."
)
@click.option(
    "--retention", type=SECONDS, help="How long it may live; 0: for ever. [default: the instance's]"
)
@click.option(
    "--created-at", type=TIME, help="When it was made: 2026-11-21T08:30:00Z, or ms since 1970."
)
@click.option(
    "--delay", type=DURATION, help="How long delayed queues hold it back.  [default: as they say]"
)
@click.option(
    "--visible-at", type=WHEN, help="From when on it may be claimed: a time, or +5m from now."
)
@click.option(
    "--dedupe-key",
    type=WORDS,
    metavar="KEY",
    help="A later publish with the same key stores nothing and prints the first one's ID.",
)
@click.option(
    "--allow-unrouted",
    is_flag=True,
    help="With --to: also where no queue of that name exists.",
)
@header_option("the message, or of each line")
@session_options
@pass_session
def publish(
    session: Session,
    text: str | None,
    file: str | None,
    jsonl: str | None,
    headers_from: tuple[str, ...],
    skip: int | None,
    retention: timedelta | None,
    created_at: int | None,
    delay: timedelta | None,
    visible_at: int | None,
    dedupe_key: str | None,
    allow_unrouted: bool,
    to: str | None,
    pairs: tuple[tuple[str, str], ...],
) -> None:
    """Publish a message: TEXT, a file, or stdin (-); or each line of a file with --jsonl.

    It is durable when this prints its ID, also when no queue takes it: a note
    says how many do, and `slatemq explain` which. --to a queue that does not
    exist is refused.
    """
    headers = headers_of(to, pairs)
    if dedupe_key == "":
        raise click.UsageError("--dedupe-key is empty: leave it out, or give 1 to 255 bytes")
    if delay is not None and visible_at is not None:
        raise click.UsageError("--delay and --visible-at say the same differently: give one")
    if sum(source is not None for source in (text, file, jsonl)) != 1:
        raise click.UsageError("give one of TEXT, - (stdin), --file F and --jsonl F")
    if jsonl is None:
        if headers_from or skip is not None:
            raise click.UsageError("--headers-from and --skip go with --jsonl")
        work = _publish_one(
            session,
            text,
            file,
            headers,
            None if allow_unrouted else to,
            created_at=created_at,
            retention=retention,
            delay=delay,
            visible_at=visible_at,
            dedupe_key=dedupe_key,
        )
        run(work)
        return
    if dedupe_key:
        raise click.UsageError("--dedupe-key names one message: it does not go with --jsonl")
    if isinstance(visible_at, FromNow):
        raise click.UsageError(
            "--visible-at +… means another time when you go on: give --jsonl the time itself"
        )
    retention_s = None if retention is None else retention // timedelta(seconds=1)
    with _opened(jsonl) as stream:
        reader = LineReader(
            stream,
            headers,
            _pointers(headers_from, headers),
            created_at,
            retention_s,
            None if delay is None else delay // timedelta(milliseconds=1),
            visible_at,
        )
        source = STDIN if jsonl == STDIN else os.path.realpath(jsonl)
        run(publish_lines(session, reader, source, skip or 0, None if allow_unrouted else to))


async def _publish_one(
    session: Session,
    text: str | None,
    file: str | None,
    headers: dict[str, str],
    checked: str | None,
    *,
    dedupe_key: str | None,
    **options: Any,
) -> None:
    # The shell's bytes, whatever the encoding they are in.
    payload = os.fsencode(text) if text is not None and text != STDIN else b""
    if text == STDIN or file is not None:
        payload = await in_thread(lambda: read_all(file or STDIN))
    async with session.connect() as client:
        if checked is not None:
            await check_queue(client, checked)
            await check_taken(client, checked, headers, len(payload), **options)
        published = await client.publish(payload, headers, dedupe_key=dedupe_key, **options)
        if not session.json:
            say(published.task_id or str(published))
        reached = None
        if not published.duplicate:
            reached = await queues_reached(client, headers, len(payload), **options)
            if reached is not None and checked is not None and checked not in reached:
                reached = sorted([*reached, checked])  # too new for the router that was asked
        if session.json:
            write_json(
                {
                    "message_id": None if published.task_id else str(published),
                    **({"task_id": published.task_id} if published.task_id else {}),
                    "received_at_ms": published.received_at_ms,
                    "duplicate": published.duplicate,
                    "queues_count": None if reached is None else len(reached),
                }
            )
        elif published.duplicate:
            note("nothing was stored: the dedupe key was used before, for the message of this ID")
        else:
            if published.task_id:
                note("accepted as a task, stored later: `slatemq task wait` tells the message's ID")
            note_reach(reached)
        if options["delay"] is not None and reached:
            await note_unheeded_delay(client, reached)


def _pointers(texts: tuple[str, ...], headers: dict[str, str]) -> list[Pointer]:
    try:
        pointers = parse_pointers(texts)
    except ValueError as error:
        raise click.UsageError(f"--headers-from: {error}") from None
    for pointer in pointers:
        if pointer.header in headers:
            raise click.UsageError(
                f"the header {pointer.header!r} is given, and {pointer.text} would make it too"
            )
    return pointers


def read_all(name: str) -> bytes:
    """The bytes of a file, or of stdin; more than any instance takes is wrong input."""
    with _opened(name) as stream:
        payload = stream.read(PAYLOAD_BYTES_MAX + 1)
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise BadInput(f"{name} has more than 1 GiB, which no message may have")
    return payload


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """A file, or stdin. What cannot be read is wrong usage."""
    try:
        # Our own reader: Python's, locked by a thread that is left behind, breaks the exit.
        stream = open(0 if name == STDIN else name, "rb", closefd=name != STDIN)  # noqa: SIM115
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise click.UsageError(f"cannot read {name}: {why}") from None
    if name == STDIN:
        # Never closed: a read that a thread still waits in would hold up the closing.
        yield stream
        return
    with stream:
        yield stream
