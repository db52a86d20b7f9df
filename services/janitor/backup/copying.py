"""Copies objects from one root to another, many at a time, those that lack alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from libs.storage.errors import DamagedObject, ObjectNotFound, StorageError, first_raised
from libs.storage.objects.small_objects import CopiedObject, Objects
from services.janitor.jobs.contract import JobCancelled

AT_ONCE: Final = 8
"""Objects copied at the same time. Each takes memory for its pieces: some 150 MB in all."""

T = TypeVar("T")


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
        digests: Their digests, as far as they are known: no other bytes take their place.
        damaged: The objects that do not have their digest; they are not copied.
        report: Called with how many of how many are copied.
        cancelled: Set it to end a copy soon: JobCancelled.
        dry_run: Count; write nothing.
    """

    source: Objects
    target: Objects
    there: dict[str, int]
    digests: dict[str, str] = field(default_factory=dict)
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
        await each(lacking, self._copy_one, self.report, self.cancelled)

    async def _copy_one(self, one: Copy) -> None:
        size_bytes = one.size_bytes
        if not self.dry_run:
            digest = one.digest or self.digests.get(one.target_path, "")
            try:
                copied = await self._copied(one, digest)
            except ObjectNotFound:
                return
            except DamagedObject:
                self.damaged.append(one.path)
                return
            size_bytes = copied.size_bytes
            self.digests[one.target_path] = copied.digest
        self.there[one.target_path] = size_bytes
        self.copied_count += 1
        self.copied_bytes += size_bytes

    async def _copied(self, one: Copy, digest: str) -> CopiedObject:
        try:
            return await self.source.copy_to(one.path, self.target, one.target_path, digest)
        except DamagedObject:  # A store may give a part of an object that is whole.
            return await self.source.copy_to(one.path, self.target, one.target_path, digest)


async def each(
    items: Sequence[T],
    work: Callable[[T], Awaitable[None]],
    report: Callable[[int, int], None],
    cancelled: threading.Event,
) -> None:
    """Do the work for each item, some at a time. Raises what it raises, and JobCancelled."""
    remaining, done = iter(items), 0
    report(0, len(items))

    async def work_on() -> None:
        nonlocal done
        for one in remaining:
            if cancelled.is_set():
                raise JobCancelled("cancelled")
            await work(one)
            done += 1
            report(done, len(items))

    with first_raised(StorageError, JobCancelled):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(AT_ONCE, len(items))):
                tasks.create_task(work_on())


async def sizes_below(objects: Objects, folder: str) -> dict[str, int]:
    return {info.path: info.size_bytes for info in await objects.describe(folder)}


def missing(wanted: Iterable[Copy], there: Mapping[str, int]) -> list[str]:
    """The target paths that are not there with the size that they should have."""
    return [one.target_path for one in wanted if there.get(one.target_path) != one.size_bytes]
