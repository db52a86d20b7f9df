"""The archive of dead letters: Parquet below the root, by queue and day, in parts.

    archive/dead-letters/queue=orders/day=2026-01-31/part-000003.parquet

A folder is a log of parts: a part is only added under the number after the highest, and only if it
is absent. A janitor adds once it has read which dead letters the others hold; where another was
faster, it reads again. So no dead letter is there twice, whichever process is killed, and however
many janitors run.

A small part is put together with what is new: the new part says which ones it absorbs, and those
are emptied. Until they are, their dead letters can be seen twice; after a crash the next run
empties them. An empty part keeps its number taken for a day, so that a janitor that listed before
does not take it for free; then the job `unreferenced` removes it.

The pages of a part have checksums, which every read compares. A part that is damaged stays as it
is, for people to bring back from a copy: what is read of it is not absorbed, nor emptied.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from libs.storage.errors import ObjectNotFound
from libs.storage.objects.small_objects import ObjectInfo, Objects
from services.janitor.archive_paths import ARCHIVE_FOLDER, day_path, is_part, may_be_empty

log = logging.getLogger(__name__)

PART_BYTES: Final = 64 << 20
"""The size at which a part is added: readers open few files then, and a task holds one. As all
sizes here it is that in memory: files of dead letters that are alike are far smaller."""

SMALL_BYTES: Final = PART_BYTES // 4
"""A part below this is absorbed by the next: so each day has at most one."""

GROUP_BYTES: Final = 8 << 20
"""Of a row group, which a reader holds in memory."""

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

DEAD_LETTERS: Final = pa.schema(
    [
        pa.field("message_id", pa.int64(), nullable=False),
        pa.field("failed_at", _TIMESTAMP, nullable=False),
        pa.field("broker_shard", pa.int32(), nullable=False),
        pa.field("created_revision", pa.int64(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("priority", pa.int32(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("retention_deadline", _TIMESTAMP),
        pa.field("created_at", _TIMESTAMP),
        pa.field("received_at", _TIMESTAMP),
        pa.field("retention_s", pa.int64()),
        pa.field("direct_queue", pa.string()),
        pa.field("headers", pa.map_(pa.string(), pa.string())),
        pa.field(
            "history",
            pa.list_(
                pa.struct(
                    [
                        ("attempt", pa.int32()),
                        ("consumer", pa.string()),
                        ("claimed_at", _TIMESTAMP),
                        ("outcome", pa.string()),
                        ("failed_in", pa.string()),
                    ]
                )
            ),
        ),
        pa.field("payload_bytes", pa.int64()),
        pa.field("payload", pa.binary()),
        pa.field("run", pa.string(), nullable=False),
    ]
)
"""A dead letter as it is archived; queue and day are in the path.

It has no payload where its ingest had none.
"""

LOOK_S: Final = 3600.0
"""After it, a folder is listed again before a part is added: long before an empty one goes."""

KEY_COLUMNS: Final = ["message_id", "failed_at"]
_ABSORBS: Final = b"slatemq.absorbs"
_BYTES: Final = b"slatemq.bytes"

T = TypeVar("T")


class Waits(Protocol):
    def run(self, work: Awaitable[T]) -> T:
        """Wait for the store."""


UNREADABLE: Final = (ObjectNotFound, OSError)
"""What reading a part raises that is not there any more, or changes, or is damaged."""

SILENCE_S: Final = 60.0
"""A store that does not answer for this long is down."""


class DayFolder:
    """The parts of one queue and day.

    Attributes:
        path: Where they are.
        added: Paths of those that were added.
        damaged: Paths of those that cannot be read, each with the reason.
    """

    def __init__(self, waits: Waits, objects: Objects, queue: str, day: date) -> None:
        """Lists and reads the parts. Raises StorageError."""
        self.path = day_path(queue, day)
        self.added: list[str] = []
        self.damaged: dict[str, str] = {}
        self._waits = waits
        self._objects = objects
        self._parts: list[ObjectInfo] = []
        self._known: dict[str, pa.Table] = {}
        self._bytes: dict[str, int] = {}
        self._last_number = 0
        self._look()

    def missing(self, dead_letters: pa.Table) -> pa.Table:
        """The dead letters that no part has, those aside that are damaged."""
        return dead_letters.filter(pa.array(~self._has(dead_letters)))

    def archived(self, dead_letters: pa.Table) -> pa.Table:
        """The others: those that a part has."""
        return dead_letters.filter(pa.array(self._has(dead_letters)))

    def _has(self, dead_letters: pa.Table) -> npt.NDArray[np.bool_]:
        whole = [keys_of(keys) for path, keys in self._known.items() if path not in self.damaged]
        return np.isin(keys_of(dead_letters), np.concatenate([*whole, _NO_KEYS]))

    def add(self, dead_letters: pa.Table) -> None:
        """Add the dead letters that no part has; durable on return. Raises StorageError."""
        while True:
            if time.monotonic() - self._looked_at > LOOK_S:
                self._look()
            dead_letters = self.missing(dead_letters)
            if not dead_letters.num_rows:
                return
            small = [part for part in self._parts if self._bytes[part.path] < SMALL_BYTES]
            read = {part.path: self._if_whole(part.path, self._read) for part in small}
            small = [part for part in small if read[part.path] is not None]
            # In the order of their failures, so that readers of a time pass over row groups.
            whole = pa.concat_tables([*(read[part.path] for part in small), dead_letters])
            data = _encode(whole.sort_by("failed_at"), [_name(part) for part in small])
            path = f"{self.path}/part-{self._last_number + 1:06}.parquet"
            added = self._waits.run(self._objects.put_if_absent(path, data))
            if added:
                self.added.append(path)
                self._empty(small)
            self._look()
            if added:
                return

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        listed = self._waits.run(self._objects.describe(self.path))
        parts = [info for info in listed if is_part(info)]
        absorbed: set[str] = set()
        self._known = {}
        for info in parts:
            keys = self._if_whole(info.path, lambda path: self._keys_of(path, absorbed))
            if keys is not None:
                self._known[info.path] = keys
        empty = {path for path, keys in self._known.items() if not keys.num_rows}
        there = [info for info in parts if info.path not in empty]
        # Left by a process that was killed before it emptied them.
        self._empty([info for info in there if _name(info) in absorbed])
        self._parts = [
            info for info in there if _name(info) not in absorbed and info.path not in self.damaged
        ]
        names = [_name(info).removeprefix("part-").removesuffix(".parquet") for info in parts]
        self._last_number = max(map(int, names), default=0)

    def _if_whole(self, path: str, read: Callable[[str], T]) -> T | None:
        """What is read of a part; None if it is damaged. Raises StorageError.

        One that is emptied while it is read looks damaged, once.
        """
        for is_last in (False, True):
            try:
                return read(path)
            except OSError as error:
                self._waits.run(self._objects.check(SILENCE_S))
                if is_last:
                    self._note_damage(path, error)
        return None

    def _note_damage(self, path: str, error: Exception) -> None:
        if path not in self.damaged:
            log.error("%s is damaged: %s", path, error)
        self.damaged[path] = str(error)

    def _keys_of(self, path: str, absorbed: set[str]) -> pa.Table:
        with _opened(self._objects, path) as part:
            noted = part.schema_arrow.metadata or {}
            keys = part.read(columns=KEY_COLUMNS).select(KEY_COLUMNS)
            absorbed.update(json.loads(noted.get(_ABSORBS, b"[]")))
            self._bytes[path] = int(noted.get(_BYTES, PART_BYTES))
            return keys

    def _read(self, path: str) -> pa.Table:
        with _opened(self._objects, path) as part:
            return part.read().cast(DEAD_LETTERS)

    def _empty(self, parts: Iterable[ObjectInfo]) -> None:
        for part in parts:
            self._waits.run(self._objects.put(part.path, _encode(DEAD_LETTERS.empty_table(), ())))
            self.damaged.pop(part.path, None)

    def rows_of(self, wanted: pa.Table, columns: Sequence[str]) -> Iterable[pa.Table]:
        """The rows with the keys of `wanted` and these columns, a row group at a time.

        Each once. Parts that are damaged are in `damaged` then. Raises StorageError.
        """
        keys = keys_of(wanted)
        for is_last in (False, True):
            failures: dict[str, Exception] = {}
            for path, known in self._known.items():
                if not np.isin(keys_of(known), keys).any():
                    continue
                try:
                    for rows in _rows_with(self._objects, path, keys, [*KEY_COLUMNS, *columns]):
                        keys = keys[~np.isin(keys, keys_of(rows))]
                        yield rows
                except UNREADABLE as error:
                    self._waits.run(self._objects.check(SILENCE_S))
                    failures[path] = error
            if not failures:
                return
            if is_last:
                for path, failure in failures.items():
                    self._note_damage(path, failure)
            else:
                self._look()  # Another part has absorbed it, perhaps.


async def emptied_parts(objects: Objects, before_ms: int) -> list[ObjectInfo]:
    """The parts of all queues and days that were emptied before this time. Raises StorageError."""
    found: list[ObjectInfo] = []
    for folder in await objects.folders(ARCHIVE_FOLDER):
        for info in await objects.describe(folder):
            is_old = may_be_empty(info) and info.modified_ms < before_ms
            if is_old and await asyncio.to_thread(_is_empty, objects, info.path):
                found.append(info)
    return found


def _is_empty(objects: Objects, path: str) -> bool:
    try:
        with _opened(objects, path) as part:
            return int(part.metadata.num_rows) == 0
    except UNREADABLE:
        return False  # Gone, or damaged: that stays as it is.


SOME: Final = 1_000
"""Dead letters that become Python objects together."""


def dead_letters_of(
    objects: Objects, path: str, wanted: Collection[tuple[int, int]]
) -> Iterator[list[dict[str, Any]]]:
    """The wanted dead letters of a part, some at a time. Blocks: for a thread.

    `wanted` names them by message and failure in ms. Raises the errors of UNREADABLE, at the end
    where a part is damaged: what can be read of it comes before.
    """
    keys = np.array([(message_id, failed_ms * 1000) for message_id, failed_ms in wanted], KEY)
    for chosen in _rows_with(objects, path, keys):
        for start in range(0, chosen.num_rows, SOME):
            yield chosen.slice(start, SOME).to_pylist()


def _rows_with(
    objects: Objects, path: str, keys: npt.NDArray[Any], columns: list[str] | None = None
) -> Iterator[pa.Table]:
    """The rows of a part that have these keys, of the row groups that have any.

    Row groups behind a damaged one come too, before its error is raised.
    """
    failed: Exception | None = None
    with _opened(objects, path) as part:
        for group in range(part.num_row_groups):
            try:
                there = np.isin(keys_of(part.read_row_group(group, columns=KEY_COLUMNS)), keys)
                if not there.any():
                    continue
                rows = part.read_row_group(group, columns=columns).filter(pa.array(there))
            except (OSError, pa.ArrowException, KeyError) as error:
                failed = failed or error
                continue
            yield rows
        if failed is not None:
            raise failed


@contextmanager
def _opened(objects: Objects, path: str) -> Iterator[pq.ParquetFile]:
    """A part, whose pages are compared with their checksums as they are read.

    Raises ObjectNotFound; OSError where it is damaged, or the store is down.
    """
    with objects.open(path) as file:
        try:
            yield pq.ParquetFile(file, page_checksum_verification=True)
        except (pa.ArrowException, ValueError, KeyError) as error:
            raise OSError(str(error)) from error


KEY: Final = np.dtype([("message_id", "<i8"), ("failed_at", "<i8")])
_NO_KEYS: Final = np.empty(0, KEY)


def keys_of(dead_letters: pa.Table) -> npt.NDArray[Any]:
    """The keys of dead letters of one queue: the message, and when it failed."""
    keys = np.empty(dead_letters.num_rows, KEY)
    keys["message_id"] = dead_letters["message_id"].to_numpy()
    keys["failed_at"] = dead_letters["failed_at"].cast(pa.int64()).to_numpy()
    return keys


def _encode(dead_letters: pa.Table, absorbs: Sequence[str]) -> bytes:
    notes = {_ABSORBS: json.dumps(absorbs), _BYTES: str(dead_letters.nbytes)}
    table = dead_letters.replace_schema_metadata(notes)
    rows = max(1, dead_letters.num_rows * GROUP_BYTES // max(dead_letters.nbytes, 1))
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=rows, compression="zstd", write_page_checksum=True)
    return out.getvalue()


def _name(part: ObjectInfo) -> str:
    return part.path.rpartition("/")[2]
