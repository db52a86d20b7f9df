"""What an edited export of dead letters asks for, one at a time, in constant memory.

-   comes back; with another text or other headers: is replaced by a new message
=   is dropped
!   stays, as do those that are commented out, or no longer in the file
#   without an ID: a note on the dead letter below it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from slatemq import textqueue
from slatemq._admin.entry_models import Entry
from slatemq._admin.settling import (
    DropDeadLetter,
    NoteDeadLetter,
    RedriveDeadLetter,
    ReplaceDeadLetter,
    Settlement,
)
from slatemq._consume.handles import message_of_handle, queue_of_handle
from slatemq.cli.failures import BadInput
from slatemq.cli.files.queue_files import SLATEMQ, Content, content_of
from slatemq.errors import InvalidArgument
from slatemq.models import cut_reason
from slatemq.textqueue import State, TextQueue

_CONTINUATION = "indent continued lines by a space"
"""The most frequent mistake: an edited second line is not indented, and has the variables."""


_ACTIONS: dict[type, str] = {
    RedriveDeadLetter: "redrive",
    DropDeadLetter: "drop",
    ReplaceDeadLetter: "replace",
    NoteDeadLetter: "note",
    type(None): "none",
}


@dataclass(frozen=True, slots=True)
class PlannedSettlement:
    """What the file asks for one dead letter.

    Attributes:
        offset: Of the entry in the file.
        line: Of the entry in the file.
        notes: The comments above it, those of its history included.
        settlement: What to do; None when it stays, apart from new notes.
        problem: Why it cannot be done; empty when it can.
        now: The entry as it is now, where the broker was asked.
        is_done: It was done before.
    """

    file: str
    offset: int
    line: int
    content: Content
    notes: tuple[str, ...]
    settlement: Settlement | None = None
    problem: str = ""
    now: Entry | None = None
    is_done: bool = False

    @property
    def action(self) -> str:
        return _ACTIONS[type(self.settlement)]

    @property
    def name(self) -> str:
        return f"line {self.line}, message {self.content.message_id or 'without an ID'}"


def steps(file: str, queue_id: str) -> Iterator[PlannedSettlement]:
    """The steps of a file, in its order. Raises FormatError, BadInput, OSError."""
    notes: list[str] = []
    for entry in TextQueue(file).entries(*State):
        names = {one.name for one in entry.variables}
        if entry.state is State.COMMENT and "id" not in names:
            if SLATEMQ not in names:
                notes.append(note_text(entry.text))
            continue
        step = _step(entry, file, queue_id, tuple(note for note in notes if note))
        notes = []
        if step is not None:
            yield step


def session_of(file: str) -> str:
    """The session of an export, from the comment at its head; empty when that is gone."""
    for entry in TextQueue(file).entries(State.COMMENT):
        if any(one.name == SLATEMQ for one in entry.variables):
            return entry.get("session")
    return ""


def note_text(text: str) -> str:
    """A comment as a note: its lines stripped, cut to the length of a note."""
    return cut_reason("\n".join(line.strip() for line in text.split("\n")).strip())


def with_note(settlement: Settlement | None, content: Content, note: str) -> Settlement | None:
    """The settlement with a note; without a settlement, one that only notes."""
    if settlement is not None:
        return replace(settlement, note=note)
    return NoteDeadLetter(content.handle, note) if note else None


def _step(
    entry: textqueue.Entry, file: str, queue_id: str, notes: tuple[str, ...]
) -> PlannedSettlement | None:
    place = (file, entry.offset, entry.line)
    if entry.state is State.UNKNOWN and entry.get("handle"):
        content = Content(b"", {}, handle=entry.get("handle"))
        return PlannedSettlement(
            *place,
            content,
            notes,
            problem=f"{entry.control!r} is not a known mark: {_CONTINUATION}",
        )
    if entry.state in (State.COMMENT, State.UNKNOWN):
        # It stays, even if its text was changed.
        content = Content(b"", {}, handle=entry.get("handle"))
        return PlannedSettlement(*place, content, notes) if notes and content.handle else None
    try:
        step = PlannedSettlement(*place, content_of(entry, file), notes)
    except BadInput as error:
        return PlannedSettlement(*place, Content(b"", {}), notes, problem=str(error))
    content = step.content
    if entry.state is State.ERROR:
        if not content.handle:
            return _stopped(step, f"it has no handle of a dead letter: {_CONTINUATION}")
        if content.digest and content.is_edited:
            return _stopped(
                step, "it was edited, but still begins with !: change that to - to send it"
            )
        return step
    if not content.handle:
        return _stopped(step, "it has no handle of a dead letter: `slatemq import` imports it")
    named_queue_id, named_id = _named(content.handle)
    if named_queue_id != queue_id:
        return _stopped(step, f"it belongs to another queue: {content.handle}")
    if content.message_id not in (0, named_id):
        return _stopped(step, f"its id is not {named_id}, as in its handle: restore the edited one")
    if entry.state is State.PROCESSED:
        return replace(step, settlement=DropDeadLetter(content.handle))
    if content.is_gone:
        return _stopped(step, "the message is no longer stored: it can only be dropped (=)")
    if not content.digest:
        return _stopped(
            step, "its variable content is missing, so edits cannot be detected: restore it"
        )
    if content.is_edited:
        settlement = ReplaceDeadLetter(content.handle, content.payload, content.headers)
        return replace(step, settlement=settlement)
    return replace(step, settlement=RedriveDeadLetter(content.handle))


def _named(handle: str) -> tuple[str, int]:
    """The queue and the message ID in a handle; empty and 0 where it is not valid."""
    queue_id, message_id = "", 0
    with suppress(InvalidArgument):
        queue_id = queue_of_handle(handle)
        message_id = message_of_handle(handle)
    return queue_id, message_id


def _stopped(step: PlannedSettlement, why: str) -> PlannedSettlement:
    return replace(step, problem=why)
