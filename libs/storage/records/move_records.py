"""A queue on its way to another broker shard, as each of the two has it until that is over.

    move 0x5D   | stage u8 | number u64 | other shard u16 | revision u64
                | config: length u32, bytes | state: length u32, bytes | replay: length u32, bytes |

Little-endian. The number is that of the name's claim that put the queue on the shard that it
leaves. The revision is that at which the queue left; 0 where it arrives. Where it leaves, or has
left, its records stay where they are, and the last three are empty; where it arrives, they are
those records as they were stored at the source.
"""

from enum import IntEnum
from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader

_FIXED = Fixed(stage="B", number="Q", shard="H", revision="Q")
_LENGTH = Fixed(length="I")


class MoveStage(IntEnum):
    LEAVING = 1
    """On the source, from the departure on."""
    COPYING = 2
    """On the target, while rows come."""
    COPIED = 3
    """On the target, with all rows: it has the queue once the claim of the name says so."""
    ARRIVED = 4
    """On the source, from when it knows that the target has the queue, until its rows may go."""


class MoveRecord(NamedTuple):
    stage: MoveStage
    number: int
    shard: int
    revision: int = 0
    config: bytes = b""
    state: bytes = b""
    replay: bytes = b""

    @property
    def is_departure(self) -> bool:
        """Whether it is the record of the source, which has the records of the queue beside it."""
        return self.stage in (MoveStage.LEAVING, MoveStage.ARRIVED)


def encode_move(move: MoveRecord) -> bytes:
    parts = [_FIXED.pack(*move[:4])]
    for part in move[4:]:
        parts += (_LENGTH.pack(len(part)), part)
    return b"".join(parts)


def decode_move(data: bytes) -> MoveRecord:
    reader = Reader("move", data)
    stage, number, shard, revision = reader.fixed("numbers", _FIXED)
    parts = [
        reader.take(name, reader.fixed(f"length of {name}", _LENGTH)[0])
        for name in ("config", "state", "replay")
    ]
    reader.finish()
    try:
        known = MoveStage(stage)
    except ValueError:
        raise reader.corrupt(f"unknown stage {stage}") from None
    return MoveRecord(known, number, shard, revision, *parts)
