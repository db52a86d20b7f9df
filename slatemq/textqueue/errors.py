"""The errors of queue files; what the system refuses (no such file, disk full) is an OSError.

::

    TextQueueError
    ├── FormatError       the file is not a TextQueue: fix the line that it names
    ├── BadText           text that no line can hold: a newline in a variable, a lone surrogate
    ├── DoesNotFit        the value is longer than the reserved room: shorten it
    ├── NoSuchVariable    the entry has no variable of that name or index
    ├── NoSuchEntry       no entry begins at that offset
    ├── NotAMessage       comments and unknown entries cannot be marked
    ├── AlreadyMarked     the message is processed or in error already: nothing was changed
    ├── ClaimLost         the claim ended and another worker may have the message: drop the work
    ├── Rewritten         the file was rewritten: the message is not where it was
    └── Busy              another process or thread holds the lock, and `wait` was False

    AppendLost            a warning: appended messages are no longer in the file
"""

from __future__ import annotations

from collections.abc import Sequence

NAMED_MAX = 5
"""Variables, or appends, that one error names."""


class TextQueueError(Exception):
    """Base of all errors of queue files; nothing was changed unless the kind says otherwise."""


class FormatError(TextQueueError):
    """The file breaks the format.

    Attributes:
        file: The name given by the caller; empty for bytes.
        line: From 1.
        column: In characters, from 1.
        why: The broken rule.
        advice: What to do about it.
    """

    def __init__(self, file: str, line: int, column: int, why: str, advice: str) -> None:
        super().__init__(f"{file or '<bytes>'}:{line}:{column}: {why}: {advice}")
        self.file = file
        self.line = line
        self.column = column
        self.why = why
        self.advice = advice

    def at(self, file: str, line: int) -> FormatError:
        """The error with another file name and line."""
        return FormatError(file, line, self.column, self.why, self.advice)


class BadText(TextQueueError, ValueError):
    """Text that the file cannot hold: lone surrogates, or a newline in a variable."""


class DoesNotFit(TextQueueError):
    """The value has more bytes than the variable has reserved.

    Attributes:
        needed_bytes: Of the value in UTF-8.
        reserved_bytes: Of the variable.
    """

    def __init__(self, name: str, needed_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"variable {name}: the value needs {needed_bytes} bytes, {reserved_bytes} are reserved"
        )
        self.needed_bytes = needed_bytes
        self.reserved_bytes = reserved_bytes


class NoSuchVariable(TextQueueError, KeyError):
    """The entry has no such variable. Variables are created when the message is appended.

    Attributes:
        key: The name or index.
    """

    def __init__(self, key: str | int, known: Sequence[str | int]) -> None:
        named = ", ".join(repr(one) for one in known[:NAMED_MAX])
        there = f"it has {named or 'none'}{', ...' if len(known) > NAMED_MAX else ''}"
        super().__init__(f"the entry has no variable {key!r}: {there}")
        self.key = key

    def __str__(self) -> str:
        return str(self.args[0])


class NoSuchEntry(TextQueueError):
    """No entry begins there: list the offsets with `tq ls` or `entries()`."""


class NotAMessage(TextQueueError):
    """Comments and entries of unknown kinds cannot be changed."""


class AlreadyMarked(TextQueueError):
    """The message is processed (`=`) or in error (`!`) already. Nothing was changed.

    Attributes:
        control: Its mark.
    """

    def __init__(self, offset: int, control: str) -> None:
        super().__init__(f"the message at offset {offset} is marked {control!r} already")
        self.control = control


class ClaimLost(TextQueueError):
    """The claim has ended: it timed out and another worker has the message, or it was finished."""


class Rewritten(TextQueueError):
    """The file was rewritten, by an editor or a compaction: read again.

    The message was not marked; if it is still in the file, it will be claimed again.
    """


class Busy(TextQueueError):
    """Another process or thread holds the lock of the file."""


class AppendLost(UserWarning):
    """Appended messages are no longer in the file.

    An editor has saved a copy that it had read before, or they were deleted or changed. The next
    call that appends, claims, compacts or checks warns once, and continues.

    Attributes:
        count: Of the lost messages, as far as the list of appends goes back.
        appends: For each lost append, the offset of its last message, and how that begins.
    """

    def __init__(self, file: str, count: int, appends: tuple[tuple[int, str], ...]) -> None:
        named = ", ".join(f"{start!r} at offset {offset}" for offset, start in appends[:NAMED_MAX])
        more = ", ..." if len(appends) > NAMED_MAX else ""
        super().__init__(
            f"{file}: {count} appended messages are no longer in the file; an editor has saved "
            f"an older copy, or they were deleted: {named}{more}"
        )
        self.count = count
        self.appends = appends
