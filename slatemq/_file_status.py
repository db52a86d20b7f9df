"""Files that are read again when they have changed: certificates, tokens and policies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from slatemq.errors import InvalidArgument

T = TypeVar("T")

LOOK_S: Final = 2.0
"""How often files that are in use are looked at, in seconds."""


def file_status(*files: Path | None) -> tuple[object, ...]:
    """Differs from an earlier one when one of the files was changed or replaced."""
    return tuple(_one(file) for file in files if file is not None)


class FilesValue(Generic[T]):
    """What files say: looked at when it is asked for, but not more often than every `LOOK_S`."""

    def __init__(self, read: Callable[[], T], *files: Path | None) -> None:
        """`read` gives the value of these files, and raises InvalidArgument: so does this."""
        self._read = read
        self._files = files
        self._status = file_status(*files)
        self._value = read()
        self._looked_s = time.monotonic()
        self._version = 1

    @property
    def value(self) -> T:
        """That of the newest files that were good."""
        self._look()
        return self._value

    @property
    def version(self) -> int:
        """Grows with each new value."""
        self._look()
        return self._version

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        status = file_status(*self._files)
        if status == self._status:
            return
        try:
            self._value = self._read()
        except InvalidArgument:
            return  # They are being replaced: looked at again, and the value before is kept.
        self._status = status
        self._version += 1


def _one(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
