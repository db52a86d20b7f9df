"""Where each running lease lies, by its token.

A token is a block and a place in it. A large claim gets blocks of its own, so that a thousand
leases take five entries here, and one comparison recognizes an ack of a whole block::

    token   | block: 56 random bits | place: 8 bits |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from typing import Final, NamedTuple

from services.broker.core.leases.lease_bucket import LeaseBucket

PLACE_BITS: Final = 8
"""A block has at most 256 tokens."""


class LeaseGroup(NamedTuple):
    """Leases of one bucket that end together; no bucket: they do not run."""

    bucket: LeaseBucket | None
    tokens: Sequence[int]
    whole: bool
    """Whether they are all that the block ever had."""


class LeaseIndex:
    """The running leases of a shard, by token."""

    def __init__(self) -> None:
        self._blocks: dict[int, LeaseBucket] = {}
        self._left: dict[int, int] = {}  # by block: how many of its leases run
        self._in_blocks = 0  # the sum of these
        self._singles: dict[int, LeaseBucket] = {}  # by token: those outside of blocks

    def __len__(self) -> int:
        return len(self._singles) + self._in_blocks

    def add(self, bucket: LeaseBucket, tokens: Sequence[int]) -> None:
        """Adds leases of a bucket: all of them, if it is a block."""
        if bucket.is_block:
            block = tokens[0] >> PLACE_BITS
            self._blocks[block], self._left[block] = bucket, len(tokens)
            self._in_blocks += len(tokens)
        else:
            self._singles.update(dict.fromkeys(tokens, bucket))

    def is_free(self, block: int) -> bool:
        """Whether a block is unused, as it is in all but one of 10^11 cases."""
        return block not in self._blocks and block << PLACE_BITS not in self._singles

    def find(self, token: int) -> LeaseBucket | None:
        """Where the lease lies; None if it has ended, or never existed."""
        bucket = self._singles.get(token)
        if bucket is None:
            bucket = self._blocks.get(token >> PLACE_BITS)
            if bucket is not None and not bucket.holds(token):
                return None
        return bucket

    def remove(self, token: int) -> None:
        if self._singles.pop(token, None) is None:
            self._leave(token >> PLACE_BITS, 1)

    def take(self, tokens: Sequence[int]) -> Iterator[LeaseGroup]:
        """Ends leases, in the order given; the caller removes them from their bucket at once."""
        at, count = 0, len(tokens)
        others: list[int] = []
        while at < count:
            block = tokens[at] >> PLACE_BITS
            bucket = self._blocks.get(block)
            if bucket is None:
                others.append(tokens[at])
                at += 1
                continue
            if others:
                # First, since they may be of this block too.
                yield from self._take_each(others)
                others = []
                continue
            taken = _of_block(bucket, tokens, at)
            at += len(taken.tokens)
            if taken.whole or bucket.holds_all(taken.tokens):
                self._leave(block, len(taken.tokens))
                yield taken
            else:
                others += taken.tokens
        yield from self._take_each(others)

    def _take_each(self, tokens: Sequence[int]) -> Iterator[LeaseGroup]:
        buckets: list[LeaseBucket | None] = list(map(self._singles.pop, tokens, repeat(None)))
        end = 0
        for bucket, same in groupby(buckets):
            first, end = end, end + len(list(same))
            if bucket is not None:
                yield LeaseGroup(bucket, tokens[first:end], whole=False)
            else:
                yield from map(self._take_of_block, tokens[first:end])

    def _take_of_block(self, token: int) -> LeaseGroup:
        bucket = self._blocks.get(token >> PLACE_BITS)
        if bucket is None or not bucket.holds(token):
            return LeaseGroup(None, (token,), whole=False)
        self._leave(token >> PLACE_BITS, 1)
        return LeaseGroup(bucket, (token,), whole=False)

    def _leave(self, block: int, count: int) -> None:
        self._left[block] -= count
        self._in_blocks -= count
        if not self._left[block]:
            del self._blocks[block], self._left[block]


def _of_block(bucket: LeaseBucket, tokens: Sequence[int], at: int) -> LeaseGroup:
    whole = bucket.whole
    if whole and tuple(tokens[at : at + len(whole)]) == whole:
        return LeaseGroup(bucket, whole, whole=True)
    block, end = tokens[at] >> PLACE_BITS, at + 1
    while end < len(tokens) and tokens[end] >> PLACE_BITS == block:
        end += 1
    return LeaseGroup(bucket, tokens[at:end], whole=False)


def tokens_of(block: int, count: int) -> range:
    first = block << PLACE_BITS
    return range(first, first + count)
