"""What an edited export of dead letters asks for: letter by letter, without anything in memory.

-   comes back; with another text or other headers: is replaced by a new message
=   is dropped
!   stays, as do letters that are commented out, or not in the file any more
#   without an ID: a note on the letter below it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from slatemq import textqueue
from slatemq._admin.settling import (
    DropDeadLetter,
    NoteDeadLetter,
    RedriveDeadLetter,
    ReplaceDeadLetter,
    Settlement,
)
from slatemq._consume.handles import message_of_handle, queue_of_handle
from slatemq._rpc.bounds import cut_reason
from slatemq.cli.failures import BadInput
from slatemq.cli.files.queue_files import SLATEMQ, Content, content_of
from slatemq.errors import InvalidArgument
from slatemq.textqueue import State, TextQueue

_GOES_ON = "a line that goes on begins with a space"
"""What has most often become of a letter that was edited: its second line has its variables."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the file asks for one letter.

    Attributes:
        file: Where it stands.
        offset: Of the entry.
        line: Of the entry.
        notes: What stands above it as comments, those of its history included.
        settlement: What to do; None when it is left alone but for new notes.
        problem: Why it cannot be done; empty when it can.
    """

    file: str
    offset: int
    line: int
    content: Content
    notes: tuple[str, ...]
    settlement: Settlement | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"line {self.line}, message {self.content.message_id or 'without an ID'}"


def steps(file: str, queue_id: str) -> Iterator[Step]:
    """What the file asks for, in its order. Raises FormatError, BadInput, OSError."""
    notes: list[str] = []
    for entry in TextQueue(file).entries(*State):
        if entry.state is State.COMMENT and not _is_dead_letter(entry):
            if not any(one.name == SLATEMQ for one in entry.variables):
                notes.append(note_text(entry.text))
            continue
        step = _step(entry, file, queue_id, tuple(note for note in notes if note))
        notes = []
        if step is not None:
            yield step


def session_of(file: str) -> str:
    """What names an export, in the comment at its head; empty when that is gone."""
    for entry in TextQueue(file).entries(State.COMMENT):
        if any(one.name == SLATEMQ for one in entry.variables):
            return entry.get("session")
    return ""


def note_text(text: str) -> str:
    """A comment as a note: without the spaces around its lines, and as long as notes may be."""
    return cut_reason("\n".join(line.strip() for line in text.split("\n")).strip())


def with_note(settlement: Settlement | None, content: Content, note: str) -> Settlement | None:
    """The settlement with a note; what is left alone gets one that only notes."""
    match settlement:
        case RedriveDeadLetter():
            return RedriveDeadLetter(settlement.handle, note)
        case DropDeadLetter():
            return DropDeadLetter(settlement.handle, note)
        case ReplaceDeadLetter():
            return ReplaceDeadLetter(
                settlement.handle, settlement.payload, settlement.headers, note
            )
    return NoteDeadLetter(content.handle, note) if note else None


def _is_dead_letter(entry: textqueue.Entry) -> bool:
    return any(one.name == "id" for one in entry.variables)


def _step(entry: textqueue.Entry, file: str, queue_id: str, notes: tuple[str, ...]) -> Step | None:
    place = (file, entry.offset, entry.line)
    if entry.state is State.UNKNOWN and entry.get("handle"):
        content = Content(b"", {}, handle=entry.get("handle"))
        return Step(*place, content, notes, problem=f"{entry.control!r} says nothing: {_GOES_ON}")
    if entry.state in (State.COMMENT, State.UNKNOWN):
        # Left alone, whatever has become of its text.
        content = Content(b"", {}, handle=entry.get("handle"))
        return Step(*place, content, notes) if notes and content.handle else None
    try:
        step = Step(*place, content_of(entry, file), notes)
    except BadInput as error:
        return Step(*place, Content(b"", {}), notes, problem=str(error))
    content = step.content
    if entry.state is State.ERROR:
        if not content.handle:
            return _stopped(step, f"it has no handle, so it is no letter of a queue: {_GOES_ON}")
        if content.digest and content.is_edited:
            return _stopped(step, "it was edited, and still has its !: make that a - to send it")
        return step
    if not content.handle:
        return _stopped(step, "it has no handle, so it is no letter of a queue: import it")
    named_queue_id, named_id = _named(content.handle)
    if named_queue_id != queue_id:
        return _stopped(step, f"it is of another queue: {content.handle}")
    if content.message_id not in (0, named_id):
        return _stopped(step, f"its id is not the {named_id} of its handle: one of them was edited")
    if entry.state is State.PROCESSED:
        return _asks(step, DropDeadLetter(content.handle))
    if content.is_gone:
        return _stopped(step, "the message is not stored any more: it can only be dropped (=)")
    if not content.digest:
        return _stopped(step, "the variable content is gone: nobody knows whether it was edited")
    if content.is_edited:
        return _asks(step, ReplaceDeadLetter(content.handle, content.payload, content.headers))
    return _asks(step, RedriveDeadLetter(content.handle))


def _named(handle: str) -> tuple[str, int]:
    """The queue and the message ID that a handle names; empty and 0 where it names none."""
    queue_id, message_id = "", 0
    with suppress(InvalidArgument):
        queue_id = queue_of_handle(handle)
        message_id = message_of_handle(handle)
    return queue_id, message_id


def _asks(step: Step, settlement: Settlement) -> Step:
    return replace(step, settlement=settlement)


def _stopped(step: Step, why: str) -> Step:
    return replace(step, problem=why)
