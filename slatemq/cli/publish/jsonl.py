"""`slatemq publish --jsonl`: every line of a file, and how to continue after a failure."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from slatemq.cli.output import note
from slatemq.cli.progress import progress
from slatemq.cli.publish.bulk import LinePublisher
from slatemq.cli.publish.lines import LineError, LineReader, TooFewLines
from slatemq.cli.publish.reach import check_queue, note_lines_reach
from slatemq.cli.publish.runs import Run
from slatemq.cli.session import Session
from slatemq.cli.threads import in_thread
from slatemq.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


async def publish_lines(
    session: Session, reader: LineReader, source: str, skip: int, checked: str | None
) -> None:
    """Publish all lines after the first `skip`, and print how many are durable, in any case.

    The queue `checked` must exist.
    """
    template = reader.template
    pointers = [pointer.text for pointer in reader.pointers]
    options = [sorted(template.headers.items()), pointers, *template[2:]]
    durable, in_doubt = skip, False
    this_run: Run | None = None
    try:
        async with session.connect() as client:
            if checked is not None:
                await check_queue(client, checked)
            if not reader.pointers:
                is_delayed = template.delay_ms is not None
                await note_lines_reach(client, checked, template.headers, is_delayed)
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
                    durable, in_doubt = publisher.durable_count, publisher.in_doubt
    except TooFewLines:
        # Wrong usage: what an earlier run has stored is unknown, so no count is printed.
        if this_run is not None:
            this_run.stop(in_doubt)
        raise
    except BaseException as error:
        to_repair = _to_repair(error)
        session.at_end.append(lambda: _report_durable(session, durable, skip))
        if this_run is not None:
            kept = this_run.kept
            is_open = this_run.stop(in_doubt)
            session.at_end.insert(0, lambda: _note_how_to_go_on(durable, is_open, kept, to_repair))
        raise
    if this_run is not None:
        this_run.finish()
    _report_durable(session, durable, skip)


def _to_repair(error: BaseException) -> str:
    """The faulty part of the input; empty when the input is fine."""
    if isinstance(error, LineError):
        return f"line {error.number}"
    if isinstance(error, InvalidArgument):
        return error.field.partition(",")[0] or "the input"
    return ""


def _report_durable(session: Session, durable: int, skipped: int) -> None:
    fields = {
        "durable_count": durable,
        "skipped_count": skipped,
        "published_count": durable - skipped,
    }
    session.show(fields, f"durable: {durable}")


def _note_how_to_go_on(durable: int, is_open: bool, kept: bool, to_repair: str) -> None:
    first = f"fix {to_repair} first, then " if to_repair else ""
    soon = ", within 10 minutes" if is_open else ""
    note(f"not complete: {first}continue with the same options and --skip {durable}{soon}")
    if is_open and not kept:
        note("this run could not be saved: up to 4,000 lines after those may be stored twice")


@contextmanager
def _progress(stream: BinaryIO) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal; yields what to call with bytes made durable."""
    status = os.fstat(stream.fileno())
    total = status.st_size if stat.S_ISREG(status.st_mode) else None
    with progress(True, "publish", total, _columns) as update:
        yield lambda count: update(advance=count)


def _columns() -> tuple[ProgressColumn, ...]:
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    return BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
