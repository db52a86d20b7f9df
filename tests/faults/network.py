"""A network between processes of one machine: proxies on loopback that cut, delay and half-close.

Each process advertises the ports of proxies in place of its own, so that all others reach it
through them. Who opened a connection is found by its socket (`/proc`), so each pair of processes
has a link of its own::

    router-0 ──► proxy of ingest-0's peer port ──► ingest-0
                   Trouble of (router-0, ingest-0):
                     CUT      connections are reset, and new ones too
                     SWALLOW  nothing passes, in either direction or one; then all goes on
                     HALF     one end is reset, the other learns nothing of it; new ones pass
                     delay_s  each piece of data takes so long
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

CLIENTS: Final = "clients"
"""The name of whatever is no member: the clients of the run."""

PIECE_BYTES: Final = 1 << 16
_RESET: Final = struct.pack("ii", 1, 0)


class Kind(Enum):
    """What a trouble does to the connections of a link."""

    PASS = "pass"
    CUT = "cut"
    SWALLOW = "swallow"
    SWALLOW_ANSWERS = "swallow answers"
    HALF = "half-open"


@dataclass
class Trouble:
    """What happens on a link for a while.

    Attributes:
        met: How many connections it has met.
    """

    kind: Kind = Kind.PASS
    delay_s: float = 0.0
    met: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Connection:
    """One connection: the end of who opened it, and that of who is asked."""

    source: str
    target: str
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter

    def reset(self, *ends: asyncio.StreamWriter) -> None:
        for end in ends or (self.near, self.far):
            _reset(end)


class Network:
    """All proxies of a run. It is a part of its event loop."""

    def __init__(self, pids: Callable[[], Mapping[int, str]]) -> None:
        """`pids`: the name of each member by the ID of its process."""
        self._pids = pids
        self._troubles: dict[tuple[str, str], Trouble] = {}
        self._connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def proxy(self, target: str, port: Callable[[], int]) -> int:
        """A port on loopback that leads to the port that the target has at the time."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._serve(target, port(), reader, writer)
            finally:
                self._tasks.discard(task)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def undergo(self, source: str, target: str, trouble: Trouble, seconds: float) -> None:
        """The trouble on the link between these for so long."""
        link = source, target
        self._troubles[link] = trouble
        mine = [one for one in self._connections if (one.source, one.target) == link]
        trouble.met += len(mine)
        for place, one in enumerate(mine):
            if trouble.kind is Kind.CUT:
                one.reset()
            elif trouble.kind is Kind.HALF:
                one.reset(one.far if place % 2 else one.near)
        try:
            await asyncio.sleep(seconds)
        finally:
            del self._troubles[link]
            trouble.over.set()
            if trouble.kind is Kind.HALF:
                for one in mine:
                    one.reset()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for one in list(self._connections):
            one.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, target: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        source = self._opener(writer.get_extra_info("peername")[1])
        trouble = self._troubles.get((source, target))
        if trouble is not None and trouble.kind is Kind.CUT:
            trouble.met += 1
            _reset(writer)
            return
        try:
            far_reader, far = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            _reset(writer)
            return
        connection = _Connection(source, target, writer, far)
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._pump(connection, reader, far), self._pump(connection, far_reader, writer)
            )
        finally:
            self._connections.discard(connection)
            connection.reset()

    async def _pump(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass data on in one direction; a broken end leaves the other open while it is HALF."""
        link = connection.source, connection.target
        with suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                trouble = self._troubles.get(link)
                while trouble is not None and _holds(trouble, writer is connection.near):
                    await trouble.over.wait()
                    trouble = self._troubles.get(link)
                if trouble is not None and trouble.delay_s:
                    await asyncio.sleep(trouble.delay_s)
                writer.write(data)
                await writer.drain()
        trouble = self._troubles.get(link)
        if trouble is not None and trouble.kind in (Kind.HALF, Kind.SWALLOW, Kind.SWALLOW_ANSWERS):
            await trouble.over.wait()
        connection.reset()

    def _opener(self, port: int) -> str:
        """The member that has the socket with this local port."""
        inode = _inode_of(port)
        for pid, name in self._pids().items():
            if inode in _sockets_of(pid):
                return name
        return CLIENTS


def _holds(trouble: Trouble, is_answer: bool) -> bool:
    if trouble.kind is Kind.SWALLOW_ANSWERS:
        return is_answer
    return trouble.kind in (Kind.SWALLOW, Kind.HALF)


def _inode_of(port: int) -> str:
    """The inode of the socket on loopback that has this local port."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port:
                return fields[9]
    return ""


def _sockets_of(pid: int) -> Iterable[str]:
    """The inodes of the sockets that a process has open."""
    folder = Path(f"/proc/{pid}/fd")
    found = set()
    with suppress(OSError):  # It has ended.
        for file in folder.iterdir():
            with suppress(OSError):
                found.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    return found


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close an end so that the other learns it by a reset, not by an orderly end."""
    ours: socket.socket | None = writer.get_extra_info("socket")
    if ours is not None and ours.fileno() >= 0:
        with suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
