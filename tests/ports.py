"""Ports for servers that are started again at their place."""

from __future__ import annotations

import random

from services.stack.ports import FREE_PORTS, is_free


def free_ports(count: int) -> range:
    """Ports in a row that are free now, and that no client takes while a server is away."""
    for first in random.sample(FREE_PORTS[:-count], 200):
        ports = range(first, first + count)
        if all(map(is_free, ports)):
            return ports
    raise RuntimeError(f"no {count} ports in a row are free")
