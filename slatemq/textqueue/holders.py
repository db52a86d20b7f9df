r"""The sidecar mutex file: which claim holds which message, by the message's offset.

`FILE.mutex` has a slot for each claimed message, a JSON object padded with spaces, so that taking
and freeing one is a single small write, which a crash does not leave half done::

    {"offset": 120, "token": "@k3jf9a2…", "place": "…", "pid": 4711, …}  \n    512 bytes
                                                                         \n    a free slot

A compaction first notes in the slots where the messages will be in the new file, by its inode, so
that a kill cannot leave them with offsets of the other file.

A holder has crashed when its process is gone, as far as we can see: claims of other machines and
containers, and claims that outlive their process, end only by their deadline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache

from slatemq.textqueue.locks import put

SLOT_BYTES = 512

TOKEN_BEGINS = "@"
TOKEN_CHARACTERS = "abcdefghijkmnpqrstuvwxyz23456789"
TOKEN_LENGTH = 12

OWNER_LENGTH_MAX = 64

FREE = b" " * (SLOT_BYTES - 1) + b"\n"

NOWHERE = -1
"""The offset of a claim whose message a compaction has not found where it was."""


class Hold(StrEnum):
    ALIVE = "alive"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a claim.

    Attributes:
        offset: Of the message in the file.
        digest: Of its text, to detect another message at the offset.
        token: Identifies the claim.
        owner: The name that the worker gave itself.
        place: Machine, boot and process namespace, within which `pid` is valid.
        pid: Of the process whose end ends the claim; 0 for none.
        started: When that process started, in the kernel's ticks, because PIDs are reused.
        deadline_ms: Unix time at which the claim ends.
        inode: Of the file that a compaction is about to rename into place; 0 for none.
        moved: The offset in that file.
    """

    offset: int
    digest: str
    token: str
    owner: str
    place: str
    pid: int
    started: int
    deadline_ms: int
    inode: int = 0
    moved: int = NOWHERE

    def state(self, now_ms: int) -> Hold:
        if self.pid and self.place == this_place():
            started = start_of(self.pid)
            if started < 0 or (started and started != self.started):
                return Hold.CRASHED
        return Hold.ALIVE if now_ms < self.deadline_ms else Hold.TIMED_OUT


class Holders:
    """The slots of an open sidecar, which the caller has locked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._slots: list[Holder | None] = []
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        for start in range(0, len(content), SLOT_BYTES):
            self._slots.append(_read_slot(content[start : start + SLOT_BYTES]))

    def __iter__(self) -> Iterator[Holder]:
        return iter([holder for holder in self._slots if holder is not None])

    def find(self, token: str) -> Holder | None:
        return next((holder for holder in self if holder.token == token), None)

    def put(self, holder: Holder) -> None:
        """Take a free slot."""
        place = self._slots.index(None) if None in self._slots else len(self._slots)
        self._write(place, holder)

    def drop(self, holder: Holder) -> None:
        self._write(self._slots.index(holder), None)

    def extend(self, holder: Holder, deadline_ms: int) -> None:
        self._change(holder, replace(holder, deadline_ms=deadline_ms))

    def plan(self, holder: Holder, inode: int, offset: int) -> None:
        """Note where its message will be once the file with that inode has the name."""
        self._change(holder, replace(holder, inode=inode, moved=offset))

    def settle(self, inode: int) -> None:
        """Take the planned offsets if the file with that inode has the name; else forget them."""
        for holder in self:
            if holder.inode:
                offset = holder.moved if holder.inode == inode else holder.offset
                self._change(holder, replace(holder, offset=offset, inode=0, moved=NOWHERE))

    def sync(self) -> None:
        """Write the slots to the disk."""
        os.fsync(self._descriptor)

    def _change(self, holder: Holder, changed: Holder) -> None:
        self._write(self._slots.index(holder), changed)

    def _write(self, place: int, holder: Holder | None) -> None:
        content = FREE
        if holder is not None:
            content = json.dumps(asdict(holder)).encode().ljust(SLOT_BYTES - 1) + b"\n"
            assert len(content) == SLOT_BYTES, "a holder's fields are bounded"
        put(self._descriptor, content, place * SLOT_BYTES)
        self._slots[place : place + 1] = [holder]


def _read_slot(content: bytes) -> Holder | None:
    if not content.strip():
        return None
    try:
        fields = json.loads(content)
        holder = Holder(**fields)
        whole = all(isinstance(getattr(holder, name), kind) for name, kind in _KINDS.items())
    except (ValueError, TypeError, RecursionError):
        # Truncated by a power failure, or edited: it holds no message.
        return None
    return holder if whole else None


_KINDS = {
    **dict.fromkeys(("offset", "pid", "started", "deadline_ms", "inode", "moved"), int),
    **dict.fromkeys(("digest", "token", "owner", "place"), str),
}


def sidecar(path: str) -> str:
    """The path of a queue file's sidecar, which is created on demand and never removed."""
    return path + ".mutex"


def new_token() -> str:
    """Identifies a claim; its beginning goes into the message's mutex variable."""
    import secrets  # loads modules that readers do not need

    return TOKEN_BEGINS + "".join(secrets.choice(TOKEN_CHARACTERS) for _ in range(TOKEN_LENGTH))


@cache
def this_place() -> str:
    """The place within which our process IDs are valid."""
    try:
        boot = _content("/proc/sys/kernel/random/boot_id").strip()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot, space = "", 0
    return f"{plain(os.uname().nodename)[:64]}/{boot[:36]}/{space}"


def plain(text: str) -> str:
    """Text with a question mark for each character that is more than one byte in a slot's JSON."""
    return "".join(one if " " <= one <= "~" and one not in '"\\' else "?" for one in text)


def start_of(pid: int) -> int:
    """When a process started, in ticks since boot; -1 when it does not exist, 0 when unknown."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except PermissionError:
        pass  # another user's process, so it exists
    try:
        # The name, in parentheses, may itself contain spaces and parentheses.
        fields = _content(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return 0
    return -1 if fields[0] in "ZX" else int(fields[19])


def _content(path: str) -> str:
    # The kernel cuts a name after 15 bytes, also within a character.
    with open(path, errors="replace") as file:
        return file.read()
