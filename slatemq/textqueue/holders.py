r"""The sidecar mutex file: who works on which message, by the message's offset.

`FILE.mutex` is a row of slots, one for each message that is being worked on, each a JSON object and
spaces, so that taking and freeing one is a single small write that no crash leaves half done::

    {"offset": 120, "token": "@k3jf9a2…", "place": "…", "pid": 4711, …}  \n    512 bytes
                                                                         \n    a free slot

A holder has crashed when its process is gone, as far as we can see from here: processes of other
machines and containers, and claims that outlive their process, end by their deadline alone.
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
TOKEN_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"
TOKEN_LENGTH = 12

OWNER_LENGTH_MAX = 64

FREE = b" " * (SLOT_BYTES - 1) + b"\n"


class Hold(StrEnum):
    """How it is with a holder."""

    ALIVE = "alive"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a message.

    Attributes:
        offset: Of the message in the file.
        digest: Of its text, to see when something else has come to stand there.
        token: Names the claim.
        owner: Whatever name the worker gave itself.
        place: Machine, boot and process namespace, within which `pid` means something.
        pid: Of the process whose end ends the claim; 0 for none.
        started: When that process started, in the kernel's ticks, since numbers are used again.
        deadline_ms: Unix time at which the claim ends.
    """

    offset: int
    digest: str
    token: str
    owner: str
    place: str
    pid: int
    started: int
    deadline_ms: int

    def state(self, now_ms: int) -> Hold:
        """Whether the message is still its."""
        if self.pid and self.place == this_place():
            started = start_of(self.pid)
            if started < 0 or (started and started != self.started):
                return Hold.CRASHED
        return Hold.ALIVE if now_ms < self.deadline_ms else Hold.TIMED_OUT


class Holders:
    """The slots of an open sidecar, which is locked for us."""

    def __init__(self, descriptor: int) -> None:
        """Read all slots."""
        self._descriptor = descriptor
        self._slots: list[Holder | None] = []
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        for start in range(0, len(content), SLOT_BYTES):
            self._slots.append(_read_slot(content[start : start + SLOT_BYTES]))

    def __iter__(self) -> Iterator[Holder]:
        return iter([holder for holder in self._slots if holder is not None])

    def find(self, token: str) -> Holder | None:
        """The claim with that token."""
        return next((holder for holder in self if holder.token == token), None)

    def put(self, holder: Holder) -> None:
        """Take a free slot."""
        place = self._slots.index(None) if None in self._slots else len(self._slots)
        self._write(place, holder)

    def drop(self, holder: Holder) -> None:
        """Free its slot."""
        self._write(self._slots.index(holder), None)

    def change(self, holder: Holder, *, offset: int | None = None, deadline_ms: int = 0) -> None:
        """The same claim, with another offset or deadline."""
        changed = replace(
            holder,
            offset=holder.offset if offset is None else offset,
            deadline_ms=deadline_ms or holder.deadline_ms,
        )
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
        whole = all(isinstance(fields[name], kind) for name, kind in _KINDS.items())
    except (ValueError, TypeError):
        # Cut short by a power failure, or edited: nobody can hold anything by it.
        return None
    return holder if whole else None


_KINDS = {
    **dict.fromkeys(("offset", "pid", "started", "deadline_ms"), int),
    **dict.fromkeys(("digest", "token", "owner", "place"), str),
}


def sidecar(path: str) -> str:
    """The name of a queue file's sidecar, which is made when it is needed and never removed."""
    return path + ".mutex"


def new_token() -> str:
    """Names a claim; its beginning goes into the message's mutex variable."""
    import secrets  # with what it loads, and no reader needs

    return TOKEN_BEGINS + "".join(secrets.choice(TOKEN_LETTERS) for _ in range(TOKEN_LENGTH))


@cache
def this_place() -> str:
    """Where a process ID of ours means our process."""
    try:
        boot = _content("/proc/sys/kernel/random/boot_id").strip()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot, space = "", 0
    return f"{plain(os.uname().nodename)[:64]}/{boot[:36]}/{space}"


def plain(text: str) -> str:
    """Text of which each letter is one byte in a slot's JSON: others become question marks."""
    return "".join(one if " " <= one <= "~" and one not in '"\\' else "?" for one in text)


def start_of(pid: int) -> int:
    """When that process started, in ticks since boot; -1 when there is none, 0 when unknown."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except PermissionError:
        pass  # somebody else's, so it is there
    try:
        # The name, in parentheses, may itself have spaces and parentheses.
        fields = _content(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return 0
    return -1 if fields[0] in "ZX" else int(fields[19])


def _content(path: str) -> str:
    with open(path) as file:
        return file.read()
