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

import importlib.util
import sys

if importlib.util.find_spec("click") is None or importlib.util.find_spec("rich") is None:
    sys.exit("slatemq: the command needs more packages: pip install 'slatemq[cli]'")

from slatemq.cli.app import main

__all__ = ["main"]
