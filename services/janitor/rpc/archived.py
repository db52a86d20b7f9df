"""Archived dead letters with their content: what their broker lists, joined with the archive.

Only the broker knows which dead letters are archived: a part of the archive also has those that
were restored since. So a window of the list is read, and then the row groups of each part that have
a dead letter of it; memory holds a window without content, and a row group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, date, datetime
from importlib import import_module
from typing import Any, Final

from libs.serving.peers.channels import Channels
from libs.storage.objects.queue_names import QueueNames
from libs.storage.objects.small_objects import Objects
from services.janitor.archive_paths import day_path, is_part
from services.janitor.asking import asking
from services.janitor.spark.packages import check_installed
from slatemq._consume.handles import partition_of_handle
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from slatemq.v1 import entry_pb2, entry_pb2_grpc, queue_pb2
from slatemq.v1.janitor_pb2 import ReadArchivedRequest

log = logging.getLogger(__name__)

WINDOW: Final = 10_000
"""Entries sought in the archive together; without content some megabytes."""

PAGE: Final = 1_000
"""The most that one ListEntries returns."""

ARCHIVE: Final = "services.janitor.jobs.archive"
"""Loaded by the first read of the archive: an idle janitor stays small."""

LOOKS: Final = 3
"""A part may be absorbed while it is read: then another has its dead letters."""

ARCHIVED: Final = queue_pb2.ENTRY_STATE_ARCHIVED

Key = tuple[int, int]
"""Which message, and when it failed, in milliseconds."""


class ArchivedDeadLetters:
    def __init__(self, objects: Objects, channels: Channels) -> None:
        self._objects = objects
        self._names = QueueNames(objects)
        self._channels = channels

    async def read(self, asked: ReadArchivedRequest) -> AsyncGenerator[entry_pb2.Entry, None]:
        """The archived entries, with content.

        Raises SlateMQError, StorageError; Unavailable at the end where parts cannot be read.
        """
        problem: Unavailable | None = None
        async with aclosing(self._listed(asked)) as windows:
            async for window in windows:
                days: dict[date, dict[Key, entry_pb2.Entry]] = {}
                for entry in window:
                    key = (entry.message_id, entry.finished_at_ms)
                    day = datetime.fromtimestamp(entry.finished_at_ms / 1000, UTC).date()
                    days.setdefault(day, {})[key] = entry
                for day, wanted in days.items():
                    try:
                        async with aclosing(self._of_day(asked.queue_id, day, wanted)) as entries:
                            async for entry in entries:
                                yield entry
                    except Unavailable as error:
                        problem = problem or error
        if problem is not None:
            raise problem

    # --- What is archived ---------------------------------------------------

    async def _listed(
        self, asked: ReadArchivedRequest
    ) -> AsyncGenerator[list[entry_pb2.Entry], None]:
        """The entries that the broker lists, a window at a time."""
        if asked.handles:
            yield await self._named(asked)
            return
        left = asked.max_entries or None
        for shard in await self._shards(asked.queue_id):
            window: list[entry_pb2.Entry] = []
            token = ""
            while True:
                size = PAGE if left is None else min(left, PAGE)
                page = await self._page(shard, asked, token, size)
                window.extend(page.entries)
                token = page.next_page_token
                left = None if left is None else left - len(page.entries)
                is_last = not token or left == 0
                if window and (is_last or len(window) >= WINDOW):
                    yield window
                    window = []
                if is_last:
                    break
            if left == 0:
                return

    async def _page(
        self, shard: int, asked: ReadArchivedRequest, token: str, size: int
    ) -> entry_pb2.ListEntriesResponse:
        request = entry_pb2.ListEntriesRequest(
            queue_id=asked.queue_id,
            state=ARCHIVED,
            page_size=size,
            page_token=token,
            view=entry_pb2.ENTRY_VIEW_BASIC,
            finished_from_ms=asked.archived_from_ms,
            finished_until_ms=asked.archived_until_ms,
            newest_first=asked.newest_first,
        )
        with asking("broker", shard):
            stub = entry_pb2_grpc.EntryServiceStub(await self._channels.to("broker", shard))
            return await stub.ListEntries(request)

    async def _shards(self, queue_id: str) -> tuple[int, ...]:
        """The broker shards that have a queue, by partition. Raises NotFound, StorageError."""
        shards = (await self._names.get(queue_id)).broker_shards
        if not shards:
            raise NotFound("queue", queue_id)
        return shards

    async def _named(self, asked: ReadArchivedRequest) -> list[entry_pb2.Entry]:
        """The entries of the handles that are archived."""
        shards = await self._shards(asked.queue_id)
        found = []
        for place, handle in enumerate(asked.handles):
            index = partition_of_handle(handle)
            for shard in shards if index is None else shards[index : index + 1]:
                try:
                    entry = await self._entry(shard, handle)
                except InvalidArgument as error:
                    raise InvalidArgument(f"handles[{place}]", error.description) from error
                except (NotFound, FailedPrecondition):
                    continue
                if entry.state == ARCHIVED:
                    found.append(entry)
        return found

    async def _entry(self, shard: int, handle: str) -> entry_pb2.Entry:
        request = entry_pb2.GetEntryRequest(handle=handle, view=entry_pb2.ENTRY_VIEW_BASIC)
        with asking("broker", shard):
            stub = entry_pb2_grpc.EntryServiceStub(await self._channels.to("broker", shard))
            return (await stub.GetEntry(request)).entry

    # --- What it carried ----------------------------------------------------

    async def _of_day(
        self, queue_id: str, day: date, wanted: dict[Key, entry_pb2.Entry]
    ) -> AsyncGenerator[entry_pb2.Entry, None]:
        """The entries of one day, each once, with what the parts of the archive have of them.

        Raises Unavailable at the end where a part cannot be read that may have the rest.
        """
        check_installed()
        archive = await asyncio.to_thread(import_module, ARCHIVE)
        path = day_path(queue_id, day)
        for look in range(1, LOOKS + 1):
            parts = [info for info in await self._objects.describe(path) if is_part(info)]
            problem = ""
            for part in parts:
                try:
                    reading = archive.dead_letters_of(self._objects, part.path, tuple(wanted))
                    while (some := await asyncio.to_thread(next, reading, None)) is not None:
                        for dead_letter in some:
                            entry = wanted.pop(
                                (dead_letter["message_id"], _ms(dead_letter["failed_at"])), None
                            )
                            if entry is not None:
                                yield _with_content(entry, dead_letter)
                except archive.UNREADABLE as error:
                    problem = problem or str(error)
                if not wanted:
                    return
            if problem:
                if look == LOOKS:
                    raise Unavailable(f"cannot read the archive at {path}: {problem}")
                log.info("%s changed while it was read; reading it again: %s", path, problem)
            elif parts == [info for info in await self._objects.describe(path) if is_part(info)]:
                break
        for entry in wanted.values():
            yield entry


def _with_content(entry: entry_pb2.Entry, dead_letter: dict[str, Any]) -> entry_pb2.Entry:
    entry.reason = dead_letter["reason"]
    for one in dead_letter["history"] or ():
        entry.attempts.add(
            consumer_id=one["consumer"] or "",
            claimed_at_ms=_ms(one["claimed_at"]),
            outcome=one["outcome"] or "",
            queue_id=one["failed_in"] or entry.queue_id,
        )
    if dead_letter["payload"] is not None and dead_letter["headers"] is not None:
        entry.message.message_id = entry.message_id
        entry.message.payload = dead_letter["payload"]
        entry.message.headers.update(dead_letter["headers"])
        entry.message.created_at_ms = _ms(dead_letter["created_at"])
        entry.message.received_at_ms = _ms(dead_letter["received_at"])
        entry.message.retention_s = dead_letter["retention_s"] or 0
    return entry


def _ms(moment: datetime | None) -> int:
    return 0 if moment is None else round(moment.timestamp() * 1000)
