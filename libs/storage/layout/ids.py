"""Message IDs, and the allocator of their sequences.

    Message ID (u64)  | 00 | shard: 14 bits (48-61) | sequence: 48 bits (0-47) |
    SeqBlock          | base sequence u64 BE | block size u64 BE |      big-endian, although a value

A SeqBlock says that the sequences [base, base + size) of this shard may be in use.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from libs.storage.errors import SequenceExhausted
from libs.storage.layout.primitives import Fixed, Reader

SHARD_BITS = 14
SEQUENCE_BITS = 48
# 16,384 ingest shards: far beyond the 1,000 planned for, and the ID stays below 2^62, which keeps
# payload keys (01 01 <ID>) clear of log keys (01 01 "opendata-queue...", so 01 01 6F...).
MAX_SHARD = (1 << SHARD_BITS) - 1
# 2.8 * 10^14 messages per shard: 89 years at 100,000 messages a second.
MAX_SEQUENCE = (1 << SEQUENCE_BITS) - 1
# From 1, so that no message of shard 0 has the ID 0, which stands for "none" in wire formats.
FIRST_SEQUENCE = 1
MAX_MESSAGE_ID = (MAX_SHARD << SEQUENCE_BITS) | MAX_SEQUENCE
# One block record per 2^20 messages; the RFC's 4096 would be a record every few batches.
DEFAULT_BLOCK_SIZE = 1 << 20

_SEQ_BLOCK = Fixed(order=">", base="Q", size="Q")


class SeqBlock(NamedTuple):
    """The sequences [base, base + size)."""

    base: int
    size: int

    @property
    def end(self) -> int:
        return self.base + self.size


def message_id(shard: int, sequence: int) -> int:
    """The ID of message `sequence` of `shard`; ValueError when one is out of bounds."""
    if not 0 <= shard <= MAX_SHARD:
        raise ValueError(f"shard = {shard} is not within 0..{MAX_SHARD}")
    if not FIRST_SEQUENCE <= sequence <= MAX_SEQUENCE:
        raise ValueError(f"sequence = {sequence} is not within {FIRST_SEQUENCE}..{MAX_SEQUENCE}")
    return shard << SEQUENCE_BITS | sequence


def shard_of(message_id: int) -> int:
    """The ingest shard that stores the payload of this message."""
    return message_id >> SEQUENCE_BITS


def sequence_of(message_id: int) -> int:
    return message_id & MAX_SEQUENCE


def runs(numbers: Iterable[int], near: int) -> Iterator[list[int]]:
    """Ascending numbers, split where two are further apart than `near`."""
    run: list[int] = []
    for number in numbers:
        if run and number - run[-1] > near:
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def encode_seq_block(block: SeqBlock) -> bytes:
    return _SEQ_BLOCK.pack(*block)


def decode_seq_block(data: bytes) -> SeqBlock:
    reader = Reader("SeqBlock", data)
    block = SeqBlock(*reader.last("block", _SEQ_BLOCK))
    if not block.size:
        raise reader.corrupt("the block is empty")
    return block


class IdAllocator:
    """Allocates a shard's sequences in ascending order. The caller persists its blocks.

    It starts after the end of the last persisted block, whether or not all of that was used: a
    crash leaves a gap, and no sequence is used twice.
    """

    def __init__(self, last: SeqBlock | None, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if block_size < 1:
            raise ValueError(f"block_size = {block_size} is not positive")
        self._block_size = block_size
        self._next = self._end = last.end if last else FIRST_SEQUENCE

    def allocate(self, count: int) -> tuple[int, SeqBlock | None]:
        """`count` sequences in a row: the first one, and the block to persist with their first use.

        Put the block into the same batch as the messages, or an earlier one. Raises
        SequenceExhausted, and changes nothing, when the shard is full.
        """
        if count < 1:
            raise ValueError(f"count = {count} is not positive")
        first, after = self._next, self._next + count
        if after - 1 > MAX_SEQUENCE:
            raise SequenceExhausted(f"{MAX_SEQUENCE - first + 1} sequences left, {count} wanted")
        self._next = after
        if after <= self._end:
            return first, None
        # Directly after the last block, so that a range may extend over both.
        block = SeqBlock(self._end, max(self._block_size, after - self._end))
        self._end = block.end
        return first, block
