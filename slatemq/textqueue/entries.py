r"""Entries of a queue file, and the variables below them.

::

    -first line of the text\n      control, text
     second line\n                 continuation: a newline and the line without its first space
    \n                             a blank line: not part of the text, and ends nothing
    \retries=03  \n               variable: name, value, two reserved bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slatemq.textqueue.controls import CONTROLS, State, of_kind, several, state_of, wrong
from slatemq.textqueue.errors import BadText, NoSuchVariable
from slatemq.textqueue.pages import NEWLINE, Page, alone

PIECE_LENGTH = 1 << 16
"""Characters of a long text that are encoded together, to save memory."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A line of fixed length below an entry.

    Attributes:
        index: From 0, among the variables of the entry.
        name: The text before the first `=`; None without one.
        value: The text after it, or the whole line, without the reserved spaces at its end.
        offset: Of the value's first byte in the file.
        width: The most bytes that the value can have.
    """

    index: int
    name: str | None
    value: str
    offset: int
    width: int


class Entry:
    """A message, a comment, or an entry of an unknown kind.

    Entries are equal when their bytes and their places are. An entry of a scan keeps some 64 KiB of
    the file in memory, which it shares with its neighbours; `detached()` does not.

    Attributes:
        text: The exact text; its lines are joined by newlines.
    """

    # Scans set these without a call: a constructor would take longer than all the rest.
    __slots__ = ("_page", "_place", "text")

    _page: Page
    _place: int
    text: str

    @classmethod
    def of(cls, raw: bytes, offset: int, line: int = 0, text: str | None = None) -> Entry:
        """A single entry; `line` is 0 where lines were not counted, `text` its text if known."""
        made = cls()
        made._page, made._place = alone(raw, offset, line), 0
        if text is not None:
            made.text = text
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            if name != "text":
                raise AttributeError(f"an entry has no {name!r}", name=name, obj=self)
            self.text = self._page.texts[self._place]
            return self.text

    @property
    def raw(self) -> bytes:
        """All its bytes, including blank lines after it."""
        return self._page.raw(self._place)

    @property
    def offset(self) -> int:
        """The offset of its first byte in the file."""
        return self._page.offset + self._page.starts[self._place]

    @property
    def line(self) -> int:
        """Its line in the file, from 1; 0 when the entry was read by its offset."""
        return self._page.lines[self._place]

    @property
    def control(self) -> str:
        """Its first character."""
        return self.raw[:4].decode(errors="ignore")[0]

    @property
    def state(self) -> State:
        page = self._page
        return page.state or page.states[self._place]

    @property
    def variables(self) -> tuple[Variable, ...]:
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
        """The offset of the byte after it."""
        return self.offset + len(self.raw)

    @property
    def digest(self) -> str:
        """A hash of its text, 16 hexadecimal digits."""
        import hashlib  # loads OpenSSL, which readers do not need

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
        """The line of one of its variables in the file, from 1; 0 as for `line`."""
        return self.line and self.line + self.raw.count(NEWLINE, 0, variable.offset - self.offset)

    def detached(self) -> Entry:
        """A copy that does not keep the part of the file that it was read with."""
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
"""Variables of a new entry: values by name, or a list of whole lines. Spaces at the end are
reserved."""


def reserve(width: int, value: str = "") -> str:
    """A value with room for `width` bytes. Raises TypeError, ValueError if it is longer."""
    if isinstance(width, bool) or not isinstance(width, int):
        raise wrong("width", "a number of bytes", width)
    if width < 0:
        raise ValueError(f"width must be 0 bytes or more, not {width}")
    needed = len(encoded(of_kind(value, str, "value")))
    if needed > width:
        raise ValueError(f"width must be {needed} bytes or more for {value!r:.60}, not {width}")
    return value + " " * (width - needed)


def render(text: str, variables: Variables = (), state: State = State.QUEUED) -> bytes:
    """The bytes of a new entry, with a newline at the end.

    Raises BadText, ValueError for UNKNOWN, TypeError for arguments of other types.
    """
    if state_of(state) not in CONTROLS:
        raise ValueError("entries of unknown kinds cannot be created: choose another state")
    of_kind(text, str, "text")
    if isinstance(variables, Mapping):
        for name, value in variables.items():
            of_kind(value, str, f"variables[{name!r}]")
            if "=" in of_kind(name, str, "a name in variables"):
                raise BadText(f"the name of a variable must not contain '=': {name!r}")
        variables = [f"{name}={value}" for name, value in variables.items()]
    lines = ["\\" + checked_line(content) for content in several(variables, "variables")]
    below = "\n".join(["", *lines, ""])
    # In one step, to make as few copies of a long text as possible.
    return encoded("".join((CONTROLS[state], text.replace("\n", "\n "), below)))


def checked_line(content: str, name: str = "a variable") -> str:
    """Raises TypeError, BadText for a newline, which would end the variable."""
    if "\n" in of_kind(content, str, name):
        raise BadText(f"{name} must be one line: {content!r}")
    return content


def encoded(text: str) -> bytes:
    """UTF-8. Raises BadText for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadText(f"not valid text: {error.reason} at character {error.start}") from None
