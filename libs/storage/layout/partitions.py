"""Which partition of a queue gets a message: by the value of a header, else by the message's ID.

    hash of a value   the first 8 bytes of the SHA-256 of its UTF-8 bytes, as a big-endian number
    hash of an ID     ID × 0x9E3779B97F4A7C15 modulo 2^64
    partition         hash × count / 2^64, rounded down

Messages lie in partitions by this rule, so it never changes. IDs in a row, and every n-th ID,
spread evenly: the factor is 2^64 divided by the golden ratio.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

FACTOR: Final = 0x9E3779B97F4A7C15
BITS: Final = 64
MASK: Final = (1 << BITS) - 1

VALUES_KEPT: Final = 65_536
"""Header values whose hashes are kept: a hash takes as long as routing a message does."""


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of a queue: its index, and what decides what it gets.

    Attributes:
        index: From 0.
        count: How many partitions the queue has.
        ordering_header: Messages with the same value of this header are in one partition; empty:
            all are spread by their IDs, as those without the header are.
    """

    index: int
    count: int
    ordering_header: str = ""

    def select(self, message_ids: Sequence[int], headers: Mapping[str, str]) -> Sequence[int]:
        """Those of some messages, which all have these headers, that are in this partition."""
        value = headers.get(self.ordering_header) if self.ordering_header else None
        if value is not None:
            return message_ids if partition_of_value(value, self.count) == self.index else ()
        # The hashes of a partition are those from one bound up to the next one.
        first = -(-(self.index << BITS) // self.count)
        last = -(-((self.index + 1) << BITS) // self.count) - 1
        return [one for one in message_ids if first <= one * FACTOR & MASK <= last]

    def text(self) -> str:
        """The stored form: `<index> <count> <ordering header>`."""
        return f"{self.index} {self.count} {self.ordering_header}"

    @classmethod
    def parse(cls, text: str) -> Partition:
        """A partition from its stored form. Raises ValueError."""
        index, count, header = text.split(" ", 2)
        found = cls(int(index), int(count), header)
        if not 0 <= found.index < found.count:
            raise ValueError(f"there is no partition {found.index} of {found.count}")
        return found


@lru_cache(VALUES_KEPT)
def partition_of_value(value: str, count: int) -> int:
    """The partition of messages with this value of the ordering header."""
    digest = hashlib.sha256(value.encode()).digest()
    return int.from_bytes(digest[:8], "big") * count >> BITS
