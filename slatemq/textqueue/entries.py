r"""What a queue file consists of: entries, and the variables under them.

::

    -first line of the text\n      control, text
     second line\n                 continuation: a newline and the line without its first space
    \n                             a blank line: no part of the text, and ends nothing
    \retries=03  \n               variable: name, value, two reserved bytes
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slatemq.textqueue.controls import CONTROLS, STATES, State
from slatemq.textqueue.errors import BadText, NoSuchVariable
from slatemq.textqueue.pages import NEWLINE, Page, alone

PIECE_LENGTH = 1 << 16
"""Of a long text, which is not to be in memory once more as bytes."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A line of fixed length under an entry.

    Attributes:
        index: Its place under the entry, from 0.
        name: What stands before the first `=`; None without one.
        value: What stands after it, or the whole line, without the reserved spaces at its end.
        offset: Of the value's first byte in the file.
        width: Bytes that the value may have.
    """

    index: int
    name: str | None
    value: str
    offset: int
    width: int


class Entry:
    """A message, a comment, or an entry of a kind that this version does not know.

    Entries are equal when their bytes and their places are. One that a scan has given keeps some
    16 KiB of the file in memory, together with its neighbours; `detached()` does not.

    Attributes:
        text: The text, exactly; lines after the first are joined by newlines.
    """

    # Set by scans without any call: a constructor would take longer than all the rest.
    __slots__ = ("_page", "_place", "text")

    _page: Page
    _place: int
    text: str

    @classmethod
    def of(cls, raw: bytes, offset: int, line: int = 0) -> Entry:
        """An entry by itself; `line` is 0 where nobody has counted."""
        made = cls()
        made._page, made._place = alone(raw, offset, line), 0
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """The text, where nobody has asked for one before."""
            if name != "text":
                raise AttributeError(f"an entry has no {name!r}", name=name, obj=self)
            self.text = self._page.texts[self._place]
            return self.text

    @property
    def raw(self) -> bytes:
        """All its bytes, up to where the next entry begins: blank lines after it included."""
        return self._page.raw(self._place)

    @property
    def offset(self) -> int:
        """Of its first byte in the file."""
        return self._page.offset + self._page.starts[self._place]

    @property
    def line(self) -> int:
        """Of the file, counted from 1; 0 when the entry was read by its offset alone."""
        return self._page.lines[self._place]

    @property
    def control(self) -> str:
        """Its first character."""
        return self.raw[:4].decode(errors="ignore")[0]

    @property
    def state(self) -> State:
        """What the control character says."""
        return STATES.get(self._page.content[self._page.starts[self._place]], State.UNKNOWN)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """In the order of the file."""
        found: list[Variable] = []
        raw, offset = self.raw, self.offset
        place = raw.find(b"\n\\")
        while place >= 0:
            start = place + 2
            end = raw.find(NEWLINE, start)
            content = raw[start:] if end < 0 else raw[start:end]
            found.append(_variable(len(found), content, offset + start))
            place = raw.find(b"\n\\", start)
        return tuple(found)

    @property
    def end(self) -> int:
        """Offset of the byte after it."""
        return self.offset + len(self.raw)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of its text: the same for the same text."""
        text, digest = self.text, hashlib.blake2b(digest_size=8)
        for start in range(0, len(text), PIECE_LENGTH):
            digest.update(text[start : start + PIECE_LENGTH].encode())
        return digest.hexdigest()

    def variable(self, key: str | int) -> Variable:
        """The variable with that index, or the first of that name. Raises NoSuchVariable."""
        for variable in self.variables:
            if key == (variable.name if isinstance(key, str) else variable.index):
                return variable
        raise NoSuchVariable(key)

    def get(self, name: str, default: str = "") -> str:
        """The value of the first variable of that name."""
        try:
            return self.variable(name).value
        except NoSuchVariable:
            return default

    def detached(self) -> Entry:
        """The same, without the piece of the file that it was read with."""
        return Entry.of(self.raw, self.offset, self.line)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entry):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Entry(raw={self.raw!r}, offset={self.offset}, line={self.line})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Entry.of, self._fields()

    def _fields(self) -> tuple[bytes, int, int]:
        return self.raw, self.offset, self.line


def _variable(index: int, content: bytes, offset: int) -> Variable:
    name, equals, value = content.partition(b"=")
    if not equals:
        return Variable(index, None, content.decode().rstrip(" "), offset, len(content))
    start = offset + len(name) + 1
    return Variable(index, name.decode(), value.decode().rstrip(" "), start, len(value))


Variables = Mapping[str, str] | Iterable[str]
"""Of a new entry: values by name, or whole lines (not one alone: that is an iterable of letters).

Spaces at the end are reserved."""


def reserve(width: int, value: str = "") -> str:
    """A value with room for `width` bytes."""
    return value + " " * (width - len(value.encode()))


def render(text: str, variables: Variables = (), state: State = State.QUEUED) -> bytes:
    """The bytes of a new entry, a newline at the end. Raises BadText, ValueError for UNKNOWN.

    Raises TypeError where `variables` is a single text.
    """
    if state not in CONTROLS:
        raise ValueError("entries of unknown kinds cannot be made")
    lines = [CONTROLS[state] + text.replace("\n", "\n ")]
    if isinstance(variables, Mapping):
        for name in variables:
            if "=" in name:
                raise BadText(f"the name of a variable has no '=': {name!r}")
        variables = [f"{name}={value}" for name, value in variables.items()]
    lines += ["\\" + checked_line(content) for content in several(variables, "variables")]
    return encoded("\n".join(lines) + "\n")


def several(texts: Iterable[str], name: str) -> Iterable[str]:
    """The same. Raises TypeError for a single text, each letter of which would be one of them."""
    if isinstance(texts, str | bytes):
        raise TypeError(f"{name} must be several texts, not one alone: put it into a list")
    return texts


def checked_line(content: str) -> str:
    """The same. Raises BadText for a newline, which would end the variable."""
    if "\n" in content:
        raise BadText(f"a variable is one line: {content!r}")
    return content


def encoded(text: str) -> bytes:
    """UTF-8. Raises BadText for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadText(f"not valid text: {error.reason} at character {error.start}") from None
