"""Payload objects, and what names them: tasks that find the objects that nothing names.

An upload that was never committed leaves an object, and so does a crash between a commit and the
deletion that follows it. Payload records name objects, and so do rows of outboxes and refused
pushes. A push moves from an outbox to an ingest, so the ingests are read before and after the
brokers. No commit names an object that is older than an hour, so nothing will ever name one that is
older than a day and was not named then.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from libs.storage.database.blobs import FOLDER, Blobs
from libs.storage.database.roots import open_root
from libs.storage.database.snapshots import SnapshotReader
from libs.storage.layout.keys import LAST_NUMBER, through
from libs.storage.layout.own_keys import outbox_key, refused_push_range
from services.janitor.jobs.batches import counts_batch
from services.janitor.jobs.contents import Contents
from services.janitor.jobs.owners import owners_of
from services.janitor.snapshots import SnapshotName, opened

FOLDERS: Final = 256
"""Of blobs: two hexadecimal digits."""

_OBJECTS: Final = pa.schema(
    [
        ("uri", pa.string()),
        ("modified_at", pa.timestamp("us", tz="UTC")),
        ("size_bytes", pa.int64()),
    ]
)
_URIS: Final = pa.schema([("uri", pa.string())])

_OUTBOXES: Final = through(outbox_key(0, 0), outbox_key(LAST_NUMBER, LAST_NUMBER))
_PATH: Final = re.compile(FOLDER.encode() + rb"/[0-9a-f]{2}/[0-9a-f]{62}")


def stored_objects(spark: SparkSession, root: str) -> DataFrame:
    """All payload objects: uri, modified_at, size_bytes."""
    folders = spark.range(FOLDERS).selectExpr("lower(lpad(hex(id), 2, '0')) AS folder")
    return folders.mapInArrow(_Listing(root), from_arrow_schema(_OBJECTS))


def named_by_messages(messages: DataFrame, root: str, names: Sequence[SnapshotName]) -> DataFrame:
    """The URIs that the payload records of these messages name: uri."""
    return messages.mapInArrow(_MessageUris(root, tuple(names)), from_arrow_schema(_URIS))


def named_by_pushes(spark: SparkSession, root: str, names: Sequence[SnapshotName]) -> DataFrame:
    """The URIs that the outboxes and refused pushes of these brokers name: uri."""
    brokers = [(name.database, name.snapshot_id) for name in names if name.service == "broker"]
    frame = spark.createDataFrame(brokers, "database string, snapshot_id string")
    return frame.repartition(max(1, len(brokers))).mapInArrow(
        _PushUris(root), from_arrow_schema(_URIS)
    )


@dataclass(frozen=True)
class _Listing:
    root: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        root = open_root(self.root)
        blobs = Blobs(root)
        for batch in batches:
            for folder in batch["folder"].to_pylist():
                infos = asyncio.run(root.objects.describe(f"{FOLDER}/{folder}"))
                found = [
                    {
                        "uri": info.path,
                        "modified_at": info.modified_ms * 1000,
                        "size_bytes": info.size_bytes,
                    }
                    for info in infos
                    if blobs.owns(info.path)
                ]
                yield pa.RecordBatch.from_pylist(found, schema=_OBJECTS)


@dataclass(frozen=True)
class _MessageUris:
    root: str
    names: tuple[SnapshotName, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with owners_of(self.root) as owners:
            contents = Contents(owners, self.names)
            for batch in batches:
                uris = contents.uris(batch["message_id"].to_pylist())
                yield pa.RecordBatch.from_pydict({"uri": uris}, schema=_URIS)
            contents.close()


@dataclass(frozen=True)
class _PushUris:
    root: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                uris = asyncio.run(self._read(SnapshotName(**row)))
                yield pa.RecordBatch.from_pydict({"uri": uris}, schema=_URIS)

    async def _read(self, name: SnapshotName) -> list[str]:
        root = open_root(self.root)
        async with opened(root, name) as reader:
            return [path async for path in _pushed_paths(reader)]


@dataclass(frozen=True)
class ObjectRemoval:
    """Deletes objects: rows of `uri`, `size_bytes`."""

    root: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts: Counter[str] = Counter()
        blobs = Blobs(open_root(self.root))
        for batch in batches:
            asyncio.run(_delete_all(blobs, batch["uri"].to_pylist()))
            counts["objects_removed"] += batch.num_rows
            counts["object_bytes"] += sum(batch["size_bytes"].to_pylist())
        yield counts_batch(counts)


async def _delete_all(blobs: Blobs, uris: Sequence[str]) -> None:
    for start in range(0, len(uris), 32):
        await asyncio.gather(*(blobs.delete(uri) for uri in uris[start : start + 32]))


async def _pushed_paths(reader: SnapshotReader) -> AsyncIterator[str]:
    """Whatever looks like the path of an object: a damaged row may name it, too."""
    for span in (_OUTBOXES, refused_push_range()):
        async for rows in reader.scan(*span):
            for _, value in rows:
                for path in _PATH.findall(value):
                    yield path.decode()
