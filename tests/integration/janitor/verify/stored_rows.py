"""Rows written to a database as they are, whatever they say of one another."""

from __future__ import annotations

from libs.storage.database.roots import Root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.layout.own_keys import CLOCK_KEY
from libs.storage.records.states import encode_clock

Row = tuple[bytes, bytes | None]


async def write(root: Root, name: str, *rows: Row) -> None:
    """Rows of a database, such as `ingest/0`, and its clock."""
    database = await root.database(name, Kind(name.partition("/")[0]))
    batch = Batch()
    batch.put_all([(CLOCK_KEY, encode_clock(1)), *rows])
    await database.commit(batch)
    await database.close()
