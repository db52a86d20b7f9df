"""The format of a database: one number for all layouts of its records, written when it is made.

Records grow in ways that older readers stop at or refuse by themselves. A change that they would
misread without noticing raises FORMAT; then every reader and writer refuses what it does not know.
"""

from __future__ import annotations

from typing import Final

from libs.storage.database.slate import Batch, Database
from libs.storage.errors import OtherFormat
from libs.storage.layout.own_keys import FORMAT_KEY
from libs.storage.records.states import decode_format, encode_format

__all__ = ["FORMAT", "check_format", "settle_format"]

FORMAT: Final = 1

_FIRST_KEY: Final = b"\x00"
_BEHIND_KEYS: Final = b"\xff"


def check_format(value: bytes | None, what: str) -> None:
    """Raises OtherFormat unless the format record of `what` names the one that is read here."""
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
    """Writes the format into a database without records. Raises OtherFormat for one of another."""
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
