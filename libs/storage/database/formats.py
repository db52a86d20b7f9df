"""The format of a database: one number for all layouts of its records, and the database's name.

It is written when the database is made, so that a folder which is in another's place is refused:
the numbers of an outbox count for one shard alone.

Most changes of a record are refused by older readers without help. A change that they would misread
raises FORMAT, and then every reader and writer refuses a database of another format.
"""

from __future__ import annotations

from typing import Final

from libs.storage.database.slate import Batch, Database
from libs.storage.errors import LostDatabase, OtherFormat
from libs.storage.layout.own_keys import FORMAT_KEY
from libs.storage.records.states import (
    FormatRecord,
    decode_format,
    decode_format_number,
    encode_format,
)

FORMAT: Final = 7

_FIRST_KEY: Final = b"\x00"
_BEHIND_KEYS: Final = b"\xff"


def check_format(value: bytes | None, name: str, place: str) -> None:
    """Raise OtherFormat unless this format record of a database has FORMAT.

    `name` is the database's, `place` is for messages. Raises LostDatabase where it is another one.
    """
    what = f"{name} below {place}"
    if value is None:
        raise OtherFormat(
            f"{what} has records and no format: it was written before 0.1. Export its messages "
            "with the version that wrote it, or give another root"
        )
    number = decode_format_number(value)
    if number != FORMAT:
        raise OtherFormat(
            f"{what} has format {number}, and this version of SlateMQ reads format {FORMAT} alone: "
            "run the version that wrote it, or give another root"
        )
    written = decode_format(value).database
    if written != name:
        raise LostDatabase(
            f"{what} has the records of {written}: folders were exchanged, or one was mounted or "
            f"restored in the wrong place. Put that of {name} there"
        )


async def settle_format(database: Database, place: str) -> None:
    """Write the format into a new database. Raises as `check_format`, for all others."""
    value = await database.get(FORMAT_KEY)
    if value is None and await _is_empty(database):
        batch = Batch()
        batch.put(FORMAT_KEY, encode_format(FormatRecord(FORMAT, database.name)))
        await database.write(batch)  # The log keeps the order: durable before any other record.
        return
    check_format(value, database.name, place)


async def _is_empty(database: Database) -> bool:
    async for _ in database.scan(_FIRST_KEY, _BEHIND_KEYS, limit=1):
        return False
    return True
