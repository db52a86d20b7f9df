"""Which messages came back and were acked: one small file that all consumers of a queue map."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from pathlib import Path

_COUNT = struct.Struct("<Q")


def make(path: Path, workers: int, count: int) -> None:
    """The file: how many each worker has acked, then a byte for each message."""
    path.write_bytes(bytes(workers * _COUNT.size + count))


class Tally:
    """One worker's view of it. Only its own count is written by it; a byte only ever becomes 1."""

    def __init__(self, path: Path, workers: int, worker: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._workers = workers
        self._own = worker * _COUNT.size
        self._start = workers * _COUNT.size
        self.repeated = 0

    def see(self, numbers: Iterable[int]) -> int:
        """Marks these; gives how many of them had not come before."""
        fresh = 0
        seen, start = self._map, self._start
        for number in numbers:
            if seen[start + number]:
                self.repeated += 1
            else:
                seen[start + number] = 1
                fresh += 1
        return fresh

    def acked(self, fresh: int) -> None:
        """Counts messages that came for the first time and whose acks were answered."""
        (before,) = _COUNT.unpack_from(self._map, self._own)
        _COUNT.pack_into(self._map, self._own, before + fresh)

    def total(self) -> int:
        """How many all workers have acked."""
        places = range(0, self._workers * _COUNT.size, _COUNT.size)
        return sum(_COUNT.unpack_from(self._map, place)[0] for place in places)


def seen(path: Path, workers: int) -> int:
    """How many different messages came back at all."""
    return path.read_bytes()[workers * _COUNT.size :].count(1)
