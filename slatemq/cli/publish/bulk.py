"""Publishing a file of lines: several batches under way, and a count of durable lines."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from slatemq._publish.published import Published
from slatemq.cli.publish.lines import Batch, LineReader
from slatemq.cli.publish.runs import Run
from slatemq.cli.threads import in_thread
from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from slatemq.client import Client

REQUESTS_MAX = 4
"""Batches under way: ingest stores one while it takes in the next."""

OUTSTANDING_BYTES_MAX = 32 << 20
"""Of the batches under way; a single batch may be larger."""

INTERRUPTED_S = 5.0
"""How long an interrupted run waits for outstanding answers."""

_PLACE = re.compile(r"messages\[(\d+)\]\.?")


class _Flight(NamedTuple):
    batch: Batch
    task: asyncio.Task[list[Published]]


class LinePublisher:
    """Publishes the lines of a reader.

    Attributes:
        durable_count: Lines from the start of the file, skipped ones included, that are certainly
            durable; later ones may be too.
    """

    def __init__(
        self, client: Client, reader: LineReader, run: Run, on_durable: Callable[[int], None]
    ) -> None:
        """Start where the reader is; `on_durable` gets the bytes of the file made durable."""
        self.durable_count = reader.position
        self._client = client
        self._reader = reader
        self._run = run
        self._on_durable = on_durable
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
        request_id = self._run.request_id(batch)
        publish = self._client.publish_batch(
            batch.messages, request_id=request_id, shard=self._run.shard(request_id)
        )
        self._flights.append(_Flight(batch, asyncio.create_task(publish)))

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
            self._on_durable(batch.source_bytes)

    async def _settle(self, seconds: float | None) -> None:
        """Wait for the batches under way, so that the count is as high as it can be."""
        tasks = [flight.task for flight in self._flights]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self._count()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
