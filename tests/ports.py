"""Ports for servers that are started again at their place."""

from __future__ import annotations

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

from services.stack.ports import FREE_PORTS, is_free

PORTS = range(10_000, FREE_PORTS.start)
"""Neither a launcher nor an outgoing connection takes one of these while a server is down."""

SHARES = 20
"""Processes of tests at one time, each of which has a share of the ports."""


def free_ports(count: int) -> range:
    """Ports in a row that are free now, and that no one else is given while a server is down."""
    share = _share()
    for _ in range(len(share.ports)):
        ports = share.next(count)
        if all(map(is_free, ports)):
            return ports
    raise RuntimeError(f"no {count} ports in a row are free")


class _Share:
    """Gives the ports of a share one after another, so that none comes again soon."""

    def __init__(self, ports: range) -> None:
        self.ports = ports
        self._at = 0

    def next(self, count: int) -> range:
        if self._at + count > len(self.ports):
            self._at = 0
        begin = self._at
        self._at += count
        return self.ports[begin : self._at]


@cache
def _share() -> _Share:
    size = len(PORTS) // SHARES
    for number in range(SHARES):
        path = Path(tempfile.gettempdir(), f"slatemq-test-ports-{os.getuid()}-{number}")
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return _Share(PORTS[number * size : (number + 1) * size])  # Locked until this process ends.
    raise RuntimeError(f"{SHARES} other processes run tests")
