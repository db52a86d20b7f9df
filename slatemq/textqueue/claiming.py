"""Giving each message to one worker at a time.

What the claimer of a process has read past and not seen finished it remembers, so that a claim
looks at those and then reads on, not at the whole file again. It begins anew when the file was
rewritten.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slatemq.textqueue.appends import look
from slatemq.textqueue.controls import State
from slatemq.textqueue.editing import again, entry_at, fill, mark
from slatemq.textqueue.entries import Entry, Variable
from slatemq.textqueue.errors import (
    AlreadyMarked,
    Busy,
    ClaimLost,
    FormatError,
    NoSuchEntry,
    Rewritten,
)
from slatemq.textqueue.files import QueueFile, Signature
from slatemq.textqueue.holders import (
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
"""Messages read ahead of those that can be claimed."""

AHEAD_BYTES = 1 << 20
"""Of these; more only of one that is longer."""

RESTARTS_MAX = 100
"""Rewrites during one claim, after which it gives up."""

RETRIES = "retries"
ERROR = "error"
MUTEX = "mutex"

BARE_FREE = "MUTEX"
BARE_TAKEN = "M@"
"""A mutex variable without a name; its five bytes have room for three letters of a token."""

NO_RETRIES = "retries"
"""What the `error` variable says of a message without retries left, if it says nothing yet."""


class Claimer:
    """Claims messages of one file, for the workers of one process."""

    def __init__(self, file: QueueFile, owner: str, clock_ms: Callable[[], int]) -> None:
        """Nothing is read yet."""
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
        """Keeps the other threads of this process from claiming. Raises Busy without `wait`."""
        if not self._threads.acquire(blocking=wait):
            raise Busy(f"{self._file.name} is used by another thread")
        try:
            yield
        finally:
            self._threads.release()

    def claim(self, lease_ms: int, tied: bool) -> tuple[Entry, Holder] | None:
        """The first queued message that nobody holds. Raises FormatError, Rewritten, OSError."""
        with self._threads:
            for _ in range(RESTARTS_MAX):
                try:
                    return self._claim(lease_ms, tied)
                except Rewritten:
                    self._start_over()
            raise Rewritten(f"{self._file.name} is being rewritten all the time")

    @contextmanager
    def held(self, token: str) -> Iterator[tuple[int, Holders, Holder]]:
        """The open file, the sidecar, and the claim of that token. Raises ClaimLost, OSError."""
        with self._file.holders() as holders:
            holder = holders.find(token)
            if holder is None:
                raise ClaimLost(f"the claim {token} has ended, or was given to another")
            with self._file.opened(os.O_RDWR, How.SHARED) as descriptor:
                yield descriptor, holders, holder

    def offsets(self) -> frozenset[int]:
        """Where the messages begin that are claimed now. Raises OSError."""
        with self._file.holders() as holders:
            return frozenset(self._held(holders))

    def find(self, token: str) -> tuple[Entry, Holder]:
        """A claim that was made elsewhere. Raises ClaimLost, Rewritten (it has ended), OSError."""
        with self.held(token) as (descriptor, holders, holder):
            try:
                return _entry_of(descriptor, holder), holder
            except Rewritten:
                # Whoever asks is told; nobody can finish it, and the message may be given again.
                holders.drop(holder)
                raise

    def finish(self, token: str, entry: Entry, change: Callable[[int, Entry], Entry]) -> Entry:
        """Change the claimed message for the last time, and let it go.

        Raises ClaimLost; Rewritten and AlreadyMarked, upon which the claim has ended too; and what
        `change` raises otherwise, upon which nothing has changed.
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

    def _start_over(self) -> None:
        self._identity, self._last, self._swept = None, None, None
        self._known.clear()

    def _claim(self, lease_ms: int, tied: bool) -> tuple[Entry, Holder] | None:
        while True:
            with (
                self._file.holders() as holders,
                self._file.opened(os.O_RDWR, How.SHARED) as descriptor,
            ):
                look(self._file.path, self._file.name, descriptor)
                self._expect_same(descriptor)
                held = self._held(holders)
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
        """Digests of messages whose claims go on, by offset: nothing of these has to be read."""
        now_ms, held = self._clock_ms(), dict[int, str]()
        lives: dict[tuple[str, int, int], bool] = {}
        for holder in holders:
            process = (holder.place, holder.pid, holder.started)
            if process not in lives:
                lives[process] = holder.state(0) is not Hold.CRASHED
            if lives[process] and now_ms < holder.deadline_ms:
                held[holder.offset] = holder.digest
        return held

    def _expect_same(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        if self._identity not in (None, identity):
            raise Rewritten(f"{self._file.name} was replaced")
        self._identity = identity

    def _read_on(self) -> bool:
        """Remember more queued messages; False when there are none. Raises Rewritten."""
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
            # What stands before the broken line can be worked on.
            if not found:
                raise
        if found:
            return True
        if start is None or before == self._swept:
            self._swept = before
            return False
        # Somebody may have put a message back before what was read: an editor, by hand.
        self._last = None
        return self._read_on()

    def _after(self, start: Entry | None) -> Iterator[Entry]:
        """Entries after that one, which must still be where it was. Raises Rewritten."""
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
        """The message as it is now, unless it is finished, held, or out of retries."""
        entry = again(descriptor, entry)
        if entry.state is not State.QUEUED:
            del self._known[entry.offset]
            for holder in holders:
                if (holder.offset, holder.digest) == (entry.offset, entry.digest):
                    holders.drop(holder)
            return None
        if self._ended(descriptor, holders, entry) is None or taken_by_hand(entry):
            return None
        retries = _retries(entry)
        if retries is None or retries.strip("0"):
            return entry
        error = _variable(entry, ERROR)
        # What a worker has put there says more.
        if error is not None and not error.value and error.width >= len(NO_RETRIES):
            fill(descriptor, entry, error.index, NO_RETRIES)
        mark(descriptor, entry, State.ERROR)
        self._file.sync(descriptor)
        del self._known[entry.offset]
        return None

    def _ended(self, descriptor: int, holders: Holders, entry: Entry) -> list[Holder] | None:
        """Holders of this message whose claims have ended; None when one goes on."""
        ended, digest = [], entry.digest
        for holder in holders:
            if holder.digest != digest:
                continue
            # One whose message an editor has moved may be working on this very message.
            if holder.offset != entry.offset and _is_in_place(descriptor, holder):
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
        # Ours first: were we to end here, the mutex variable would still have its holder.
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
            if variable.value == BARE_FREE or variable.value.startswith(BARE_TAKEN):
                return variable
        elif variable.name.lower() == MUTEX and variable.width:
            return variable
    return None


def slot_value(slot: Variable, token: str) -> str:
    """What a mutex variable has while that claim holds it: as much of the token as it has room."""
    return (token if slot.name is not None else BARE_TAKEN + token[1:])[: slot.width]


def clear_slot(descriptor: int, entry: Entry, token: str) -> Entry:
    """Take our token out of the mutex variable."""
    slot = mutex_slot(entry)
    if slot is None or slot.value != slot_value(slot, token):
        return entry
    return fill(descriptor, entry, slot.index, BARE_FREE if slot.name is None else "")


def taken_by_hand(entry: Entry) -> bool:
    """Whether a person has put a name into the mutex variable.

    Of our tokens the sidecar alone tells whether they count: an editor may bring old ones back.
    """
    slot = mutex_slot(entry)
    if slot is None or slot.name is None:
        return False  # a bare one that has anything else in it is no mutex
    return slot.value not in ("", BARE_FREE) and not slot.value.startswith(TOKEN_BEGINS)


def count_down(descriptor: int, entry: Entry) -> Entry:
    r"""One retry less in `\retries=NN`, as wide as before: 10 → 09, ` 8` → ` 7`."""
    digits, variable = _retries(entry), _variable(entry, RETRIES)
    if digits is None or variable is None:
        return entry
    padding = " " * (len(variable.value) - len(digits))
    return fill(descriptor, entry, variable.index, padding + _one_less(digits))


def _one_less(digits: str) -> str:
    """Digit by digit, since Python takes no numbers of thousands of digits."""
    head = digits.rstrip("0")
    return head[:-1] + str(int(head[-1]) - 1) + "9" * (len(digits) - len(head))


def _retries(entry: Entry) -> str | None:
    """How many claims are left, in digits; None where nothing bounds them."""
    variable = _variable(entry, RETRIES)
    if variable is None:
        return None
    digits = variable.value.strip(" ")
    return digits if digits.isascii() and digits.isdigit() else None


def _variable(entry: Entry, name: str) -> Variable | None:
    return next((variable for variable in entry.variables if variable.name == name), None)


def _entry_of(descriptor: int, holder: Holder) -> Entry:
    try:
        entry = entry_at(descriptor, holder.offset)
    except (NoSuchEntry, FormatError):
        entry = None
    if entry is None or entry.digest != holder.digest:
        raise Rewritten(f"the message of claim {holder.token} is no longer where it was")
    return entry


def _is_in_place(descriptor: int, holder: Holder) -> bool:
    try:
        _entry_of(descriptor, holder)
    except Rewritten:
        return False
    return True
