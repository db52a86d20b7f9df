"""The queue: the interface for programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from slatemq.textqueue.claiming import ERROR, Claimer, clear_slot
from slatemq.textqueue.compacting import Compacted, compact
from slatemq.textqueue.controls import CONTROLS, State, of_kind, several, state_of, wrong
from slatemq.textqueue.editing import again, fill, fitted, mark, queued
from slatemq.textqueue.entries import Entry, Variable, Variables, render
from slatemq.textqueue.errors import TextQueueError
from slatemq.textqueue.files import QueueFile

LEASE = timedelta(minutes=5)
"""Of a claim. Long, because a crash of a worker on the same machine ends its claims anyway."""

WRITE_BYTES = 1 << 20
"""Of messages that are appended with one write."""


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _milliseconds(lease: timedelta) -> int:
    """A lease in milliseconds. Raises TypeError, ValueError."""
    if not isinstance(lease, timedelta):
        raise wrong("lease", "a timedelta, such as timedelta(minutes=5)", lease)
    if lease < timedelta(milliseconds=1):
        raise ValueError(f"lease must be a millisecond or more, not {lease}")
    return lease // timedelta(milliseconds=1)


class TextQueue:
    """A queue file. Nothing is open between calls; threads and processes can share the file.

    Iterating yields the queued messages. Raises FormatError where the file breaks the format, and
    OSError where the system refuses.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fsync: bool = False,
        strict: bool = False,
        owner: str = "",
        clock_ms: Callable[[], int] = wall_ms,
    ) -> None:
        """A queue file, which the first append creates.

        Args:
            path: Its path. A link stays a link; the sidecar is beside its target.
            fsync: Write each change to the disk before the call returns.
            strict: Refuse unknown control characters; else such entries are skipped, and kept.
            owner: A name of the worker, for people.
            clock_ms: Unix time, by which claims end; all processes that share the file must agree.
        """
        self._file = QueueFile(path, fsync, strict)
        self._clock_ms = clock_ms
        self._claimer = Claimer(self._file, owner, clock_ms)

    @property
    def path(self) -> str:
        """The file, absolute, links resolved."""
        return self._file.path

    def __iter__(self) -> Iterator[Entry]:
        return self.entries()

    def entries(self, *states: State, hold_back: bool = False) -> Iterator[Entry]:
        """Entries in these states, in order; without states, the queued messages.

        Before the last entry it waits for an unfinished append. With `hold_back` it never waits,
        and omits the last entry, which a writer without our lock may still be writing.
        """
        states = tuple(map(state_of, states))
        if State.UNKNOWN in states:
            every = self._file.entries(hold_back=hold_back)
            if set(states) == set(State):
                return every
            return (entry for entry in every if entry.state in states)
        wanted = "".join(CONTROLS[state] for state in states or (State.QUEUED,))
        return self._file.entries(hold_back=hold_back, controls=wanted.encode())

    def texts(self, *states: State, hold_back: bool = False) -> Iterator[str]:
        """Only the texts of `entries`: up to three times as fast."""
        return self._file.texts(tuple(map(state_of, states)) or (State.QUEUED,), hold_back)

    def entry(self, offset: int) -> Entry:
        """The entry that begins at that byte. Raises NoSuchEntry."""
        return self._file.entry(of_kind(offset, int, "offset"))

    def append(self, text: str, variables: Variables = (), *, state: State = State.QUEUED) -> Entry:
        """Append one message (or comment), with one write. Raises BadText.

        Variables are values by name, or a list of whole lines. Reserve room for values that are set
        later: `{"retries": "03", "error": reserve(20)}`.
        """
        content = render(text, variables, state)
        offset = self._file.append(content, self._clock_ms(), text=text)
        return Entry.of(content, offset, text=text)

    def append_all(self, texts: Iterable[str], variables: Variables = ()) -> int:
        """Append messages, about a mebibyte in a write; return their number. Raises BadText.

        Raises TypeError where `texts` or `variables` is a single text.
        """
        texts = several(texts, "texts")
        kept = variables
        if not isinstance(variables, Mapping):
            kept = list(several(variables, "variables"))
        count, written, last, buffer = 0, 0, 0, bytearray()
        for text in texts:
            last = len(buffer)
            buffer += render(text, kept)
            count += 1
            if len(buffer) >= WRITE_BYTES:
                self._file.append(bytes(buffer), self._clock_ms(), last, count - written)
                written = count
                buffer.clear()
        if buffer:
            self._file.append(bytes(buffer), self._clock_ms(), last, count - written)
        return count

    def has_all_appends(self) -> bool:
        """Whether all appended messages are still in the file; warns once of AppendLost if not.

        Appending, claiming and compacting check this, too. Compacted messages do not count as lost.
        """
        return self._file.has_all_appends()

    def done(self, entry: Entry) -> Entry:
        """Mark a queued message as processed. Raises AlreadyMarked, Rewritten."""
        return self._change(entry, lambda descriptor: mark(descriptor, entry, State.PROCESSED))

    def fail(self, entry: Entry, code: str = "") -> Entry:
        r"""Mark a queued message as an error; the code goes into its `\error=`, if it has one.

        Raises AlreadyMarked, Rewritten, DoesNotFit; then nothing was changed.
        """
        return self._change(entry, lambda descriptor: _fail(descriptor, entry, code))

    def set_variable(self, entry: Entry, key: str | int, value: str) -> Entry:
        """Write a variable's value into its reserved bytes.

        Raises DoesNotFit, NoSuchVariable, BadText, Rewritten.
        """
        return self._change(entry, lambda descriptor: fill(descriptor, entry, key, value))

    def _change(self, entry: Entry, change: Callable[[int], Entry]) -> Entry:
        of_kind(entry, Entry, "entry")
        return self._file.change(change)

    def claim(self, lease: timedelta = LEASE, *, tied: bool = True) -> Claim | None:
        r"""Claim the first queued message that is not claimed; None when there is none.

        Counts `\retries=NN` down, if the message has it; one without retries left becomes an error,
        and the next is taken. The claim ends with its lease, or, if `tied`, with this process.
        """
        taken = self._claimer.claim(_milliseconds(lease), tied)
        if taken is None:
            return None
        entry, holder = taken
        return Claim(self, entry, holder.token, holder.deadline_ms)

    def claimed(self, token: str) -> Claim:
        """A claim of any process, by its token. Raises ClaimLost, Rewritten; then it has ended."""
        entry, holder = self._claimer.find(of_kind(token, str, "token"))
        return Claim(self, entry, token, holder.deadline_ms)

    def claimed_offsets(self) -> frozenset[int]:
        """The offsets of claimed messages, which do not change under `lock()`."""
        return self._claimer.offsets()

    @contextmanager
    def lock(self, *, wait: bool = True) -> Iterator[None]:
        """Lock the whole file for this thread. Raises Busy without `wait`."""
        # In the order of a claim: the threads of this queue, then the file.
        with self._claimer.threads(wait), self._file.lock(wait):
            yield

    def compact(self, *, errors: bool = False) -> Compacted:
        """Remove processed messages, and with `errors` those in error; all others are kept.

        Claims stay valid, except those of removed messages. Raises Rewritten, with nothing changed,
        when the file was written to without the lock.
        """
        drop = {State.PROCESSED, State.ERROR} if errors else {State.PROCESSED}
        return compact(self._file, drop, self._clock_ms())


@dataclass
class Claim:
    """A message that is yours until `deadline_ms`.

    As a context manager it marks the message as processed, or releases it after an exception,
    unless it was finished before.

    Attributes:
        queue: The queue that the message is in.
        entry: The message, its retries counted down.
        token: Identifies the claim to other processes.
        deadline_ms: Unix time at which others can claim the message.
    """

    queue: TextQueue
    entry: Entry
    token: str
    deadline_ms: int
    finished: bool = False

    @property
    def text(self) -> str:
        return self.entry.text

    @property
    def variables(self) -> tuple[Variable, ...]:
        return self.entry.variables

    def done(self) -> None:
        """Mark it as processed. Raises ClaimLost, AlreadyMarked, Rewritten."""
        self._finish(lambda descriptor, entry: mark(descriptor, entry, State.PROCESSED))

    def fail(self, code: str = "") -> None:
        r"""Mark it as an error; the code goes into its `\error=`, if it has one.

        Raises ClaimLost, AlreadyMarked, Rewritten, DoesNotFit; after the last it is still yours.
        """
        self._finish(lambda descriptor, entry: _fail(descriptor, entry, code))

    def release(self) -> None:
        """Release it, still queued. Raises ClaimLost, Rewritten."""
        self._finish(lambda descriptor, entry: clear_slot(descriptor, entry, self.token))

    def extend(self, lease: timedelta = LEASE) -> None:
        """Extend the claim to `lease` from now. Raises ClaimLost, Rewritten."""
        with self.queue._claimer.held(self.token) as (_, holders, holder):
            self.deadline_ms = self.queue._clock_ms() + _milliseconds(lease)
            holders.extend(holder, self.deadline_ms)

    def set_variable(self, key: str | int, value: str) -> None:
        """Set a variable. Raises ClaimLost, DoesNotFit, NoSuchVariable, BadText, Rewritten."""
        with self.queue._claimer.held(self.token) as (descriptor, _, holder):
            entry = Entry.of(self.entry.raw, holder.offset, self.entry.line)
            self.entry = fill(descriptor, entry, key, value)
            self.queue._file.sync(descriptor)
            self.queue._file.verify(descriptor, self.entry)

    def _finish(self, change: Callable[[int, Entry], Entry]) -> None:
        self.entry = self.queue._claimer.finish(self.token, self.entry, change)
        self.finished = True

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.finished:
            return
        if error is None:
            self.done()
        else:
            # The first exception matters more than a lost claim.
            with suppress(TextQueueError):
                self.release()


def _fail(descriptor: int, entry: Entry, code: str) -> Entry:
    of_kind(code, str, "code")
    entry = queued(again(descriptor, entry))
    variable = next((one for one in entry.variables if one.name == ERROR), None)
    if code and variable is not None:
        # Checked before anything is written; and written first, so that no `!` lacks its code.
        fitted(variable, code)
        entry = fill(descriptor, entry, variable.index, code)
    return mark(descriptor, entry, State.ERROR)
