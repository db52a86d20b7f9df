"""The command `slatemq`, loaded before: that is most of the time that a short one takes.

What tests start, signal or time is a process of its own from the beginning.
"""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import BinaryIO, Final

import slatemq.cli
from slatemq._rpc import peers, topology_cache
from slatemq.cli.consume import consuming
from slatemq.cli.publish import reach
from tests.ready_process import popen

MODULE: Final = "tests.integration.cli.ready_command"

ALONE: Final = "TESTS_ALONE_S"
"""The variable that has the ALONE_S of `consume`, where the own one could be too short."""

REACH: Final = "TESTS_REACH_S"
"""The variable that has how long a command waits until its endpoint answers: it may be busy."""

_ANSWER_S: Final = 20.0
"""How long a publish waits for brokers and routers: they may be busy here."""

_LOADED_LATE: Final = ("slatemq.client", "slatemq.sync", "rich.console", "rich.table")


def run(
    arguments: Sequence[str | bytes], environ: Mapping[str, str], stdin: bytes, seconds: float
) -> subprocess.CompletedProcess[bytes]:
    """The same as `subprocess.run` of the command, with its output captured."""
    words = [os.fsdecode(one) for one in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [sys.executable, "-m", MODULE, *words]
        process = popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environ)
        writer = threading.Thread(target=_give, args=(process.stdin, stdin))
        writer.start()
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
            process.wait()
            writer.join()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def _give(giving: BinaryIO, stdin: bytes) -> None:
    with suppress(BrokenPipeError), giving:
        giving.write(stdin)


def load() -> None:
    """Load every command and what they load late."""
    rooms = pkgutil.walk_packages(slatemq.cli.__path__, "slatemq.cli.")
    names = [module.name for module in rooms if not module.name.endswith(".__main__")]
    for name in (*names, *_LOADED_LATE):
        import_module(name)


if __name__ == "__main__":
    reach.ANSWER_S = _ANSWER_S
    consuming.ALONE_S = float(os.environ.get(ALONE, consuming.ALONE_S))
    peers.REACH_S = float(os.environ.get(REACH, peers.REACH_S))
    topology_cache.CONNECT_S = float(os.environ.get(REACH, topology_cache.CONNECT_S))
    slatemq.cli.main()
