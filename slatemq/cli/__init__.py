"""The command `slatemq`; see `slatemq --help` and docs/reference/cli.md.

::

    app ──► queues, publishing, claiming, consuming, inspecting    one module per group of commands
              │           │
              │           ▼
              │         bulk ──► lines ──► pointers                a file of lines, in batches
              ▼                   │
            session ──► failures  ├──► threads                     one client, one event loop
              │
              ▼
            output, parameters ──► durations                       what comes out, what goes in

    textqueue ──► textqueue_output ──► slatemq.textqueue           queue files, without a server
"""

from __future__ import annotations

from importlib import import_module

from slatemq.cli import interrupts

TYPE_CHECKING = False  # that of typing, without loading it first
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["main"]

NEEDED = ("click", "rich")


def main() -> NoReturn:
    """The entry point: runs the command line of this process, and ends it."""
    # Loading all of it takes some tenths of a second, in which people think better of it.
    interrupts.end_with(interrupts.EXIT_INTERRUPTED)
    try:
        app = import_module("slatemq.cli.app")
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        told = "slatemq: the command needs more packages: pip install 'slatemq[cli]'"
        raise SystemExit(told) from None
    raise SystemExit(app.main())
