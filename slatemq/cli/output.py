"""Output: JSON lines for programs, tables and sentences for people, payloads unchanged, progress.

Results go to stdout, everything else to stderr. rich is loaded only for what needs it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

PIECE_LENGTH = 1 << 16
"""Characters of a long text that are encoded together."""


def write_bytes(content: bytes) -> None:
    """Write bytes to stdout unchanged, flushed when this returns."""
    _write([content])


def write_json(fields: Mapping[str, Any]) -> None:
    _write(json_pieces(fields))


def _write(pieces: Iterable[bytes]) -> None:
    sys.stdout.flush()
    stream = sys.stdout.buffer
    stream.writelines(pieces)
    stream.flush()


def json_line(fields: Mapping[str, Any]) -> bytes:
    """One JSON object and a newline, all ASCII: no reader sees another line break in it."""
    return f"{json.dumps(fields, separators=(', ', ': '))}\n".encode()


def json_pieces(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """`json_line` in pieces, so that a long text is never encoded as a whole."""
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
    write_bytes(printable(text).encode() + b"\n")


def note(text: str) -> None:
    print(f"slatemq: {printable(text)}", file=sys.stderr, flush=True)


def remark(text: str) -> None:
    """Print one line of a longer note to stderr."""
    print(printable(text), file=sys.stderr, flush=True)


CUT_WIDTH = 8
"""The least width of a cell that is cut, however narrow the terminal is."""


def write_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    headed: bool = True,
    cuts: Sequence[str] = (),
) -> None:
    """Print a table with numbers aligned to the right; `headed=False` continues one.

    Where a terminal is too narrow, cells of the columns in `cuts` are cut, in that order. Nothing
    else is cut or folded: the terminal wraps the lines, and text copied from it is complete.
    """
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


def write_items(
    items: Iterable[T],
    columns: Mapping[str, Callable[[T], object]],
    *,
    headed: bool = True,
    cuts: Sequence[str] = (),
) -> None:
    """Print a table with a row for each item; a column makes its cell of the item."""
    rows = ([cell(one) for cell in columns.values()] for one in items)
    write_table(tuple(columns), rows, headed=headed, cuts=cuts)


def payload_fields(payload: bytes) -> dict[str, str]:
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        import base64

        return {"payload_base64": base64.b64encode(payload).decode()}


def printable(text: str) -> str:
    """Text with escapes for characters that would move the cursor or cannot be shown."""
    return text if text.isprintable() else text.translate(_Shown())


class _Shown(dict[int, str]):
    def __missing__(self, code: int) -> str:
        shown = chr(code)
        if not shown.isprintable() and shown != "\n":
            shown = shown.encode("unicode_escape", "surrogatepass").decode()
        self[code] = shown
        return shown


def line_width() -> int:
    """Columns of the terminal; unbounded where stdout is not one."""
    if not sys.stdout.isatty():
        return sys.maxsize
    import shutil  # loads every compression module, which takes longer than a short command

    return shutil.get_terminal_size().columns


def width_beside(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> int:
    """Columns of the terminal that a table with these columns leaves for another."""
    cells = [list(columns), *(map(str, row) for row in rows)]
    return line_width() - sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True))


def cut(text: str, width: int) -> str:
    """Text of at most `width` columns; where some is left out, it ends with …."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else f"{set_cell_size(text, max(width - 1, 0))}…"


Update = Callable[..., None]
"""Takes what has changed: `completed`, `advance`, `total`, `description`, and the fields."""

USUAL = ("{task.description}", "BarColumn", "MofNCompleteColumn", "TimeRemainingColumn")


@contextmanager
def progress(
    is_wanted: bool, what: str, total: float | None, columns: Sequence[str] = USUAL, **fields: Any
) -> Iterator[Update]:
    """Show a bar; yields the function that updates it.

    A column is a class of rich.progress, or a text with {} for what is known of the task.
    """
    if not is_wanted or not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich import progress as bars
    from rich.console import Console

    shown = [bars.TextColumn(one) if "{" in one else getattr(bars, one)() for one in columns]
    with bars.Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, **fields)
        yield partial(bar.update, task)
