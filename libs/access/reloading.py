"""What a file says, read again when the file changes.

A file that is bad when the process starts stops it; one that is bad later is refused, and what was
read before stays. Looked at by its status, not by watching the folder: Kubernetes replaces mounted
files by changing a link, of which inotify says nothing for the file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from libs.documents import Document
from slatemq._file_status import LOOK_S, LoadedFiles
from slatemq.errors import InvalidArgument
from slatemq.models import now_ms

log = logging.getLogger(__name__)

T = TypeVar("T")

Taken: TypeAlias = Callable[[Path, int], None]
"""Called when a process has taken a new version of a file: its path, and the version's number."""

_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="access-files")
"""Of their own: what a token may no longer do must not wait for work that callers give others."""


class ReloadedFile(LoadedFiles[T]):
    """The value that a file has.

    Attributes:
        file: Its path.
        loaded_at_ms: When its value was read, in milliseconds since the Unix epoch.
    """

    def __init__(self, file: Path, read: Callable[[Path], T], *others: Path) -> None:
        """Read it: `read` returns its value, which may come from other files, too.

        Raises:
            InvalidArgument: From `read`.
        """
        super().__init__(lambda: read(file), file, *others)
        self.file = file
        self.loaded_at_ms = now_ms()

    @classmethod
    def of_document(cls, file: Path, kind: Callable[[Document], T]) -> ReloadedFile[T]:
        """A file of YAML, of which `kind` makes a value."""
        return cls(file, lambda path: kind(Document.read(path)))

    def reload(self) -> bool:
        """Read it again if it has changed; whether there is a new value. Blocks.

        Never raises: what is wrong with the new version is logged once.
        """
        try:
            is_new = super().reload()
        except InvalidArgument as error:
            problem = error.message
            log.error("keeping the version before: %s", problem, extra={"file": str(self.file)})
            return False
        except Exception:  # a fault of ours: without this, no later version would be read
            log.exception("keeping the version before", extra={"file": str(self.file)})
            return False
        if is_new:
            self.loaded_at_ms = now_ms()
        return is_new

    async def watch(self, taken: Taken) -> None:
        """Reload it for ever; call `taken` after each new value.

        It is looked at every `LOOK_S`: so long a revoked token is accepted at most.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            if await asyncio.get_running_loop().run_in_executor(_THREADS, self.reload):
                taken(self.file, self.version)
