"""Files that are read again when they have changed: certificates, tokens and policies."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from slatemq.errors import InvalidArgument

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S: Final = 2.0
"""How often files that are in use are looked at, in seconds."""


def file_status(*files: Path | None) -> tuple[object, ...]:
    """Differs from an earlier one when one of the files was changed, replaced, or made readable."""
    return tuple(_one(file) for file in files if file is not None)


def _take_all(_: object) -> None:
    """Whatever the time."""


class LoadedFiles(Generic[T]):
    """What files say.

    Attributes:
        value: As of the newest version of them that was good.
        version: Grows with each new value.
        problem: What is wrong with the files now; empty: the value is what they say.
    """

    def __init__(
        self, read: Callable[[], T], *files: Path | None, check: Callable[[T], None] = _take_all
    ) -> None:
        """Read them, and warn of what `check` finds: there is nothing better yet.

        Args:
            read: Returns the value of these files, and raises InvalidArgument: so does this.
            files: Their paths.
            check: Raises InvalidArgument where a value is not good at this time.
        """
        self._read = read
        self._check = check
        self._files = files
        self._status = file_status(*files)
        self._is_to_read = False
        self.problem = ""
        self.value = read()
        self.version = 1
        try:
            check(self.value)
        except InvalidArgument as error:
            log.warning("used all the same: %s", error.message)

    def reload(self) -> bool:
        """Read them again if they have changed; whether there is a new value.

        Raises:
            InvalidArgument: What they say now is not good: the value stays until they change again.
                Where they could not be read, or are not good at this time, they are read at each
                look until they are, and it is raised once.
        """
        status = file_status(*self._files)
        if status == self._status and not self._is_to_read:
            return False
        self._status = status
        is_read = False
        try:
            value = self._read()
            is_read = True
            self._check(value)
        except InvalidArgument as error:
            self._is_to_read = is_read or _is_unread(error)
            if self._is_to_read and error.message == self.problem:
                return False
            self.problem = error.message
            raise
        self.value = value
        self._is_to_read, self.problem = False, ""
        self.version += 1
        return True


class FilesValue(Generic[T]):
    """What files say: looked at when it is asked for, but not more often than every `LOOK_S`."""

    def __init__(
        self, read: Callable[[], T], *files: Path | None, check: Callable[[T], None] = _take_all
    ) -> None:
        """The arguments are those of LoadedFiles."""
        self._loaded = LoadedFiles(read, *files, check=check)
        self._looked_s = time.monotonic()

    @property
    def value(self) -> T:
        """The value of the newest files that were good."""
        self._look()
        return self._loaded.value

    @property
    def version(self) -> int:
        """Grows with each new value."""
        self._look()
        return self._loaded.version

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            self._loaded.reload()
        except InvalidArgument as error:  # Perhaps they are being replaced.
            log.warning("keeping what was read before: %s", error.message)


def _is_unread(error: InvalidArgument) -> bool:
    """Whether files could not be read now; those that say something wrong, can."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError)


def _one(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    # The time of the status: new rights change neither what is stored nor when it was.
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
