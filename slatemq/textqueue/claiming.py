"""Claims: each message goes to one worker at a time.

The claimer of a process remembers the unfinished messages that it has read past, so that a claim
checks those and then reads on, instead of reading the whole file again. It starts over when the
file was rewritten.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slatemq.textqueue.appends import look
from slatemq.textqueue.controls import State
from slatemq.textqueue.editing import again, fill, found_at, mark
from slatemq.textqueue.entries import Entry, Variable
from slatemq.textqueue.errors import (
    AlreadyMarked,
    Busy,
    ClaimLost,
    FormatError,
    Rewritten,
)
from slatemq.textqueue.files import QueueFile, Signature
from slatemq.textqueue.holders import (
    NOWHERE,
    OWNER_LENGTH_MAX,
    TOKEN_BEGINS,
    Hold,
    Holder,
    Holders,
    new_token,
    plain,
    start_of,
    this_place,
)
from slatemq.textqueue.locks import How

AHEAD_COUNT = 256
"""The most messages that are read ahead."""

AHEAD_BYTES = 1 << 20
"""The most bytes that are read ahead, unless one message is longer."""

RESTARTS_MAX = 100
"""Rewrites of the file during one claim, after which it fails."""

RETRIES = "retries"
ERROR = "error"
MUTEX = "mutex"

BARE_FREE = "MUTEX"
BARE_TAKEN = "M@"
"""A mutex variable without a name; its five bytes have room for three characters of a token."""

NO_RETRIES = "retries"
"""The `error` of a message without retries left, unless it has a value."""


class Claimer:
    """Claims messages of one file, for the workers of one process."""

    def __init__(self, file: QueueFile, owner: str, clock_ms: Callable[[], int]) -> None:
        self._file = file
        self._owner = plain(owner)[:OWNER_LENGTH_MAX]
        self._clock_ms = clock_ms
        self._threads = threading.RLock()
        self._identity: tuple[int, int] | None = None
        self._known: dict[int, Entry] = {}
        self._last: Entry | None = None
        self._swept: Signature | None = None

    @contextmanager
    def threads(self, wait: bool) -> Iterator[None]:
        """Keep the other threads of this process from claiming. Raises Busy without `wait`."""
        if not self._threads.acquire(blocking=wait):
            raise Busy(f"{self._file.name} is used by another thread")
        try:
            yield
        finally:
            self._threads.release()

    def claim(self, lease_ms: int, tied: bool) -> tuple[Entry, Holder] | None:
        """Claim the first free queued message. Raises FormatError, Rewritten, OSError."""
        with self._threads:
            for _ in range(RESTARTS_MAX):
                try:
                    return self._claim(lease_ms, tied)
                except Rewritten:
                    self._identity, self._last, self._swept = None, None, None
                    self._known.clear()
            raise Rewritten(
                f"{self._file.name} is rewritten again and again: stop the writer, and retry"
            )

    @contextmanager
    def held(self, token: str) -> Iterator[tuple[int, Holders, Holder]]:
        """The open file, the sidecar, and the claim of that token.

        Raises ClaimLost, Rewritten (the claim has ended), OSError.
        """
        with self._file.holders() as holders:
            holder = holders.find(token)
            if holder is None:
                raise ClaimLost(f"the claim {token} has ended; another worker may have its message")
            if holder.offset == NOWHERE:
                raise _ended_by_a_rewrite(holders, holder)
            with self._file.opened(os.O_RDWR, How.SHARED) as descriptor:
                yield descriptor, holders, holder

    def offsets(self) -> frozenset[int]:
        """The offsets of claimed messages. Raises OSError."""
        with self._file.holders() as holders:
            return frozenset(self._held(holders)) - {NOWHERE}

    def find(self, token: str) -> tuple[Entry, Holder]:
        """A claim by its token. Raises ClaimLost, Rewritten (the claim has ended), OSError."""
        with self.held(token) as (descriptor, holders, holder):
            entry = _entry_of(descriptor, holder)
            if entry is None:
                raise _ended_by_a_rewrite(holders, holder)
            return entry, holder

    def finish(self, token: str, entry: Entry, change: Callable[[int, Entry], Entry]) -> Entry:
        """Change the claimed message for the last time, and end the claim.

        Raises ClaimLost; Rewritten and AlreadyMarked, which end the claim, too; and other errors of
        `change`, after which nothing has changed.
        """
        with self.held(token) as (descriptor, holders, holder):
            entry = Entry.of(entry.raw, holder.offset, entry.line)
            try:
                entry = change(descriptor, entry)
                entry = clear_slot(descriptor, entry, token)
                self._file.sync(descriptor)
                self._file.verify(descriptor, entry)
            except (Rewritten, AlreadyMarked):
                holders.drop(holder)
                raise
            holders.drop(holder)
            return entry

    def _claim(self, lease_ms: int, tied: bool) -> tuple[Entry, Holder] | None:
        while True:
            with (
                self._file.holders() as holders,
                self._file.opened(os.O_RDWR, How.SHARED) as descriptor,
            ):
                look(self._file.path, self._file.name, descriptor)
                self._expect_same(descriptor)
                held = self._held(holders)
                self._drop_finished(descriptor, holders, held)
                for offset in sorted(self._known):
                    if offset in held and held[offset] == self._known[offset].digest:
                        continue
                    entry = self._free(descriptor, holders, self._known[offset])
                    if entry is None:
                        continue
                    return self._begin(descriptor, holders, entry, lease_ms, tied)
            if not self._read_on():
                return None

    def _held(self, holders: Holders) -> dict[int, str]:
        """Digests of claimed messages, by offset: these need not be read."""
        now_ms, held = self._clock_ms(), dict[int, str]()
        lives: dict[tuple[str, int, int], bool] = {}
        for holder in holders:
            process = (holder.place, holder.pid, holder.started)
            if process not in lives:
                lives[process] = holder.state(0) is not Hold.CRASHED
            if lives[process] and now_ms < holder.deadline_ms:
                held[holder.offset] = holder.digest
        return held

    def _drop_finished(self, descriptor: int, holders: Holders, held: dict[int, str]) -> None:
        """Free the slots of workers that ended between marking their message and freeing them."""
        for holder in holders:
            if held.get(holder.offset) != holder.digest:
                entry = _entry_of(descriptor, holder)
                if entry is not None and entry.state is not State.QUEUED:
                    holders.drop(holder)

    def _expect_same(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        if self._identity not in (None, identity):
            raise Rewritten(f"{self._file.name} was replaced")
        self._identity = identity

    def _read_on(self) -> bool:
        """Read further queued messages; False when there are none. Raises Rewritten."""
        before, start, found, taken_bytes = self._file.signature(), self._last, 0, 0
        try:
            for entry in self._after(start):
                self._last = entry
                if entry.state is State.QUEUED and entry.offset not in self._known:
                    self._known[entry.offset] = entry.detached()
                    found, taken_bytes = found + 1, taken_bytes + len(entry.raw)
                    if found == AHEAD_COUNT or taken_bytes >= AHEAD_BYTES:
                        break
        except FormatError:
            # Messages before the broken line can be claimed.
            if not found:
                raise
        if found:
            return True
        if start is None or before == self._swept:
            self._swept = before
            return False
        # A person may have queued a message again, in an editor, before what was read.
        self._last = None
        return self._read_on()

    def _after(self, start: Entry | None) -> Iterator[Entry]:
        """Entries after `start`, which must still be where it was. Raises Rewritten."""
        entries = self._file.entries(start)
        if start is not None:
            try:
                first = next(entries, None)
            except FormatError:
                first = None
            if first is None or (first.offset, first.text) != (start.offset, start.text):
                raise Rewritten(f"{self._file.name} was rewritten")
        yield from entries

    def _free(self, descriptor: int, holders: Holders, entry: Entry) -> Entry | None:
        """The message as it is now; None when it is finished, claimed, or out of retries."""
        entry = again(descriptor, entry)
        if entry.state is not State.QUEUED:
            del self._known[entry.offset]
            return None
        if self._ended(descriptor, holders, entry) is None or claimed_by_a_person(entry):
            return None
        retries = _retries(entry)
        if retries is None or retries.strip("0"):
            return entry
        error = _variable(entry, ERROR)
        # A code of a worker is kept.
        if error is not None and not error.value and error.width >= len(NO_RETRIES):
            fill(descriptor, entry, error.index, NO_RETRIES)
        mark(descriptor, entry, State.ERROR)
        self._file.sync(descriptor)
        del self._known[entry.offset]
        return None

    def _ended(self, descriptor: int, holders: Holders, entry: Entry) -> list[Holder] | None:
        """Holders of this message whose claims have ended; None when one is alive."""
        ended, digest = [], entry.digest
        for holder in holders:
            if holder.digest != digest:
                continue
            # The message of a holder at another offset may have been moved here by an editor.
            if holder.offset != entry.offset and _entry_of(descriptor, holder):
                continue
            if holder.state(self._clock_ms()) is Hold.ALIVE:
                return None
            ended.append(holder)
        return ended

    def _begin(
        self, descriptor: int, holders: Holders, entry: Entry, lease_ms: int, tied: bool
    ) -> tuple[Entry, Holder]:
        pid = os.getpid() if tied else 0
        holder = Holder(
            offset=entry.offset,
            digest=entry.digest,
            token=new_token(),
            owner=self._owner,
            place=this_place(),
            pid=pid,
            started=max(0, start_of(pid)) if tied else 0,
            deadline_ms=self._clock_ms() + lease_ms,
        )
        ended = self._ended(descriptor, holders, entry) or []
        # Ours first: if we crash here, the mutex variable still has its holder.
        holders.put(holder)
        for other in ended:
            holders.drop(other)
        try:
            entry = count_down(descriptor, entry)
            slot = mutex_slot(entry)
            if slot is not None:
                value = slot_value(slot, holder.token)
                entry = fill(descriptor, entry, slot.index, value)
            self._file.sync(descriptor)
            self._file.verify(descriptor, entry)
        except Rewritten:
            holders.drop(holder)
            raise
        return entry, holder


def mutex_slot(entry: Entry) -> Variable | None:
    r"""The variable for a mutex, as the seed writes it: `\mutex=   ` or `\MUTEX`."""
    for variable in entry.variables:
        if variable.name is None:
            is_mutex = variable.value == BARE_FREE or variable.value.startswith(BARE_TAKEN)
            if is_mutex and variable.width >= len(BARE_FREE):
                return variable
        elif variable.name.lower() == MUTEX and variable.width:
            return variable
    return None


def slot_value(slot: Variable, token: str) -> str:
    """The value of a mutex variable during that claim: as much of the token as fits."""
    return (token if slot.name is not None else BARE_TAKEN + token[1:])[: slot.width]


def clear_slot(descriptor: int, entry: Entry, token: str) -> Entry:
    """Remove the token from the mutex variable."""
    slot = mutex_slot(entry)
    if slot is None or slot.value != slot_value(slot, token):
        return entry
    return fill(descriptor, entry, slot.index, BARE_FREE if slot.name is None else "")


def claimed_by_a_person(entry: Entry) -> bool:
    """Whether a person has put a name into the mutex variable.

    Tokens do not count: an editor may restore old ones, so only the sidecar says who claims.
    """
    slot = mutex_slot(entry)
    if slot is None or slot.name is None:
        return False  # a bare variable with any other value is not a mutex
    return slot.value not in ("", BARE_FREE) and not slot.value.startswith(TOKEN_BEGINS)


def count_down(descriptor: int, entry: Entry) -> Entry:
    r"""One retry less in `\retries=NN`, as wide as before: 10 → 09, ` 8` → ` 7`."""
    digits, variable = _retries(entry), _variable(entry, RETRIES)
    if digits is None or variable is None:
        return entry
    padding = " " * (len(variable.value) - len(digits))
    return fill(descriptor, entry, variable.index, padding + _one_less(digits))


def _one_less(digits: str) -> str:
    """On digits, because Python refuses numbers of thousands of digits."""
    head = digits.rstrip("0")
    return head[:-1] + str(int(head[-1]) - 1) + "9" * (len(digits) - len(head))


def _retries(entry: Entry) -> str | None:
    """The claims left, in digits; None for no limit."""
    variable = _variable(entry, RETRIES)
    if variable is None:
        return None
    digits = variable.value.strip(" ")
    return digits if digits.isascii() and digits.isdigit() else None


def _variable(entry: Entry, name: str) -> Variable | None:
    return next((variable for variable in entry.variables if variable.name == name), None)


def _ended_by_a_rewrite(holders: Holders, holder: Holder) -> Rewritten:
    """The claim cannot be finished any more; its message, if it still exists, is free again."""
    holders.drop(holder)
    return Rewritten(f"the message of claim {holder.token} is no longer where it was")


def _entry_of(descriptor: int, holder: Holder) -> Entry | None:
    """The message of a claim; None when it is no longer where it was."""
    entry = found_at(descriptor, holder.offset)
    return entry if entry is not None and entry.digest == holder.digest else None
