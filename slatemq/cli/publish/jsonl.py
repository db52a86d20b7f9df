"""`slatemq publish --jsonl`: every line of a file, and how to continue after a failure.

Several batches are under way, and the durable lines are counted.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections import deque
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from slatemq._cancelling import end_all
from slatemq.cli.output import Update, note, progress
from slatemq.cli.publish.applied import stored
from slatemq.cli.publish.lines import Batch, LineError, LineReader, TooFewLines
from slatemq.cli.publish.reach import check_queue, note_lines_reach
from slatemq.cli.publish.runs import Run
from slatemq.cli.session import Session, in_thread
from slatemq.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from datetime import timedelta

    from slatemq.client import Client

REQUESTS_MAX = 4
"""Batches under way: ingest stores one while it takes in the next."""

OUTSTANDING_BYTES_MAX = 32 << 20
"""Of the batches under way; a single batch may be larger."""

COLUMNS = ("BarColumn", "DownloadColumn", "TransferSpeedColumn", "TimeRemainingColumn")

INTERRUPTED_S = 5.0
"""How long an interrupted run waits for outstanding answers."""

_PLACE = re.compile(r"messages\[(\d+)\]\.?")


class _Flight(NamedTuple):
    batch: Batch
    task: asyncio.Task[None]


class LinePublisher:
    """Publishes the lines of a reader.

    Attributes:
        durable_count: Lines from the start of the file, skipped ones included, that are certainly
            durable; later ones may be too.
    """

    def __init__(
        self, client: Client, reader: LineReader, run: Run, update: Update, timeout: timedelta
    ) -> None:
        """Start where the reader is; `update` gets the bytes of the file made durable.

        Tasks that batches are accepted as are waited for, each for `timeout`.
        """
        self.durable_count = reader.position
        self._client = client
        self._reader = reader
        self._run = run
        self._update = update
        self._timeout = timeout
        self._flights: deque[_Flight] = deque()

    async def run(self) -> None:
        """Publish all lines. Raises SlateMQError, LineError, OSError once all answers are in."""
        try:
            while (batch := await self._next_batch()) is not None:
                while self._is_full(batch):
                    await self._wait()
                self._send(batch)
            while self._flights:
                await self._wait()
        except asyncio.CancelledError:
            await self._settle(INTERRUPTED_S)
            raise
        except BaseException:
            await self._settle(None)
            raise

    @property
    def in_doubt(self) -> bool:
        """Whether lines after the durable ones may be stored: not where all were refused."""
        return any(
            task.cancelled() or not isinstance(task.exception(), InvalidArgument)
            for _, task in self._flights
        )

    async def _next_batch(self) -> Batch | None:
        """Read the next batch while watching those under way: a source may stay silent."""
        reading = asyncio.create_task(in_thread(self._reader.next_batch))
        try:
            while not reading.done():
                await self._wait(reading)
            return reading.result()
        finally:
            reading.cancel()

    def _is_full(self, batch: Batch) -> bool:
        outstanding = sum(flight.batch.payload_bytes for flight in self._flights)
        return bool(self._flights) and (
            len(self._flights) >= REQUESTS_MAX
            or outstanding + batch.payload_bytes > OUTSTANDING_BYTES_MAX
        )

    def _send(self, batch: Batch) -> None:
        self._flights.append(_Flight(batch, asyncio.create_task(self._store(batch))))

    async def _store(self, batch: Batch) -> None:
        request_id = self._run.request_id(batch)
        published = await self._client.publish_batch(
            batch.messages, request_id=request_id, shard=self._run.shard(request_id)
        )
        await stored(self._client, published, self._timeout)

    async def _wait(self, *others: asyncio.Task[Batch | None]) -> None:
        """Wait until a task ends. Raises the error of a failed batch."""
        waiting = [flight.task for flight in self._flights if not flight.task.done()]
        if waiting or others:
            await asyncio.wait([*waiting, *others], return_when=asyncio.FIRST_COMPLETED)
        self._count()
        for batch, task in self._flights:
            if task.done() and (error := task.exception()) is not None:
                raise _about_line(error, batch)

    def _count(self) -> None:
        while self._flights:
            batch, task = self._flights[0]
            if not task.done() or task.cancelled() or task.exception() is not None:
                return
            self._flights.popleft()
            self.durable_count = batch.last
            self._update(advance=batch.source_bytes)

    async def _settle(self, seconds: float | None) -> None:
        """Wait for the batches under way, so that the count is as high as it can be."""
        tasks = [flight.task for flight in self._flights]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self._count()
        await end_all(tasks)


def _about_line(error: BaseException, batch: Batch) -> BaseException:
    """The error with the line of the file instead of the place in the batch."""
    if not isinstance(error, InvalidArgument):
        return error
    place = _PLACE.match(error.field)
    if place is None:
        return error
    number = batch.first + int(place[1])
    rest = error.field[place.end() :]
    field = f"line {number}, {rest}" if rest else f"line {number}"
    return InvalidArgument(field, error.description, reason=error.reason, metadata=error.metadata)


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
            reader.has_keys = session.has_keys
            if checked is not None:
                await check_queue(client, checked)
            if not reader.pointers:
                is_delayed = template.delay_ms is not None
                await note_lines_reach(client, checked, template.headers, is_delayed)
            shards = (await client.topology()).open_ingests
            if not shards:
                raise Unavailable("no ingest is known yet", reason="PEER_UNKNOWN")
            this_run = Run(source, options, shards)
            with progress(True, "publish", _length(reader.stream), COLUMNS) as update:
                update(advance=await in_thread(lambda: reader.skip(skip)))
                publisher = LinePublisher(client, reader, this_run, update, session.timeout)
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
    if reader.position > skip:
        for pointer in reader.pointers:
            if pointer.header not in reader.found:
                note(f"no line has {pointer.text}: no message has the header {pointer.header!r}")


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


def _length(stream: BinaryIO) -> int | None:
    """The bytes of a file; None for a pipe and the like."""
    status = os.fstat(stream.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None
