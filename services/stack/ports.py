"""Ports on loopback: one after another from a base, or free ones that stay free."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

HOST = "127.0.0.1"

FREE_PORTS = range(20_000, 32_000)
"""Below the range from which systems take ports for outgoing connections: a service that is being
restarted must find its port as it left it, which no client of anything may have taken."""

TRIES = 1_000


class PortInUse(Exception):
    """Another process listens there."""


def choose_ports(base: int | None, names: Sequence[str]) -> dict[str, int]:
    """A port for each name: `base`, `base` + 1, …; free ones when there is no base.

    Raises:
        PortInUse: A port counted from the base is taken; says which, and for which service.
    """
    if base is not None:
        ports = {name: base + place for place, name in enumerate(names)}
        for name, port in ports.items():
            if not is_free(port):
                raise PortInUse(f"port {port} on {HOST}, for {name}, is in use")
        return ports
    chosen: dict[str, int] = {}
    for _ in range(TRIES):
        port = random.choice(FREE_PORTS)
        if port not in chosen.values() and is_free(port):
            chosen[names[len(chosen)]] = port
            if len(chosen) == len(names):
                return chosen
    raise PortInUse(f"no free ports between {FREE_PORTS.start} and {FREE_PORTS.stop} on {HOST}")


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        # As gRPC does: connections of a process that has just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen()
        except OSError:
            return False
    return True
