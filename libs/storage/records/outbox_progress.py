"""The value of an outbox progress record: how far ingest has stored a broker shard's outbox.

    outbox progress 0x50   | last number u64 |

Little-endian. The number of the last row that is stored, in the same batch as its message.
"""

from libs.storage.layout.primitives import Fixed, Reader

_U64 = Fixed(last_number="Q")


def encode_outbox_progress(last_number: int) -> bytes:
    """Outbox progress value; ValueError when the number does not fit."""
    return _U64.pack(last_number)


def decode_outbox_progress(data: bytes) -> int:
    """Outbox progress value; CorruptRecord when it is not one."""
    reader = Reader("outbox progress", data)
    last_number = reader.number("last number", "Q")
    reader.finish()
    return last_number
