"""Entries of queue files as lines and as JSON, and their errors as those of the command."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slatemq.cli.failures import BadInput
from slatemq.cli.output import note, printable
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
    TextQueueError,
)
from slatemq.textqueue.controls import BYTE_ORDER_MARK
from slatemq.textqueue.parsing import STRICT_ADVICE


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
    # Encoded by itself, because it may be long.
    stream.write(_shown_text(entry).encode())
    stream.write(b"\n")


def _shown_text(entry: Entry) -> str:
    text = entry.text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    return printable(text)


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
