"""The archive of dead letters: what brokers list as archived has its content there."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from libs.storage.database.roots import Root
from libs.storage.errors import ObjectNotFound
from libs.storage.objects.small_objects import ObjectInfo, Objects
from services.janitor.archive_paths import day_path, is_part
from services.janitor.verify.brokers import ArchivedMessages, DayOfArchive
from services.janitor.verify.findings import Findings, Kind
from services.janitor.verify.ingests import IDS_NAMED, named_ids

LOOKS: Final = 3
"""A part may be absorbed by another while it is read, and a read may fail while the store is up:
then the folder is looked at again."""

READER: Final = "services.janitor.verify.parquet_parts"
NEEDED: Final = ("numpy", "pyarrow")
"""Packages that read parts; without them, only their frames are looked at."""

_MARK: Final = b"PAR1"
"""Begins and ends a file of Parquet; before its last one are four bytes, the footer's length."""

_ADVICE: Final = (
    "restore the folder from the store's versions or a copy; else the broker still lists these "
    "dead letters, and they come back without their content. Purge the queue's archived ones to "
    "give them up"
)


@dataclass
class _Look:
    """What the parts of a day came to.

    Attributes:
        missing: Messages that no part has; those of the day, where there is none at all.
        damaged: Parts that cannot be read, with the reason.
    """

    missing: list[int]
    damaged: dict[str, str]


@dataclass
class ArchiveCheck:
    """Verifies the content of archived dead letters.

    Attributes:
        report: Called with the path of each part before it is read; what it raises ends `check`.
    """

    root: Root
    findings: Findings
    check_store: Callable[[], Awaitable[None]]
    sizes_only: bool = False
    report: Callable[[str], None] = lambda _path: None

    async def check(self, shard: str, archived: ArchivedMessages) -> None:
        """Raises StoreUnavailable."""
        for number, day in archived.days.items():
            path = day_path(archived.queue, date(1970, 1, 1) + timedelta(days=number))
            self.findings.counts["archived"] += len(day.message_ids)
            look = await self._look_until_stable(path, day)
            wrong = [f"{part} is damaged: {why}" for part, why in look.damaged.items()]
            if look.missing:
                count = len(look.missing)
                where = f"{path} has no content of {count} archived dead letters"
                wrong.append(f"{where}: {named_ids(look.missing)}")
            for one in wrong:
                self.findings.add(
                    Kind.OBJECT,
                    shard,
                    "archived messages",
                    f"queue {archived.queue}",
                    one,
                    advice=_ADVICE,
                    queue_id=archived.queue,
                    message_ids=look.missing[:IDS_NAMED],
                )

    async def _look_until_stable(self, path: str, day: DayOfArchive) -> _Look:
        parts, was_damaged = await self._parts(path), False
        for _ in range(LOOKS):
            look = await self._look(parts, day)
            if not look.missing and not look.damaged:
                break
            before, parts = parts, await self._parts(path)
            if parts == before and (was_damaged or not look.damaged):
                break
            was_damaged = bool(look.damaged)
        return look

    async def _parts(self, path: str) -> list[ObjectInfo]:
        return [info for info in await self.root.objects.describe(path) if is_part(info)]

    async def _look(self, parts: Sequence[ObjectInfo], day: DayOfArchive) -> _Look:
        unseen: Any = None
        if parts and all(find_spec(name) for name in NEEDED):
            reader = await asyncio.to_thread(import_module, READER)
            unseen = await asyncio.to_thread(reader.Unseen, day.message_ids, day.failed_ms)
        damaged: dict[str, str] = {}
        for info in parts:
            self.report(info.path)
            try:
                if unseen:
                    is_whole = not self.sizes_only
                    await asyncio.to_thread(unseen.see, self.root.objects, info.path, is_whole)
                else:
                    await asyncio.to_thread(_check_frame, self.root.objects, info.path)
            except (ObjectNotFound, OSError) as error:
                await self.check_store()
                damaged[info.path] = str(error)
        if unseen:
            return _Look(unseen.message_ids, damaged)
        return _Look([] if parts else sorted(day.message_ids), damaged)


def _check_frame(objects: Objects, path: str) -> None:
    """Raises OSError where a part is not whole; ObjectNotFound."""
    with objects.open(path) as file:
        begin = file.read(len(_MARK))
        file.seek(-len(_MARK), io.SEEK_END)
        if (begin, file.read()) != (_MARK, _MARK):
            raise OSError("it is not a whole file of Parquet")
