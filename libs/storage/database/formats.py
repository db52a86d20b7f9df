"""The format of a database: one number for all layouts of its records, written when it is made.

Most changes of a record are refused by older readers without help. A change that they would misread
raises FORMAT, and then every reader and writer refuses a database of another format.
"""

from __future__ import annotations

from typing import Final

from libs.storage.database.slate import Batch, Database
from libs.storage.errors import OtherFormat
from libs.storage.layout.own_keys import FORMAT_KEY
from libs.storage.records.states import decode_format, encode_format

FORMAT: Final = 6

_FIRST_KEY: Final = b"\x00"
_BEHIND_KEYS: Final = b"\xff"


def check_format(value: bytes | None, what: str) -> None:
    """Raise OtherFormat unless this format record of `what` has FORMAT."""
    if value is None:
        raise OtherFormat(
            f"{what} has records and no format: it was written before 0.1. Export its messages "
            "with the version that wrote it, or give another root"
        )
    number = decode_format(value)
    if number != FORMAT:
        raise OtherFormat(
            f"{what} has format {number}, and this version of SlateMQ reads format {FORMAT} alone: "
            "run the version that wrote it, or give another root"
        )


async def settle_format(database: Database, what: str) -> None:
    """Write the format into a new database. Raises OtherFormat for a database of another format."""
    value = await database.get(FORMAT_KEY)
    if value is None and await _is_empty(database):
        batch = Batch()
        batch.put(FORMAT_KEY, encode_format(FORMAT))
        await database.write(batch)  # The log keeps the order: durable before any other record.
        return
    check_format(value, what)


async def _is_empty(database: Database) -> bool:
    async for _ in database.scan(_FIRST_KEY, _BEHIND_KEYS, limit=1):
        return False
    return True
