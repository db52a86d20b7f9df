"""What comes out: JSON lines for programs, tables and sentences for people, payloads as they are.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

PIECE_LENGTH = 1 << 16
"""Of a text that is encoded at once."""


def write_bytes(content: bytes) -> None:
    """Bytes to stdout as they are, out of our hands when this returns."""
    _write([content])


def write_json(fields: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own."""
    _write(json_pieces(fields))


def _write(pieces: Iterable[bytes]) -> None:
    sys.stdout.flush()
    stream = sys.stdout.buffer
    stream.writelines(pieces)
    stream.flush()


def json_line(fields: Mapping[str, Any]) -> bytes:
    """One JSON object and a newline; all ASCII, so that no reader splits it elsewhere."""
    return f"{json.dumps(fields, separators=(', ', ': '))}\n".encode()


def json_pieces(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """The same in pieces: a long text is never encoded as a whole."""
    if not any(isinstance(one, str) and len(one) > PIECE_LENGTH for one in fields.values()):
        yield json_line(fields)
        return
    opening = "{"
    for name, value in fields.items():
        yield f"{opening}{json.dumps(name)}: ".encode()
        opening = ", "
        if isinstance(value, str):
            yield b'"'
            for start in range(0, len(value), PIECE_LENGTH):
                yield json.dumps(value[start : start + PIECE_LENGTH])[1:-1].encode()
            yield b'"'
        else:
            yield json.dumps(value, separators=(", ", ": ")).encode()
    yield b"}\n"


def say(text: str) -> None:
    """A result for people."""
    write_bytes(printable(text).encode() + b"\n")


def note(text: str) -> None:
    """Something beside the result, for people."""
    print(f"slatemq: {printable(text)}", file=sys.stderr, flush=True)


def remark(text: str) -> None:
    """A line beside the result, for people, of which several belong together."""
    print(printable(text), file=sys.stderr, flush=True)


CUT_WIDTH = 8
"""Columns that are left of what is cut, however narrow the terminal is."""


def write_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    headed: bool = True,
    cuts: Sequence[str] = (),
) -> None:
    """A table for people; cells that are numbers stand on the right. Without a head: more rows.

    Where a terminal is too narrow, cells of the columns `cuts` are cut, those of the first one
    first. Nothing else is left out or folded: the terminal wraps the lines, and what is copied from
    it is whole.
    """
    # Imported here: only tables need it.
    from rich.cells import cell_len

    cells = [list(row) for row in rows]
    shown = [[printable(str(cell)).replace("\n", "\\n") for cell in row] for row in cells]
    widths = [max(map(cell_len, column)) for column in zip(columns, *shown, strict=True)]
    over = sum(widths) + 2 * (len(columns) - 1) - line_width()
    for place in map(columns.index, cuts):
        least = max(cell_len(columns[place]), CUT_WIDTH)
        width = min(widths[place], max(widths[place] - max(over, 0), least))
        over -= widths[place] - width
        widths[place] = width
        for row in shown:
            row[place] = cut(row[place], width)
    numeric = [
        bool(cells) and all(isinstance(row[place], int) for row in cells)
        for place in range(len(columns))
    ]

    def line(row: Sequence[str]) -> str:
        padded = (
            f"{' ' * room}{cell}" if on_right else f"{cell}{' ' * room}"
            for cell, room, on_right in zip(
                row,
                (width - cell_len(cell) for cell, width in zip(row, widths, strict=True)),
                numeric,
                strict=True,
            )
        )
        return "  ".join(padded).rstrip()

    head = line(columns)
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        head = f"\x1b[1m{head}\x1b[0m"
    lines = [head] if headed else []
    write_bytes("".join(f"{each}\n" for each in (*lines, *map(line, shown))).encode())


def payload_fields(payload: bytes) -> dict[str, str]:
    """A payload for JSON: `payload` when it is UTF-8, else `payload_base64`."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        import base64

        return {"payload_base64": base64.b64encode(payload).decode()}


def printable(text: str) -> str:
    """Text without what would move the cursor or cannot be shown: that is written as escapes."""
    return text if text.isprintable() else text.translate(_Shown())


class _Shown(dict[int, str]):
    """How letters are shown, by their numbers; each is found out once."""

    def __missing__(self, code: int) -> str:
        dead_letter = chr(code)
        if not dead_letter.isprintable() and dead_letter != "\n":
            dead_letter = dead_letter.encode("unicode_escape", "surrogatepass").decode()
        self[code] = dead_letter
        return dead_letter


def line_width() -> int:
    """Columns of a line: the terminal's; without bounds where stdout is not one."""
    if not sys.stdout.isatty():
        return sys.maxsize
    import shutil  # with every kind of compression, which takes longer than a short command

    return shutil.get_terminal_size().columns


def cut(text: str, width: int) -> str:
    """Text of at most so many columns, with … at its end where some of it is left out."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else f"{set_cell_size(text, max(width - 1, 0))}…"
