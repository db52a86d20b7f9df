"""What comes out: JSON lines for programs, tables and sentences for people, payloads as they are.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 1_000_000
"""Into a pipe or a file nothing is folded to the width of a screen."""


def write_bytes(content: bytes) -> None:
    """Bytes to stdout as they are, out of our hands when this returns."""
    sys.stdout.flush()
    stream = sys.stdout.buffer
    stream.write(content)
    stream.flush()


def write_json(fields: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own."""
    write_bytes(json_line(fields))


def json_line(fields: Mapping[str, Any]) -> bytes:
    """One JSON object and a newline; all ASCII, so that no reader splits it elsewhere."""
    return json.dumps(fields, separators=(", ", ": ")).encode() + b"\n"


def say(text: str) -> None:
    """A result for people."""
    write_bytes(printable(text).encode() + b"\n")


def note(text: str) -> None:
    """Something beside the result, for people."""
    print(f"slatemq: {printable(text)}", file=sys.stderr, flush=True)


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """A table for people; cells that are numbers stand on the right, nothing is left out."""
    cells = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for place, name in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[place], int) for row in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    sys.stdout.flush()
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table, soft_wrap=False)
    sys.stdout.flush()


def payload_fields(payload: bytes) -> dict[str, str]:
    """A payload for JSON: `payload` when it is UTF-8, else `payload_base64`."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def printable(text: str) -> str:
    """Text without what would move the cursor or cannot be shown: that is written as escapes."""
    return "".join(
        letter
        if letter.isprintable() or letter == "\n"
        else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text
    )
