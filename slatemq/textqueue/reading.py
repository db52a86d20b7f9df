r"""Reading beside writers: nothing is read of an append before it is finished.

What lies before the end of the file stays as it is, while appends come; but the last entry may be
one that is being written, and its writer may be killed. So a reader goes as far as was finished
when it looked, and looks again when it is there::

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
"""Without a lock, while the file grows all the time."""


class Reading:
    """Reads on, as far as appends are finished. Raises OSError."""

    def __init__(self, path: str, descriptor: int, offset: int, waits: bool) -> None:
        """Nothing is locked; `waits` means that `settle` is entered where `read` gives nothing."""
        self._path = path
        self._descriptor = descriptor
        self._offset = offset
        self._waits = waits
        self._is_over = False
        self._sound = offset
        self._look()

    def read(self, wanted: int) -> bytes:
        """Up to so many of the next bytes."""
        if self._offset >= self._sound and not (self._waits or self._is_over):
            self._look()
        wanted = max(0, min(wanted, self._sound - self._offset))
        got = os.pread(self._descriptor, wanted, self._offset)
        self._offset += len(got)
        return got

    @contextmanager
    def settle(self) -> Iterator[None]:
        """Wait for the append that is under way, and keep others away meanwhile."""
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
            # Up to the byte that shows that another entry follows; what comes behind it may change.
            self._sound, self._is_over = begun + 1, True
