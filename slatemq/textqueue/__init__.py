"""TextQueue: queue files that people read and edit, without a server.

    queue = TextQueue("jobs.tq")
    queue.append("resize photo 7", {"retries": "03", "error": reserve(20)})
    while (claim := queue.claim()) is not None:
        with claim:  # leaving marks it as processed; an exception releases it
            work(claim.text)

See docs/how-to/textqueue.md, and docs/reference/textqueue.md for the format. This package needs
nothing but Python, and imports nothing else of SlateMQ.

In reading order; a file imports only files above it:

`controls`   the states of entries, their control characters, and checks of arguments
`errors`     the errors of queue files
`locks`      locks on a queue file: the kernel's, which end with their process
`holders`    the sidecar mutex file: which claim holds which message
`pages`      a part of a file in memory, with the properties of all its entries
`entries`    entries of a queue file, and the variables below them
`parsing`    bytes to entries, in constant memory
`editing`    changes of an open file in place: one byte, or the reserved bytes of a variable
`appends`    the list of recent appends, which shows when an editor has saved an older copy
`files`      a queue file by its path: reading, appending, changes in place, the lock of the file
`compacting` removing finished messages: a new file takes the name of the old one
`claiming`   claims: each message goes to one worker at a time
`queue`      the queue: the interface for programs
`split`      several files read as one queue
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # that of typing, which need not be loaded for it
if TYPE_CHECKING:
    from typing import Any

    from slatemq.textqueue.compacting import Compacted
    from slatemq.textqueue.controls import State
    from slatemq.textqueue.entries import Entry, Variable, Variables, render, reserve
    from slatemq.textqueue.errors import (
        AlreadyMarked,
        AppendLost,
        BadText,
        Busy,
        ClaimLost,
        DoesNotFit,
        FormatError,
        NoSuchEntry,
        NoSuchVariable,
        NotAMessage,
        Rewritten,
        TextQueueError,
    )
    from slatemq.textqueue.parsing import Document, parse, scan
    from slatemq.textqueue.queue import Claim, TextQueue
    from slatemq.textqueue.split import SplitQueue

__all__ = [
    "AlreadyMarked",
    "AppendLost",
    "BadText",
    "Busy",
    "Claim",
    "ClaimLost",
    "Compacted",
    "Document",
    "DoesNotFit",
    "Entry",
    "FormatError",
    "NoSuchEntry",
    "NoSuchVariable",
    "NotAMessage",
    "Rewritten",
    "SplitQueue",
    "State",
    "TextQueue",
    "TextQueueError",
    "Variable",
    "Variables",
    "parse",
    "render",
    "reserve",
    "scan",
]

_HOMES = ("errors", "controls", "entries", "parsing", "queue", "split")
"""Each imports those before it, so that looking for a name loads nothing that it does not need."""


def __dir__() -> list[str]:
    return sorted({*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"})


def __getattr__(name: str) -> Any:
    # Loaded on demand: a command that reads a file needs half of the modules.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in _HOMES:
        found = getattr(import_module(f"{__name__}.{home}"), name, None)
        if found is not None:
            break
    return found
