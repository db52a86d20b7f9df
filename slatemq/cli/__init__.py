"""The command `slatemq`; see `slatemq --help` and docs/reference/cli.md.

::

    app ┄┄► queues, publishing, claiming, consuming, inspecting    a module per group of commands,
              │           │                                        loaded when one is wanted
              │           ▼
              │    publish_lines ──► bulk ──► lines ──► pointers   a file of lines, in batches
              ▼                        │
            session ──► failures       └──► threads                one client, one event loop
              │
              ▼
            output, parameters ──► durations                       what comes out, what goes in

    textqueue ──► textqueue_output ──► slatemq.textqueue           queue files, without a server
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from slatemq.cli import interrupts

TYPE_CHECKING = False  # that of typing, without loading it first
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["main"]

NEEDED = ("click", "rich")


def main() -> NoReturn:
    """The entry point: runs the command line of this process, and ends it."""
    interrupts.end_with(interrupts.EXIT_INTERRUPTED)
    # rich is loaded late, by what shows a table: what lacks it is to fail before it does anything.
    if any(find_spec(name) is None for name in NEEDED):
        raise SystemExit(
            "slatemq: the command needs click and rich: install slatemq with its extra `cli`, in a "
            "checkout by pip install '.[cli]'"
        )
    raise SystemExit(import_module("slatemq.cli.app").main())
