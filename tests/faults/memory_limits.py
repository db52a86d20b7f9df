"""A limit of memory for one process, by a cgroup of its own: over it, the kernel kills it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

V1: Final = Path("/sys/fs/cgroup/memory")
V2: Final = Path("/sys/fs/cgroup")

_UNLIMITED: Final = {"memory.limit_in_bytes": "-1", "memory.max": "max"}


class MemoryGroup:
    """A cgroup with one process in it. `close` removes it once that has ended."""

    def __init__(self, name: str) -> None:
        """Makes it. Raises OSError where cgroups cannot be made here; `lacking` says why."""
        v1 = (V1 / "memory.limit_in_bytes").exists()
        self._folder = (V1 if v1 else V2) / f"slatemq-{os.getpid()}-{name}"
        self._limit = "memory.limit_in_bytes" if v1 else "memory.max"
        self._usage = "memory.usage_in_bytes" if v1 else "memory.current"
        self._events = "memory.oom_control" if v1 else "memory.events"
        self._folder.mkdir()
        if not (self._folder / self._limit).exists():
            self._folder.rmdir()
            raise OSError("the memory controller of cgroups is not enabled here")

    def add(self, pid: int) -> None:
        """Count the memory of this process from now on."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def usage_bytes(self) -> int:
        return int((self._folder / self._usage).read_text())

    @property
    def kills_count(self) -> int:
        """How many processes the kernel has killed in it."""
        words = (self._folder / self._events).read_text().split()
        return int(words[words.index("oom_kill") + 1])

    def limit(self, size_bytes: int | None) -> None:
        """From now on it may take so much; None: any amount."""
        text = _UNLIMITED[self._limit] if size_bytes is None else str(size_bytes)
        (self._folder / self._limit).write_text(text)

    def close(self) -> None:
        self._folder.rmdir()


def is_permitted() -> bool:
    """Whether cgroups may be made here, so that only how the machine is set up can lack them.

    In a container they are read-only, unless it is given them.
    """
    return os.geteuid() == 0 and os.access(V1 if V1.exists() else V2, os.W_OK)


def lacking() -> str:
    """Why no limit of memory can be set here; empty where it can."""
    try:
        MemoryGroup("trial").close()
    except OSError as error:
        return f"no cgroup can be made: {error}"
    return ""
