"""What a file says, read again when the file changes.

A file that is bad when the process starts stops it; one that is bad later is refused, and what was
read before stays. Looked at by its status, not by watching the folder: Kubernetes replaces mounted
files by changing a link, of which inotify says nothing for the file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from libs.documents import Document
from slatemq._file_status import LOOK_S, file_status
from slatemq.errors import InvalidArgument

log = logging.getLogger(__name__)

T = TypeVar("T")


class ReloadedFile(Generic[T]):
    """The value that a file has.

    Attributes:
        file: Its path.
        value: As of the last good version of the file.
        version: How many versions were read, the first included.
        loaded_at_ms: When this one was read, in milliseconds since the Unix epoch.
    """

    def __init__(self, file: Path, kind: Callable[[Document], T]) -> None:
        """Read it; `kind` makes its value, and raises InvalidArgument.

        Raises:
            InvalidArgument: It cannot be read, or from `kind`.
        """
        self.file = file
        self._kind = kind
        self._status = file_status(file)
        self.value = kind(Document.read(file))
        self.version = 1
        self.loaded_at_ms = _now_ms()

    def reload(self) -> bool:
        """Read it again if it has changed; whether there is a new value. Blocks.

        Never raises: what is wrong with the new version is logged once.
        """
        status = file_status(self.file)
        if status == self._status:
            return False
        self._status = status
        name = str(self.file)
        try:
            value = self._kind(Document.read(self.file))
        except InvalidArgument as error:
            problem = error.message
            log.error("keeping the version before: %s", problem, extra={"file": name})
            return False
        self.value = value
        self.version += 1
        self.loaded_at_ms = _now_ms()
        log.info("read again", extra={"file": name, "version": self.version})
        return True

    async def watch(self, changed: Callable[[], None] = lambda: None) -> None:
        """Reload it for ever; call `changed` after each new value.

        It is looked at every `LOOK_S`: so long a revoked token is accepted at most.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            if await asyncio.to_thread(self.reload):
                changed()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
