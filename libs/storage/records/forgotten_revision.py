"""The value of a forgotten revision record: up to where a broker has forgotten deleted queues.

    forgotten revision 0x59 | config revision u64 |

Little-endian. Written in the batch that deletes the last row of a deleted queue: the highest config
revision of such a deletion. No row: none is forgotten.
"""

from libs.storage.layout.primitives import Fixed, Reader

_U64 = Fixed(revision="Q")


def encode_forgotten_revision(revision: int) -> bytes:
    """Forgotten revision value; ValueError when the number does not fit."""
    return _U64.pack(revision)


def decode_forgotten_revision(data: bytes) -> int:
    """Forgotten revision value; CorruptRecord when it is not one."""
    reader = Reader("forgotten revision", data)
    revision = reader.number("revision", "Q")
    reader.finish()
    return revision
