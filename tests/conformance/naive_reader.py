"""The format read a second time, line by line and without any cleverness; it made the corpus.

It shares nothing with `slatemq.textqueue`; both must say the same of every file.

    python -m tests.conformance.naive_reader FILE.tq      prints the JSON that a reader must give
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STATES = {"-": "queued", "=": "processed", "!": "error", "#": "comment"}


class Broken(Exception):
    """The file breaks the format, at this line and column."""

    def __init__(self, line: int, column: int, rule: str) -> None:
        super().__init__(line, column, rule)
        self.fields = {"line": line, "column": column, "rule": rule}


def read(content: bytes, *, strict: bool = False) -> list[dict[str, Any]]:
    """The entries of a file; raises Broken."""
    entries: list[dict[str, Any]] = []
    offset = 0
    for number, raw in enumerate(content.split(b"\n"), 1):
        _read_line(entries, number, offset, raw, strict)
        offset += len(raw) + 1
    return entries


def _read_line(
    entries: list[dict[str, Any]], number: int, offset: int, raw: bytes, strict: bool
) -> None:
    if not raw:
        return
    if raw[:1] in (b" ", b"\\") and not entries:
        raise Broken(number, 1, "nothing above")
    if raw[:1] == b" " and entries[-1]["variables"]:
        raise Broken(number, 1, "continuation after variable")
    if strict and _control(number, raw) not in (*STATES, " ", "\\"):
        raise Broken(number, 1, "unknown control")
    text = _decoded(number, raw)
    control, rest = text[0], text[1:]
    if control == " ":
        entries[-1]["text"] += "\n" + rest
    elif control == "\\":
        entries[-1]["variables"].append(_variable(entries[-1], rest, offset + 1))
    else:
        entries.append(
            {
                "line": number,
                "offset": offset,
                "control": control,
                "state": STATES.get(control, "unknown"),
                "text": rest,
                "variables": [],
            }
        )


def _control(number: int, raw: bytes) -> str:
    """The first character of a line."""
    for length in range(1, 5):
        try:
            return raw[:length].decode()
        except UnicodeDecodeError:
            pass
    raise Broken(number, 1, "not UTF-8")


def _decoded(number: int, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Broken(number, len(raw[: error.start].decode()) + 1, "not UTF-8") from None


def _variable(entry: dict[str, Any], rest: str, offset: int) -> dict[str, Any]:
    name, equals, value = rest.partition("=")
    if not equals:
        name, value = "", rest
    start = offset + len(name.encode()) + len(equals)
    return {
        "index": len(entry["variables"]),
        "name": name if equals else None,
        "value": value.rstrip(" "),
        "offset": start,
        "reserved_bytes": len(value.encode()),
    }


def expected(content: bytes) -> dict[str, Any]:
    """What the corpus says of a file: see docs/reference/textqueue-corpus.md."""
    found: dict[str, Any] = {}
    for name, strict in (("lenient", False), ("strict", True)):
        try:
            found[name] = {"entries": read(content, strict=strict)}
        except Broken as broken:
            found[name] = {"error": broken.fields}
    if found["strict"] == found["lenient"]:
        found["strict"] = "as lenient"
    return found


if __name__ == "__main__":
    dumps = json.dumps(expected(Path(sys.argv[1]).read_bytes()), indent=1)
    sys.stdout.write(dumps + "\n")
