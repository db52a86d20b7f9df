"""TextQueue: queue files that people read and edit, without a server.

    queue = TextQueue("jobs.tq")
    queue.append("resize photo 7", {"retries": "03", "error": reserve(20)})
    while (claim := queue.claim()) is not None:
        with claim:  # leaving marks it done; an exception gives it back
            work(claim.text)

See docs/how-to/textqueue.md, and docs/reference/textqueue.md for the format. This package needs
nothing but Python, and imports nothing else of SlateMQ.
"""

from __future__ import annotations

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
