"""The command `slatemq`: see `slatemq --help` and docs/reference/cli.md.

::

    app ┄┄► queue, publish, consume, repair, files, tq   a room for each group of commands, loaded
              │                                          when one of its commands runs
              ▼
            session ──► failures, output, parameters     one client, one event loop; what comes out,
                                                         what goes in
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from slatemq.cli import interrupts

TYPE_CHECKING = False  # that of typing, which need not be loaded for it
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["main"]

NEEDED = ("click", "rich")


def main() -> NoReturn:
    """The entry point: run the command line of this process, and end it."""
    interrupts.end_with(interrupts.EXIT_INTERRUPTED)
    # rich is loaded late, for tables: without it, fail here and not after the work is done.
    if any(find_spec(name) is None for name in NEEDED):
        raise SystemExit(
            "slatemq: the command needs click and rich: run pip install 'slatemq[cli]', or in a "
            "checkout pip install '.[cli]'"
        )
    raise SystemExit(import_module("slatemq.cli.app").main())
