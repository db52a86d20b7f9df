r"""Reading beside writers: an append is read only once it is complete.

Appends do not change what is before the end of the file; but the last entry may be incomplete, and
its writer may be killed. So a reader goes as far as the file was complete when it looked, and looks
again when it gets there::

    -older\n-newer\n-half of a mess
    ^ read on      ^ sound: wait for the lock, or end
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from slatemq.textqueue.appends import finished, under_way

LOOKS_MAX = 100
"""Attempts without a lock while the file keeps growing."""


class Reading:
    """Reads as far as appends are complete. Raises OSError."""

    def __init__(self, path: str, descriptor: int, offset: int, waits: bool) -> None:
        """Without a lock; `waits` means that the caller enters `settle` where `read` ends."""
        self._path = path
        self._descriptor = descriptor
        self._offset = offset
        self._waits = waits
        self._is_over = False
        self._sound = offset
        self._look()

    def read(self, wanted: int) -> bytes:
        if self._offset >= self._sound and not (self._waits or self._is_over):
            self._look()
        wanted = max(0, min(wanted, self._sound - self._offset))
        got = os.pread(self._descriptor, wanted, self._offset)
        self._offset += len(got)
        return got

    @contextmanager
    def settle(self) -> Iterator[None]:
        """Wait for an unfinished append, and keep writers away meanwhile."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        try:
            self._sound = finished(self._path, self._descriptor)
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _look(self) -> None:
        for _ in range(LOOKS_MAX):
            size = os.fstat(self._descriptor).st_size
            begun = under_way(self._path, self._descriptor)
            if size == os.fstat(self._descriptor).st_size:
                break
        else:
            return
        if begun is None:
            self._sound = size
        elif self._waits:
            self._sound = begun
        else:
            # Up to the byte that shows that another entry follows; later bytes may change.
            self._sound, self._is_over = begun + 1, True
