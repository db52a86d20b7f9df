"""A YAML file that people write: its values, and the line of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from slatemq.errors import InvalidArgument

T = TypeVar("T")

DOCUMENT_BYTES_MAX = 4 << 20

_NAME = re.compile(r"\b(alias|tag|handle|anchor) ['\"].*", re.DOTALL)
"""Names that the library's errors quote: a password that begins with `*` or `!` is read as one."""

_TEXTS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "merge", "value")}
"""Tags of keys that may be given: of texts, and of `<<` and `=`, which YAML has for itself."""

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError)
"""What the library raises; the last two for a value that its tag does not fit: `!!bool maybe`."""


class Document:
    """A parsed file.

    Attributes:
        values: The mapping that it holds.
    """

    def __init__(
        self, name: str, text: str, field: str = "", *, may_be_empty: bool = False
    ) -> None:
        """Parse a text.

        Args:
            name: Stands in errors for the file.
            text: Its content.
            field: Of errors about the file as a whole.
            may_be_empty: Whether a file without values is taken as an empty mapping.

        Raises:
            InvalidArgument: It is not YAML, not a mapping, or has a key twice or one that is no
                text, such as `on` and `1`.
        """
        self._name = name
        self._lines: dict[str, int] = {}
        self._seen: set[yaml.Node] = set()
        node = None
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            self._collect(node, "")
            values = yaml.safe_load(text)
        except NOT_YAML as error:
            problem = _problem(error, text, node)
            # Without the library's error, which quotes the line: it may have a password.
            raise InvalidArgument(field, f"{name} is not YAML: {problem}") from None
        if values is None and may_be_empty:
            values = {}
        if not isinstance(values, dict):
            raise InvalidArgument(field, f"{name} must hold a mapping")
        self.values: dict[str, Any] = values

    @classmethod
    def read(cls, file: Path, field: str = "", *, may_be_empty: bool = False) -> Document:
        """Raises InvalidArgument where it cannot be read, or is too large, too."""
        try:
            with file.open("rb") as opened:
                data = opened.read(DOCUMENT_BYTES_MAX + 1)
        except OSError as error:
            raise InvalidArgument(field, f"cannot read {file}: {error.strerror}") from error
        if len(data) > DOCUMENT_BYTES_MAX:
            raise InvalidArgument(field, f"{file} has more than {DOCUMENT_BYTES_MAX} bytes")
        try:
            return cls(str(file), data.decode(), field, may_be_empty=may_be_empty)
        except UnicodeDecodeError as error:
            problem = f"{error.reason} at byte {error.start}"
            raise InvalidArgument(field, f"{file} is not UTF-8: {problem}") from None

    def get(self, key: str, empty: Any) -> Any:
        """What the file has at a key; `empty` where it has nothing, or the key alone.

        The key alone is what is left of a list whose last entry was removed.
        """
        value = self.values.get(key)
        return empty if value is None else value

    def convert(self, path: str, value: object, kind: type[T]) -> T:
        """The value at `path` (`issuers[2]`), as this type.

        Raises:
            InvalidArgument: It does not fit, or a key of an entry has no value, as is left of a
                condition whose end was removed; names the key and its line.
        """
        for number, entry in enumerate(value if isinstance(value, list) else ()):
            for key, given in entry.items() if isinstance(entry, dict) else ():
                if given is None:
                    problem = "has no value: give it one, or remove the key"
                    raise self.error(f"{path}[{number}].{key}", problem)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            # As in "Expected `str`, got `int` - at `$[0].queues[1]`".
            problem, _, place = str(error).partition(" - at `$")
            raise self.error(path + place.rstrip("`"), problem) from error

    def line(self, path: str) -> int:
        """The line of the value at `path`, or of the innermost part around it that has one.

        What an alias stands for has the line of the alias. 0: no part of the path has a line.
        """
        place = path
        while place and place not in self._lines:
            outer = re.sub(r"(\.[^.\[\]]*|\[[^\[\]]*\])$|^[^.\[\]]*$", "", place)
            place = outer if outer != place else ""  # a key may have a bracket itself
        return self._lines.get(place, 0)

    def error(self, path: str, problem: str) -> InvalidArgument:
        """An error in the value at `path`, with its `line`."""
        line = self.line(path)
        place = f"line {line} of " if line else ""
        return InvalidArgument(path, f"{problem} ({place}{self._name})")

    def _collect(self, node: yaml.Node | None, path: str) -> None:
        if not isinstance(node, yaml.CollectionNode) or node in self._seen:
            return  # an alias: its content has its lines already, and may be any number of values
        self._seen.add(node)
        if isinstance(node, yaml.SequenceNode):
            for number, part in enumerate(node.value):
                self._lines[f"{path}[{number}]"] = part.start_mark.line + 1
                self._collect(part, f"{path}[{number}]")
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = f"{path}.{key.value}" if path else str(key.value)
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.tag not in _TEXTS:
                problem = "the key must be a text: write it in quotes"
                raise InvalidArgument(name, f"{problem} (line {line} of {self._name})")
            if name in self._lines:
                problem = f"is given twice, in lines {self._lines[name]} and {line}"
                raise InvalidArgument(name, f"{problem} of {self._name}")
            self._lines[name] = line
            self._collect(value, name)


def _problem(error: Exception, text: str, node: yaml.Node | None) -> str:
    """What is wrong, and where, without a word of the text.

    Args:
        error: One of NOT_YAML.
        text: What was parsed.
        node: Its structure, where the values alone are wrong.
    """
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        line, column = before.count("\n"), len(before.rpartition("\n")[2])
        return f"a character that does not print{_place(line, column)}"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.YAMLError) and node is not None:
        mark = next((one.start_mark for one in _scalars(node) if not _has_value(one)), None)
    problem = getattr(error, "problem", None) or "a value is not what its form or tag says"
    return _NAME.sub(r"\1", problem) + (_place(mark.line, mark.column) if mark is not None else "")


def _place(line: int, column: int) -> str:
    """Both count from 0 here, and from 1 in what is said."""
    return f" (line {line + 1}, column {column + 1})"


def _scalars(node: yaml.Node) -> Iterator[yaml.Node]:
    waiting, seen = [node], {node}
    while waiting:
        one = waiting.pop()
        if not isinstance(one, yaml.CollectionNode):
            yield one
            continue
        is_mapping = isinstance(one, yaml.MappingNode)
        below = [part for pair in one.value for part in pair] if is_mapping else one.value
        waiting.extend(part for part in reversed(below) if part not in seen)
        seen.update(below)


def _has_value(scalar: yaml.Node) -> bool:
    try:
        yaml.constructor.SafeConstructor().construct_document(scalar)
    except NOT_YAML:
        return False
    return True
