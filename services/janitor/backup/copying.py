"""Copies objects from one root to another, many at a time, those that lack alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from libs.storage.errors import DamagedObject, ObjectNotFound, StorageError, first_raised
from libs.storage.objects.small_objects import Objects
from services.janitor.jobs.contract import JobCancelled

AT_ONCE: Final = 8
"""Objects copied at the same time. Each takes memory for its pieces: some 150 MB in all."""


class Copy(NamedTuple):
    """An object to copy, to a path that may differ; with a digest, nothing else is copied."""

    path: str
    target_path: str
    size_bytes: int
    digest: str = ""


@dataclass
class Copier:
    """Copies from one root to another.

    Attributes:
        there: The objects that the target has, with their sizes; what is copied joins them.
        damaged: The objects that were not copied, since they do not have their digest.
        report: Called with how many of how many are copied.
        cancelled: Set it to end a copy soon: JobCancelled.
        dry_run: Count; write nothing.
    """

    source: Objects
    target: Objects
    there: dict[str, int]
    damaged: list[str] = field(default_factory=list, init=False)
    report: Callable[[int, int], None] = lambda done, count: None
    cancelled: threading.Event = field(default_factory=threading.Event)
    dry_run: bool = False
    copied_count: int = 0
    copied_bytes: int = 0

    async def copy(self, copies: Iterable[Copy]) -> None:
        """Copy those that the target lacks, or has with another size.

        An object that is gone is passed over: `missing` has it then. Raises StoreUnavailable,
        JobCancelled.
        """
        lacking = [one for one in copies if self.there.get(one.target_path) != one.size_bytes]
        remaining, done = iter(lacking), 0
        self.report(0, len(lacking))

        async def work() -> None:
            nonlocal done
            for one in remaining:
                if self.cancelled.is_set():
                    raise JobCancelled("cancelled")
                await self._copy_one(one)
                done += 1
                self.report(done, len(lacking))

        with first_raised(StorageError, JobCancelled):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(AT_ONCE, len(lacking))):
                    tasks.create_task(work())

    async def _copy_one(self, one: Copy) -> None:
        size_bytes = one.size_bytes
        if not self.dry_run:
            try:
                size_bytes = await self.source.copy_to(
                    one.path, self.target, one.target_path, one.digest
                )
            except ObjectNotFound:
                return
            except DamagedObject:
                self.damaged.append(one.path)
                return
        self.there[one.target_path] = size_bytes
        self.copied_count += 1
        self.copied_bytes += size_bytes


async def sizes_below(objects: Objects, folder: str) -> dict[str, int]:
    return {info.path: info.size_bytes for info in await objects.describe(folder)}


def missing(wanted: Iterable[Copy], there: Mapping[str, int]) -> list[str]:
    """The target paths that are not there with the size that they should have."""
    return [one.target_path for one in wanted if there.get(one.target_path) != one.size_bytes]
