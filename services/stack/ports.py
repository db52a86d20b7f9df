"""Ports on loopback: one after another from a base, or free ones that stay free."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence

HOST = "127.0.0.1"

FREE_PORTS = range(20_000, 32_000)
"""Below the range from which systems take ports for outgoing connections: a service that is being
restarted must find its port as it left it, which no client of anything may have taken."""

PORTS_APART = 16
"""How far from each other launchers of consecutive process IDs begin to look: those that start at
the same time do not choose a port that another has chosen and not taken yet."""


class PortInUse(Exception):
    pass


def choose_ports(
    base: int | None, names: Sequence[str], taken: Collection[int] = ()
) -> dict[str, int]:
    """A port for each name: `base`, `base` + 1, …; free ones where `base` is None.

    `taken` are used elsewhere. Raises PortInUse, naming the port and the service.
    """
    if base is not None:
        ports = {name: base + place for place, name in enumerate(names)}
        for name, port in ports.items():
            if port in taken or not is_free(port):
                raise PortInUse(f"port {port} on {HOST}, for {name}, is in use")
        return ports
    begin = os.getpid() * PORTS_APART % len(FREE_PORTS)
    candidates = (*FREE_PORTS[begin:], *FREE_PORTS[:begin])
    free = (port for port in candidates if port not in taken and is_free(port))
    chosen = dict(zip(names, free, strict=False))
    if len(chosen) < len(names):
        raise PortInUse(f"no free ports between {FREE_PORTS.start} and {FREE_PORTS.stop} on {HOST}")
    return chosen


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As gRPC does: connections of a process that has just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen()
        except OSError:
            return False
    return True
