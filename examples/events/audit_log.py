"""Appends each event to a file of its day, as a line of JSON: an audit log.

    audit/2026-02-22.jsonl     {"id": "evt_01KJ2…", "type": "message.published", …}

A line is on the disk before its event is acked, and an event that comes again is in the file of its
day already: so each event is there once, whatever ends this program when. It writes behind the end
only; a line that a crash has cut off is removed at the next start, since its event comes again.
One program writes into a folder at a time.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import slatemq
from examples.events.queues import ATTEMPTS_MAX, ensure_queue, parser
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.events import Event, decode_event, encode_event

BATCH = 1_000

DAYS_OPEN = 3
"""Days whose event IDs are in memory, some 100 bytes each: events of others make it read a file."""


class AuditLog:
    """The files of one folder, as a context manager that closes them."""

    def __init__(self, folder: Path) -> None:
        """Lock it, or raise BlockingIOError where another process has."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._days: dict[str, tuple[BinaryIO, set[str]]] = {}
        self._lock = (folder / ".lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self._lock.close()
            raise

    def append(self, events: Iterable[Event]) -> int:
        """Write what is not there yet; returns how many. On the disk when this returns."""
        new: dict[str, list[Event]] = {}
        for event in events:
            day = _day_of(event)
            _, known = self._open(day)
            if event.id not in known:
                known.add(event.id)
                new.setdefault(day, []).append(event)
        for day, lines in new.items():
            file, _ = self._open(day)
            file.write(b"".join(encode_event(event) + b"\n" for event in lines))
            file.flush()
            os.fsync(file.fileno())
        self._close_old()
        return sum(map(len, new.values()))

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._lock, *(file for file, _ in self._days.values())):
            file.close()

    def _open(self, day: str) -> tuple[BinaryIO, set[str]]:
        if day not in self._days:
            file = (self._folder / f"{day}.jsonl").open("a+b")
            known = _repair(file)
            # A program that was killed may have written lines, and the file, without syncing them.
            os.fsync(file.fileno())
            _sync_folder(self._folder)
            self._days[day] = file, known
        return self._days[day]

    def _close_old(self) -> None:
        while len(self._days) > DAYS_OPEN:
            file, _ = self._days.pop(min(self._days))
            file.close()


def _repair(file: BinaryIO) -> set[str]:
    """Remove a line that has no end; returns the IDs of the others."""
    file.seek(0)
    known, end = set[str](), 0
    for line in file:
        if not line.endswith(b"\n"):
            file.truncate(end)
            break
        known.add(decode_event(line).id)
        end += len(line)
    return known


def _day_of(event: Event) -> str:
    return datetime.fromisoformat(event.timestamp).astimezone(UTC).date().isoformat()


def _sync_folder(folder: Path) -> None:
    """So that a new file is still there after a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def run(endpoint: str, queue_id: str, prefix: str, folder: Path) -> None:
    """Append until ended."""
    with AuditLog(folder) as log:
        await _consume(endpoint, queue_id, prefix, log)


async def _consume(endpoint: str, queue_id: str, prefix: str, log: AuditLog) -> None:
    async with slatemq.connect(endpoint) as client:
        await ensure_queue(client, queue_id, prefix, [], max_attempts=ATTEMPTS_MAX)
        async with client.consume_batches(queue_id, BATCH) as batches:
            async for batch in batches:
                async with batch:  # leaving acks; a full disk nacks, and ends this program
                    await asyncio.to_thread(log.append, await _events_of(batch))


async def _events_of(batch: slatemq.Batch) -> list[Event]:
    events = []
    for message in batch:
        try:
            events.append(decode_event(message.payload))
        except InvalidArgument as error:
            await message.fail(f"not an event: {error}")
    return events


def main() -> None:
    """The command."""
    flags = parser("audit_log", __doc__, "audit-log")
    flags.add_argument("folder", type=Path, help="where the files are")
    given = flags.parse_args()
    try:
        asyncio.run(run(given.endpoint, given.queue, given.prefix, given.folder))
    except BlockingIOError:
        sys.exit(f"audit_log: another process writes into {given.folder}")
    except SlateMQError as error:
        sys.exit(f"audit_log: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
