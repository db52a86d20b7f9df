"""TextQueue: queue files that people read and edit, without a server.

    queue = TextQueue("jobs.tq")
    queue.append("resize photo 7", {"retries": "03", "error": reserve(20)})
    while (claim := queue.claim()) is not None:
        with claim:  # leaving marks it as processed; an exception releases it
            work(claim.text)

See docs/how-to/textqueue.md, and docs/reference/textqueue.md for the format. This package needs
nothing but Python, and imports nothing else of SlateMQ.
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
