"""`slatemq publish`: one message, or each line of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, BinaryIO

import click

from slatemq.cli.failures import BadInput
from slatemq.cli.output import note, say, write_json
from slatemq.cli.parameters import (
    DURATION,
    SECONDS,
    TIME,
    WHEN,
    WORDS,
    FromNow,
    Number,
    flag,
    header_option,
    headers_of,
)
from slatemq.cli.publish.jsonl import publish_lines
from slatemq.cli.publish.lines import LineReader, Pointer, parse_pointers
from slatemq.cli.publish.plain_text import publish_problem
from slatemq.cli.publish.reach import (
    check_queue,
    check_taken,
    note_reach,
    note_unused_delay,
    queues_reached,
)
from slatemq.cli.session import Session, command, in_thread, run
from slatemq.models import OutgoingMessage

PAYLOAD_BYTES_MAX = 1 << 30
"""The most that any instance can be set to take."""

STDIN = "-"

EPILOG = """\
Examples:
  slatemq publish --to orders '{"id": 7}'
  slatemq publish --header type=order --header region=eu --file order.json
  date | slatemq publish --to clock --retention 1h -
  slatemq publish --to mail --visible-at +5m 'later'
  slatemq publish --to orders --dedupe-key order-7 '{"id": 7}'
  slatemq publish --jsonl events.jsonl --headers-from /type,/actor/login
  slatemq publish --jsonl events.jsonl --headers-from /type,/actor/login --skip 12000

--jsonl publishes each line as one message, byte for byte without its newline;
an empty line is an empty message. --headers-from takes headers from lines of
JSON, by RFC 6901 pointers (~1 for /, ~0 for ~): /actor/login makes the header
`login`. Strings are taken as they are, numbers, true and false as they are
written; a missing value or null makes no header; an object or array is an
error, which names the line.

At the end, even after a failure or Ctrl-C, --jsonl prints the durable count:
the number of lines, from the start of the file, that are certainly stored.
Continue with --skip and that number. Later lines may be stored too; if you
continue within 10 minutes, on the same machine, with the same file and
options, they are not stored twice. (A file in ~/.local/state/slatemq/publish
remembers an incomplete run for a day at most.) Any other number loses or
duplicates lines.
"""


@command("publish", epilog=EPILOG)
@click.argument("text", required=False)
@click.option("--file", "file", type=click.Path(), metavar="F", help="Read the payload from F.")
@click.option("--jsonl", type=click.Path(), metavar="F", help="Publish each line of F; - is stdin.")
@click.option(
    "--headers-from",
    type=WORDS,
    multiple=True,
    metavar="POINTERS",
    help="Take headers from each JSON line, e.g. /type,/region.",
)
@click.option("--skip", type=Number(min=0), help="Skip the first N lines.")
@click.option(
    "--retention", type=SECONDS, help="How long to keep it; 0: forever.  [default: the instance's]"
)
@click.option(
    "--created-at", type=TIME, help="When it was created: 2026-11-21T08:30:00Z, or ms since 1970."
)
@click.option(
    "--delay",
    type=DURATION,
    help="How long delayed queues delay it: 500ms, 30s, 1h30m, 7d.  [default: the queue's]",
)
@click.option("--visible-at", type=WHEN, help="When it becomes available: a time, or +5m from now.")
@click.option(
    "--dedupe-key",
    type=WORDS,
    metavar="KEY",
    help="Publishing with the same key again stores nothing and prints the first ID.",
)
@flag(
    "--allow-unrouted",
    help="Publish even if the queue of --to does not exist or does not match.",
)
@header_option("the message, or of each line")
def publish(
    session: Session,
    text: str | None,
    file: str | None,
    jsonl: str | None,
    headers_from: tuple[str, ...],
    skip: int | None,
    dedupe_key: str | None,
    allow_unrouted: bool,
    to: str | None,
    pairs: tuple[tuple[str, str], ...],
    **options: Any,
) -> None:
    """Publish one message, or each line of a file with --jsonl.

    The payload is TEXT, a file, or stdin (-). The message is durable once its
    ID is printed, even if no queue matches: a note says how many queues do, and
    `slatemq explain` shows which. --to a queue that does not exist is refused.
    """
    headers = headers_of(to, pairs)
    checked = None if allow_unrouted else to
    if dedupe_key == "":
        raise click.UsageError("--dedupe-key is empty: leave it out, or give 1 to 255 bytes")
    if options["delay"] is not None and options["visible_at"] is not None:
        raise click.UsageError("--delay and --visible-at exclude each other: give one")
    if sum(source is not None for source in (text, file, jsonl)) != 1:
        raise click.UsageError("give one of TEXT, - (stdin), --file F and --jsonl F")
    if jsonl is None:
        if headers_from or skip is not None:
            raise click.UsageError("--headers-from and --skip need --jsonl")
        run(_publish_one(session, text, file, headers, checked, dedupe_key=dedupe_key, **options))
        return
    if dedupe_key:
        raise click.UsageError("--dedupe-key is for one message: leave it out with --jsonl")
    if isinstance(options["visible_at"], FromNow):
        raise click.UsageError(
            "--visible-at +… would be another time when you continue: with --jsonl give a time"
        )
    with _opened(jsonl) as stream:
        template = OutgoingMessage(
            b"",
            headers,
            options["created_at"],
            _whole(options["retention"], timedelta(seconds=1)),
            _whole(options["delay"], timedelta(milliseconds=1)),
            options["visible_at"],
        )
        reader = LineReader(stream, template, _pointers(headers_from, headers))
        source = STDIN if jsonl == STDIN else os.path.realpath(jsonl)
        run(publish_lines(session, reader, source, skip or 0, checked))


def _whole(length: timedelta | None, unit: timedelta) -> int | None:
    return None if length is None else length // unit


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
        if problem := publish_problem(payload, headers, session.has_keys):
            raise BadInput(problem)
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
                reached = sorted([*reached, checked])  # the router does not know it yet
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
            note("nothing was stored: the message with this ID has the same dedupe key")
        else:
            if published.task_id:
                note(
                    "accepted as a task, stored later: `slatemq task wait` prints the message's ID"
                )
            note_reach(reached)
        if options["delay"] is not None and reached:
            await note_unused_delay(client, reached)


def _pointers(texts: tuple[str, ...], headers: dict[str, str]) -> list[Pointer]:
    try:
        pointers = parse_pointers(texts)
    except ValueError as error:
        raise click.UsageError(f"--headers-from: {error}") from None
    for pointer in pointers:
        if pointer.header in headers:
            raise click.UsageError(
                f"the header {pointer.header!r} is given, and {pointer.text} makes it, too: leave "
                "one out"
            )
    return pointers


def read_all(name: str) -> bytes:
    """The bytes of a file, or of stdin. Raises BadInput for more than any instance takes."""
    with _opened(name) as stream:
        payload = stream.read(PAYLOAD_BYTES_MAX + 1)
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise BadInput(f"{name} has more than 1 GiB, the most that a message can have")
    return payload


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """A file, or stdin. Raises UsageError where it cannot be read."""
    try:
        # A reader of our own: a thread left behind would keep Python's locked, and break the exit.
        stream = open(0 if name == STDIN else name, "rb", closefd=name != STDIN)  # noqa: SIM115
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise click.UsageError(f"cannot read {name}: {why}") from None
    if name == STDIN:
        # Never closed: closing would wait for a read in a thread that was left behind.
        yield stream
        return
    with stream:
        yield stream
