"""The command `slatemq`: see `slatemq --help` and docs/reference/cli.md.

::

    app ┄┄► queue, publish, consume, repair, files, tq   a room for each group of commands, loaded
              │                                          when one of its commands runs
              ▼
            session ──► failures, output, parameters     one client, one event loop; what comes out,
                                                         what goes in

In reading order; a file imports only files above it:

`parameters`    types of options and arguments, and options that several commands share
`output`        JSON lines for programs, tables and sentences for people, payloads unchanged
`failures`      errors as exit codes, and as sentences that say what is wrong and what to do
`interrupts`    Ctrl-C before a command starts and after it ends
`session`       what all commands share: where the server is, the form of the output, the event loop
`app`           the root command, and how every command ends
`queue_options` a queue on the command line: the options for its settings, and the tables of it
`entry_output`  entries as tables and paragraphs for people, and as objects for programs
`queue`         `slatemq queue`, `explain` and `status`
`shards`        `slatemq shard`: list, add, drain and remove shards, and move queues between them
`instance`      `slatemq instance`: the settings that all processes of the instance share
`access`        `slatemq certs` and `access`: certificates and tokens
`publish`       `slatemq publish`, `events` and `task`
`consume`       `slatemq consume`, `claim`, `ack`, `nack` and `extend`
`tq`            `slatemq tq`: queue files without a server
`files`         `slatemq export` and `import`: queue files of a server's queue
`repair`        `slatemq message`, `done`, `failed` and `outbox`
`monitor`       `slatemq top` and `doctor`
`job_runs`      follows runs of the janitor's jobs to their end
`janitor`       `slatemq janitor`: runs of the jobs that clean up, archive and report
`verifying`     `slatemq verify` and `repair`: what is wrong with an instance, and its repair
"""

from __future__ import annotations

import os
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
    # Before gRPC is loaded: it has lines of its own for what is no fault.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # rich is loaded late, for tables: without it, fail here and not after the work is done.
    if any(find_spec(name) is None for name in NEEDED):
        raise SystemExit(
            "slatemq: the command needs click and rich: run pip install 'slatemq[cli]', or in a "
            "checkout pip install '.[cli]'"
        )
    raise SystemExit(import_module("slatemq.cli.app").main())
