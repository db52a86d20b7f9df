"""Every error of a queue file; what the system refuses (no such file, disk full) stays an OSError.

::

    TextQueueError
    ├── FormatError       the file is not a TextQueue: mend the line that it names
    ├── BadText           text that no line can hold: a newline in a variable, a lone surrogate
    ├── DoesNotFit        the value is longer than what is reserved: shorten it
    ├── NoSuchVariable    the entry has no variable of that name or index
    ├── NoSuchEntry       no entry begins at that offset, or no claim has that token
    ├── NotAMessage       comments and unknown entries cannot be marked
    ├── AlreadyMarked     the message is processed or in error already: nothing was changed
    ├── ClaimLost         the claim ended and somebody else may have the message: drop the work
    ├── Rewritten         somebody rewrote the file: the message is not where it was
    └── Busy              the lock is held by somebody else, and waiting was not wanted

    AppendLost            a warning: what had been appended is no longer in the file
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AlreadyMarked",
    "AppendLost",
    "BadText",
    "Busy",
    "ClaimLost",
    "DoesNotFit",
    "FormatError",
    "NoSuchEntry",
    "NoSuchVariable",
    "NotAMessage",
    "Rewritten",
    "TextQueueError",
]

NAMED_MAX = 5
"""Of variables, or of appends, in one message."""


class TextQueueError(Exception):
    """Base of all errors of queue files; nothing was changed unless the kind says otherwise."""


class FormatError(TextQueueError):
    """The file breaks the format.

    Attributes:
        file: Its name as it was given; empty for bytes.
        line: Counted from 1.
        column: Counted in characters from 1.
        why: The rule that is broken.
        advice: What to do about it.
    """

    def __init__(self, file: str, line: int, column: int, why: str, advice: str) -> None:
        """Name the place, the rule, and what to do."""
        super().__init__(f"{file or '<bytes>'}:{line}:{column}: {why}: {advice}")
        self.file = file
        self.line = line
        self.column = column
        self.why = why
        self.advice = advice

    def at(self, file: str, line: int) -> FormatError:
        """The same, where the lines before it were not counted."""
        return FormatError(file, line, self.column, self.why, self.advice)


class BadText(TextQueueError, ValueError):
    """Text that cannot stand in the file: lone surrogates, or a newline where none may be."""


class DoesNotFit(TextQueueError):
    """The value has more bytes than the variable has reserved.

    Attributes:
        needed_bytes: Of the value in UTF-8.
        reserved_bytes: What there is.
    """

    def __init__(self, name: str, needed_bytes: int, reserved_bytes: int) -> None:
        """Name the variable and both lengths."""
        super().__init__(
            f"variable {name}: the value needs {needed_bytes} bytes, {reserved_bytes} are reserved"
        )
        self.needed_bytes = needed_bytes
        self.reserved_bytes = reserved_bytes


class NoSuchVariable(TextQueueError, KeyError):
    """The entry has no such variable. Variables are made when the message is appended.

    Attributes:
        key: What was looked for.
    """

    def __init__(self, key: str | int, known: Sequence[str | int]) -> None:
        """Name what was looked for, and what is there."""
        named = ", ".join(repr(one) for one in known[:NAMED_MAX])
        there = f"it has {named or 'none'}{', ...' if len(known) > NAMED_MAX else ''}"
        super().__init__(f"the entry has no variable {key!r}: {there}")
        self.key = key

    def __str__(self) -> str:
        return str(self.args[0])


class NoSuchEntry(TextQueueError):
    """Nothing begins there: look with `ls` or `entries()`."""


class NotAMessage(TextQueueError):
    """Comments and entries of unknown kinds are left as they are."""


class AlreadyMarked(TextQueueError):
    """The message is processed (`=`) or in error (`!`) already. Nothing was changed.

    Attributes:
        control: What it is marked with.
    """

    def __init__(self, offset: int, control: str) -> None:
        """Name the message by its offset."""
        super().__init__(f"the message at offset {offset} is marked {control!r} already")
        self.control = control


class ClaimLost(TextQueueError):
    """The claim has ended: it ran out of time and was given to another, or was finished."""


class Rewritten(TextQueueError):
    """The file was rewritten, by an editor or a compaction: read again.

    A message that was to be marked was not; if it is still in the file, it will come again.
    """


class Busy(TextQueueError):
    """Somebody else holds the lock of the file."""


class AppendLost(UserWarning):
    """Messages that were appended are no longer in the file.

    An editor has saved a copy that it had read before they were there; or somebody has deleted
    them, or changed their texts. The next call that appends, claims, compacts or checks tells it,
    once, and goes on.

    Attributes:
        count: Of the messages that are gone, as far as the list of appends goes back.
        appends: Of each append that is gone, where its last message was, and how that begins.
    """

    def __init__(self, file: str, count: int, appends: tuple[tuple[int, str], ...]) -> None:
        """Name the first few."""
        named = ", ".join(f"{start!r} at offset {offset}" for offset, start in appends[:NAMED_MAX])
        more = ", ..." if len(appends) > NAMED_MAX else ""
        super().__init__(
            f"{file}: {count} appended messages are no longer in the file; an editor has saved "
            f"an older copy, or they were deleted: {named}{more}"
        )
        self.count = count
        self.appends = appends
