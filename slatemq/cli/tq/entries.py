"""What the commands of queue files share: options, entries of files and stdin, and their errors.

Errors of queue files are raised as those of the command.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import click

from slatemq.cli.failures import BadInput
from slatemq.cli.output import PIECE_LENGTH, note, printable
from slatemq.cli.parameters import flag
from slatemq.cli.session import Group, LocalCommand
from slatemq.errors import Aborted, FailedPrecondition, InvalidArgument, NotFound, SlateMQError
from slatemq.textqueue import (
    AlreadyMarked,
    AppendLost,
    BadText,
    Busy,
    ClaimLost,
    DoesNotFit,
    Entry,
    FormatError,
    NoSuchEntry,
    NoSuchVariable,
    Rewritten,
    State,
    TextQueue,
    TextQueueError,
    reserve,
    scan,
)
from slatemq.textqueue.controls import BYTE_ORDER_MARK
from slatemq.textqueue.parsing import STRICT_ADVICE

F = TypeVar("F", bound=Callable[..., Any])

STDIN = "-"

ALL = "all"
"""Instead of a state: entries in every state."""

_MARK = BYTE_ORDER_MARK.encode()

READ_BYTES = 1 << 20

RESERVE_BYTES_MAX = 1 << 20
"""Of one variable; more is a typing error."""

OFFSET_DIGITS_MAX = 19
"""Enough for any file; Python refuses numbers of thousands of digits."""


class FileGroup(Group):
    command_class = LocalCommand


def _no_stream(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value == STDIN:
        raise click.BadParameter("stdin cannot be changed: give a file (./- for one named -)")
    return value


file_argument = click.argument("file", type=click.Path(), callback=_no_stream)

stream_argument = click.argument("file", type=click.Path())

fsync_option = flag("--fsync", help="Write changes to the disk before returning.")


def states_option(text: str) -> Callable[[F], F]:
    return click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice([*(state.value for state in State), ALL]),
        help=f"{text} in this state; repeatable.  [default: queued]",
    )


def states_of(names: Sequence[str]) -> list[State]:
    return list(State) if ALL in names else [State(name) for name in names]


def is_token(text: str) -> bool:
    """Whether it is the token of a claim, not an offset. Raises UsageError for a line of `ls`."""
    if text.startswith("@") and text.split() != [text]:
        raise click.UsageError(
            f"{text!r} is more than a token: give only what is before the first tab"
        )
    return text.startswith("@")


def offset_of(text: str) -> int:
    """Raises UsageError."""
    if not (text.isascii() and text.isdigit() and len(text) <= OFFSET_DIGITS_MAX):
        raise click.UsageError(f"{text!r} is neither an offset nor a token such as @k3jf9a2mxq4e")
    return int(text)


def reserved(room: str) -> str:
    """The variable for NAME=N. Raises UsageError."""
    name, equals, width = room.partition("=")
    if not equals or not (width.isascii() and width.isdigit()):
        raise click.UsageError(f"--reserve takes NAME=N, with N bytes: {room!r}")
    # Compared by its length first: a number of thousands of digits cannot even be read.
    if len(width) > len(str(RESERVE_BYTES_MAX)) or int(width) > RESERVE_BYTES_MAX:
        raise click.UsageError(f"--reserve takes at most {RESERVE_BYTES_MAX} bytes: {room!r}")
    return f"{name}={reserve(int(width))}"


def entries_of(file: str, strict: bool, states: Collection[State]) -> Iterator[Entry]:
    """Entries of a file or of stdin in these states; without any, the queued ones."""
    if file != STDIN:
        return TextQueue(file, strict=strict).entries(*states)
    wanted = states or (State.QUEUED,)
    every = scan(_stdin().read1, name_of(file), strict=strict)
    return (entry for entry in every if entry.state in wanted)


def name_of(file: str) -> str:
    return "stdin" if file == STDIN else file


def warn_of_mark(file: str) -> None:
    """Note that the file, or stdin, begins with a byte order mark, if it does. Raises OSError."""
    if _stdin().peek(1).startswith(_MARK) if file == STDIN else begins_with_mark(file):
        note(f"{name_of(file)}:1: {marked(file)}")


def begins_with_mark(file: str | os.PathLike[str]) -> bool:
    """Raises OSError."""
    if not os.path.isfile(file):  # a missing file is reported later; a pipe would block
        return False
    with open(file, "rb") as stream:
        return stream.read(len(_MARK)) == _MARK


def marked(file: str) -> str:
    """What a byte order mark does to a line, and how to remove it."""
    removal = "" if file == STDIN else rf": sed -i 's/^\xef\xbb\xbf//' {shlex.quote(file)}"
    return (
        "a byte order mark (BOM) makes this line an entry of an unknown kind, which is skipped. "
        f"Save the file as UTF-8 without BOM, or remove the mark{removal}"
    )


def stdin_text() -> str:
    """All of stdin, without its last newline. Raises BadInput."""
    content = _stdin().read().removesuffix(b"\n")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"stdin is not UTF-8, at byte {error.start}") from None


def stdin_lines() -> Iterator[str]:
    """Raises BadInput."""
    for number, line in enumerate(_stdin(), 1):
        yield _decoded(line.removesuffix(b"\n"), number)


def stdin_batches() -> Iterator[list[str]]:
    """Lines in the batches in which they arrive. Raises BadInput, after the lines before it."""
    stream, number = _stdin(), 0
    while chunk := stream.read1(READ_BYTES):
        if not chunk.endswith(b"\n"):
            chunk += stream.readline()
        texts: list[str] = []
        try:
            for line in chunk.removesuffix(b"\n").split(b"\n"):
                number += 1
                texts.append(_decoded(line, number))
        except BadInput:
            yield texts
            raise
        yield texts


@contextmanager
def finishing() -> Iterator[None]:
    """Ctrl-C waits until the block ends; a second one does not wait."""
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise BadInput(f"line {number} of stdin is not UTF-8") from None


def _stdin() -> io.BufferedReader:
    return cast("io.BufferedReader", sys.stdin.buffer)


def entry_fields(entry: Entry) -> dict[str, Any]:
    return {
        "offset": entry.offset,
        "line": entry.line,
        "state": entry.state,
        "control": entry.control,
        "text": entry.text,
        "variables": [
            {"name": one.name, "value": one.value, "reserved_bytes": one.width}
            for one in entry.variables
        ],
    }


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise errors of queue files as errors of the command, and print warnings as notes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", AppendLost)
            warnings.showwarning = lambda message, *_, **__: note(str(message))
            yield
    except FormatError as error:
        raise BadInput(str(error)) from None
    except TextQueueError as error:
        raise _as_refusal(error) from None


def _as_refusal(error: TextQueueError) -> SlateMQError:
    match error:
        case Rewritten():
            return Aborted(str(error), reason="FILE_REWRITTEN")
        case NoSuchEntry():
            return NotFound("entry", "", f"{error}: `slatemq tq ls` lists their offsets")
        case NoSuchVariable():
            return NotFound("variable", str(error.key), str(error))
        case DoesNotFit():
            sizes = {"needed_bytes": error.needed_bytes, "reserved_bytes": error.reserved_bytes}
            metadata = {name: str(size) for name, size in sizes.items()}
            return InvalidArgument("value", str(error), reason="DOES_NOT_FIT", metadata=metadata)
        case BadText():
            return InvalidArgument("text", str(error))
        case AlreadyMarked():
            return FailedPrecondition("ALREADY_MARKED", str(error))
        case ClaimLost():
            return FailedPrecondition("CLAIM_LOST", str(error))
        case Busy():
            return FailedPrecondition("FILE_LOCKED", str(error))
    return FailedPrecondition("NOT_A_MESSAGE", str(error))


def write_entry(entry: Entry, first: str) -> None:
    stream = sys.stdout.buffer
    stream.write(f"{first}\t{entry.state}\t".encode())
    text = entry.text
    for start in range(0, len(text), PIECE_LENGTH):
        stream.write(_shown(text[start : start + PIECE_LENGTH]).encode())
    stream.write(b"\n")


def _shown(text: str) -> str:
    return printable(text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t"))


def oddities(entry: Entry) -> Iterator[tuple[int, str]]:
    """Likely mistakes and their lines; `warn_of_mark` warns of a byte order mark."""
    if entry.state is State.UNKNOWN and entry.control != BYTE_ORDER_MARK:
        why = f"unknown control character {entry.control!r}: this entry is skipped"
        yield entry.line, f"{why}; {STRICT_ADVICE}"
    if entry.raw.split(b"\n", 1)[0].endswith(b"\r"):
        yield entry.line, "the line ends with a carriage return, which is part of the text"
    for variable in entry.variables:
        digits = variable.value.strip(" ")  # as claims read them
        if variable.name == "retries" and not (digits.isascii() and digits.isdigit()):
            yield entry.line_of(variable), f"retries must be a number, not {variable.value!r}"
