"""A database says which format it has and whose it is, and no one reads one of another."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from libs.storage.database.formats import FORMAT
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import CorruptRecord, LostDatabase, OtherFormat, StorageError
from libs.storage.layout.own_keys import CLOCK_KEY, FORMAT_KEY
from libs.storage.records.states import FormatRecord, encode_clock, encode_format

NEWER = encode_format(FormatRecord(FORMAT + 1, "broker/0"))
OLDER = struct.pack("<I", FORMAT - 1)
EXCHANGED = encode_format(FormatRecord(FORMAT, "broker/1"))

OTHERS = [
    (NEWER, OtherFormat, rf"format {FORMAT + 1}, and .* reads format {FORMAT}"),
    (OLDER, OtherFormat, rf"format {FORMAT - 1}, and .* reads format {FORMAT}"),
    (EXCHANGED, LostDatabase, "broker/0 below .* has the records of broker/1: folders were"),
    (None, OtherFormat, "no format: it was written before 0.1"),
    (b"\x01", CorruptRecord, "format"),
]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root(tmp_path.as_uri())


async def stored(root: Root, value: bytes | None) -> str:
    """A database with records and this format; gives a snapshot of it."""
    database = await root.database("broker/0", Kind.BROKER)
    batch = Batch()
    batch.put(CLOCK_KEY, encode_clock(1))
    if value is None:
        batch.delete(FORMAT_KEY)
    else:
        batch.put(FORMAT_KEY, value)
    await database.commit(batch)
    snapshot = await root.snapshots(database).take(60_000)
    await database.close()
    return snapshot


async def test_a_new_database_gets_the_format_with_its_first_record_and_keeps_it(
    root: Root,
) -> None:
    database = await root.database("ingest/0", Kind.INGEST)
    batch = Batch()
    batch.put(CLOCK_KEY, encode_clock(1))
    await database.commit(batch)
    written = encode_format(FormatRecord(FORMAT, "ingest/0"))
    assert await database.get(FORMAT_KEY, durable=True) == written
    await database.close()

    again = await root.database("ingest/0", Kind.INGEST)
    assert await again.get(FORMAT_KEY, durable=True) == written
    await again.close()


async def test_a_database_without_records_may_be_closed_and_taken_again(root: Root) -> None:
    for _ in range(2):
        await (await root.database("ingest/0", Kind.INGEST)).close()


@pytest.mark.parametrize(("value", "error", "words"), OTHERS)
async def test_another_format_is_refused_at_every_opening(
    root: Root, value: bytes | None, error: type[StorageError], words: str
) -> None:
    snapshot = await stored(root, value)
    for _ in range(2):
        with pytest.raises(error, match=words):
            await root.database("broker/0", Kind.BROKER)
        with pytest.raises(error, match=words):
            await root.open_snapshot("broker/0", snapshot)
