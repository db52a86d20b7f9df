"""From lines to operations: what was asked, what came of it, and between which times."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

NEVER: Final = 1 << 62
"""The end of an operation that has none, in ns."""

OK, FAIL, INFO = "ok", "fail", "info"

FUNCTIONS: Final = frozenset(
    {
        "ack",
        "claim",
        "clock",
        "create-queue",
        "delete-queue",
        "drain",
        "execute",
        "extend",
        "move",
        "nack",
        "pause",
        "publish",
        "purge",
        "redrive",
        "resume",
        "trouble",
        "update-queue",
    }
)


class Malformed(ValueError):
    """A line that is not of the format, with its file and number."""


@dataclass(slots=True)
class Operation:
    """One call of a client.

    Attributes:
        process: Who called; has one operation at a time.
        began, ended: In ns of a clock that all lines share; NEVER: nothing came back.
        outcome: `ok`: it took effect; `fail`: it did not; `info`: not known.
        value: What was asked.
        result: What came back with `ok`.
        number: Its place among all that began, as the files have them.
    """

    process: str
    f: str
    began: int
    value: Mapping[str, Any]
    ended: int = NEVER
    outcome: str = INFO
    result: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0

    @property
    def may_have_happened(self) -> bool:
        return self.outcome != FAIL


def read(files: Iterable[Path]) -> list[Operation]:
    """All operations of the files, in the order of their beginnings.

    A last line that was cut off is left out: its writer was killed. Raises Malformed.
    """
    return sorted(operations(files), key=lambda one: (one.began, one.number))


def operations(files: Iterable[Path]) -> Iterator[Operation]:
    """The same one after the other, each when it has ended, and those without an end at last."""
    numbers = itertools.count()
    for file in files:
        yield from _paired(_lines(file), numbers)


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # JSON may have other ends of lines in its texts.
    with file.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            place = f"{file}:{number}"
            try:
                parsed = json.loads(line)
            except ValueError as error:
                raise Malformed(f"{place}: not JSON: {error}") from None
            if not isinstance(parsed, dict):
                raise Malformed(f"{place}: must be an object")
            yield place, parsed


def _paired(
    lines: Iterable[tuple[str, dict[str, Any]]], numbers: Iterator[int]
) -> Iterator[Operation]:
    open_: dict[str, Operation] = {}
    for place, line in lines:
        try:
            time, process, kind, f = line["time"], line["process"], line["type"], line["f"]
        except KeyError as error:
            raise Malformed(f"{place}: has no {error}") from None
        if not isinstance(time, int):
            raise Malformed(f"{place}: time is {time!r}, and must be in whole ns")
        if f not in FUNCTIONS:
            raise Malformed(f"{place}: f is {f!r}, and must be one of {', '.join(FUNCTIONS)}")
        if kind == "invoke":
            if process in open_:
                raise Malformed(f"{place}: process {process} has not ended its {open_[process].f}")
            value = line.get("value", {})
            open_[process] = Operation(process, f, time, value, number=next(numbers))
            continue
        if kind not in (OK, FAIL, INFO):
            raise Malformed(f"{place}: type is {kind!r}, and must be invoke, ok, fail or info")
        operation = open_.pop(process, None)
        if operation is None or operation.f != f:
            raise Malformed(f"{place}: process {process} has not begun a {f}")
        operation.outcome = kind
        operation.result = line.get("value", {})
        # What is not known may still happen later.
        operation.ended = NEVER if kind == INFO else time
        yield operation
    yield from open_.values()
