"""`slatemq publish`: one message, or every line of a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, BinaryIO

import click
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from slatemq.cli.bulk import LinePublisher
from slatemq.cli.failures import BadInput
from slatemq.cli.lines import LineError, LineReader, TooFewLines
from slatemq.cli.moments import WHEN, FromNow
from slatemq.cli.output import note, say, write_json
from slatemq.cli.parameters import DURATION, SECONDS, TIME, WORDS, header_option, headers_of
from slatemq.cli.pointers import Pointer, parse_pointers
from slatemq.cli.progress import progress
from slatemq.cli.runs import Run
from slatemq.cli.session import Session, pass_session, run, session_options
from slatemq.cli.threads import in_thread
from slatemq.errors import InvalidArgument, Unavailable

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
stored twice (a file under ~/.local/state/slatemq/publish remembers the run
until it is complete). A number that you make up loses or doubles lines.
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
    to: str | None,
    pairs: tuple[tuple[str, str], ...],
) -> None:
    """Publish a message: TEXT, a file, or stdin (-); or each line of a file with --jsonl.

    It is stored for good when this prints its ID, also when no queue takes it:
    `slatemq explain` tells which queues would.
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
        run(_publish_lines(session, reader, source, skip or 0))


async def _publish_one(
    session: Session, text: str | None, file: str | None, headers: dict[str, str], **options: Any
) -> None:
    # The shell's bytes, whatever the encoding they are in.
    payload = os.fsencode(text) if text is not None and text != STDIN else b""
    if text == STDIN or file is not None:
        payload = await in_thread(lambda: read_all(file or STDIN))
    async with session.connect() as client:
        published = await client.publish(payload, headers, **options)
    if session.json:
        told = {"message_id": str(published), "received_at_ms": published.received_at_ms}
        write_json({**told, "duplicate": published.duplicate})
    else:
        say(str(published))


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


async def _publish_lines(session: Session, reader: LineReader, source: str, skip: int) -> None:
    options = [
        sorted(reader.headers.items()),
        [pointer.text for pointer in reader.pointers],
        reader.created_at_ms,
        reader.retention_s,
        reader.delay_ms,
        reader.visible_at_ms,
    ]
    durable = skip
    this_run: Run | None = None
    try:
        async with session.connect() as client:
            shards = sorted((await client.topology()).ingests)
            if not shards:
                raise Unavailable("no ingest is known yet", reason="PEER_UNKNOWN")
            this_run = Run(source, options, shards)
            with _progress(reader.stream) as advance:
                advance(await in_thread(lambda: reader.skip(skip)))
                publisher = LinePublisher(client, reader, this_run, advance)
                try:
                    await publisher.run()
                finally:
                    durable = publisher.durable_count
    except TooFewLines:
        # Wrong usage: nobody knows what an earlier run has stored, so no count is told.
        if this_run is not None:
            this_run.close()
        raise
    except BaseException as error:
        to_mend = _to_mend(error)
        session.at_end.append(lambda: _tell_durable(session, durable, skip))
        if this_run is not None:
            kept = this_run.kept
            this_run.close()
            session.at_end.insert(0, lambda: _say_how_to_go_on(durable, kept, to_mend))
        raise
    if this_run is not None:
        this_run.finish()
    _tell_durable(session, durable, skip)


def _to_mend(error: BaseException) -> str:
    """Where the input is at fault; empty when it is not."""
    if isinstance(error, LineError):
        return f"line {error.number}"
    if isinstance(error, InvalidArgument):
        return error.field.partition(",")[0] or "the input"
    return ""


def _tell_durable(session: Session, durable: int, skipped: int) -> None:
    if session.json:
        write_json(
            {
                "durable_count": durable,
                "skipped_count": skipped,
                "published_count": durable - skipped,
            }
        )
    else:
        say(f"durable: {durable}")


def _say_how_to_go_on(durable: int, kept: bool, to_mend: str) -> None:
    first = f"mend {to_mend} first, then " if to_mend else ""
    note(
        f"not complete: {first}go on with the same options and --skip {durable}, within 10 minutes"
    )
    if not kept:
        note("this run could not be remembered: up to 4,000 lines after those may be stored twice")


@contextmanager
def _progress(stream: BinaryIO) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal; gives what to call with bytes made durable."""
    told = os.fstat(stream.fileno())
    total = told.st_size if stat.S_ISREG(told.st_mode) else None
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with progress(True, "publish", total, columns) as update:
        yield lambda count: update(advance=count)
