r"""What a queue file consists of: entries, and the variables under them.

::

    -first line of the text\n      control, text
     second line\n                 continuation: a newline and the line without its first space
    \n                             a blank line: no part of the text, and ends nothing
    \retries=03  \n               variable: name, value, two reserved bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slatemq.textqueue.arguments import of_kind, several, state_of, texts_by_name, width_of
from slatemq.textqueue.controls import CONTROLS, State
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
    64 KiB of the file in memory, together with its neighbours; `detached()` does not.

    Attributes:
        text: The text, exactly; lines after the first are joined by newlines.
    """

    # Set by scans without any call: a constructor would take longer than all the rest.
    __slots__ = ("_page", "_place", "text")

    _page: Page
    _place: int
    text: str

    @classmethod
    def of(cls, raw: bytes, offset: int, line: int = 0, text: str | None = None) -> Entry:
        """An entry by itself; `line` is 0 where nobody has counted, `text` its own if known."""
        made = cls()
        made._page, made._place = alone(raw, offset, line), 0
        if text is not None:
            made.text = text
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
        page = self._page
        return page.state or page.states[self._place]

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
        import hashlib  # with OpenSSL, which no reader needs

        text, digest = self.text, hashlib.blake2b(digest_size=8)
        for start in range(0, len(text), PIECE_LENGTH):
            digest.update(text[start : start + PIECE_LENGTH].encode())
        return digest.hexdigest()

    def variable(self, key: str | int) -> Variable:
        """The variable with that index, or the first of that name. Raises NoSuchVariable."""
        variables = self.variables
        for variable in variables:
            if key == (variable.name if isinstance(key, str) else variable.index):
                return variable
        known = [one.index if one.name is None else one.name for one in variables]
        raise NoSuchVariable(key, known)

    def get(self, name: str, default: str = "") -> str:
        """The value of the first variable of that name."""
        return next((one.value for one in self.variables if one.name == name), default)

    def line_of(self, variable: Variable) -> int:
        """Of the file, counted from 1, on which one of its variables stands; 0 as for `line`."""
        return self.line and self.line + self.raw.count(NEWLINE, 0, variable.offset - self.offset)

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
    """A value with room for `width` bytes. Raises TypeError, and ValueError if it has more."""
    needed = len(encoded(of_kind(value, str, "value")))
    if needed > width_of(width):
        raise ValueError(f"width must be {needed} bytes or more for {value!r:.60}, not {width}")
    return value + " " * (width - needed)


def render(text: str, variables: Variables = (), state: State = State.QUEUED) -> bytes:
    """The bytes of a new entry, a newline at the end. Raises BadText, ValueError for UNKNOWN.

    Raises TypeError for what is no text, and where `variables` is a single one.
    """
    if state_of(state) not in CONTROLS:
        raise ValueError("entries of unknown kinds cannot be made")
    of_kind(text, str, "text")
    if isinstance(variables, Mapping):
        for name in texts_by_name(variables, "variables"):
            if "=" in name:
                raise BadText(f"the name of a variable has no '=': {name!r}")
        variables = [f"{name}={value}" for name, value in variables.items()]
    lines = ["\\" + checked_line(content) for content in several(variables, "variables")]
    below = "\n".join(["", *lines, ""])
    # In one step, of which a long text has as few copies as can be.
    return encoded("".join((CONTROLS[state], text.replace("\n", "\n "), below)))


def checked_line(content: str, name: str = "a variable") -> str:
    """The same. Raises TypeError, and BadText for a newline, which would end the variable."""
    if "\n" in of_kind(content, str, name):
        raise BadText(f"{name} is one line: {content!r}")
    return content


def encoded(text: str) -> bytes:
    """UTF-8. Raises BadText for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadText(f"not valid text: {error.reason} at character {error.start}") from None
