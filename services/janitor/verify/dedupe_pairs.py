"""Dedupe keys and the rows of their ends: each names the other, until the key's end.

A key that is gone would let its message be stored again; one that no row of ends names would never
be removed. A key that was taken again has a row of ends of each time, of which the last counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import xxhash

from libs.storage.layout.own_keys import MINUTE_MS
from libs.storage.records.dedupe_records import DedupeRecord

KEYS_MAX: Final = 100_000
"""Keys that are compared, of each kind of row, some 150 bytes each; of more a sample, by digest."""


class DedupePairs:
    """Take all rows, of keys and of ends, in any order; then look."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}
        self._named: dict[str, int] = {}
        self._shift = 64
        """Keys whose digest is 0 behind this shift are in the sample."""

    def take_key(self, key: str, record: DedupeRecord) -> None:
        if self._is_in_sample(key):
            self._ends[key] = record.end_ms
            self._shrink()

    def take_ends(self, minute: int, keys: Iterable[str]) -> None:
        for key in filter(self._is_in_sample, keys):
            self._named[key] = max(minute, self._named.get(key, 0))
            self._shrink()

    def unnamed(self, clock_ms: int) -> Iterator[str]:
        """The keys that have not ended, and that no row of their end names."""
        for key, end_ms in self._ends.items():
            if end_ms > clock_ms and self._named.get(key) != end_ms // MINUTE_MS:
                yield key

    def lost(self, clock_ms: int) -> Iterator[str]:
        """The keys that are named as such that have not ended, and are not there."""
        for key, minute in self._named.items():
            if (minute + 1) * MINUTE_MS > clock_ms and key not in self._ends:
                yield key

    def _is_in_sample(self, key: str) -> bool:
        return xxhash.xxh3_64_intdigest(key.encode()) >> self._shift == 0

    def _shrink(self) -> None:
        while max(len(self._ends), len(self._named)) > KEYS_MAX:
            self._shift -= 1
            for kept in (self._ends, self._named):
                for key in [one for one in kept if not self._is_in_sample(one)]:
                    del kept[key]
