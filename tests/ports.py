"""Ports for servers that are started again at their place."""

from __future__ import annotations

import os
import random

from services.stack.ports import FREE_PORTS, is_free

WORKERS_MAX = 8
PORTS = range(10_000, FREE_PORTS.start)
"""Neither a launcher nor an outgoing connection takes one of these while a server is away."""


def free_ports(count: int) -> range:
    """Ports in a row that are free now, and that no other test has been given lately."""
    for _ in range(len(_MINE)):
        ports = _walk.next(count)
        if all(map(is_free, ports)):
            return ports
    raise RuntimeError(f"no {count} ports in a row are free")


class _Walk:
    """Gives ports one after another, so that servers that start side by side never share one."""

    def __init__(self, ports: range) -> None:
        self._ports = ports
        self._at = random.randrange(len(ports))

    def next(self, count: int) -> range:
        if self._at + count > len(self._ports):
            self._at = 0
        begin = self._at
        self._at += count
        return self._ports[begin : self._at]


_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS_MAX
_share = len(PORTS) // WORKERS_MAX
_MINE = PORTS[_worker * _share : (_worker + 1) * _share]
_walk = _Walk(_MINE)
