"""A proxy before an S3 server that delays, refuses, swallows and loses what a test says.

::

    database ──► FaultyStore (faults, in this order) ──► S3 server
                    delay_s, then one of
                      REFUSE  503, the server never sees the request
                      RESET   the connection is closed, the server never sees the request
                      HANG    no answer until the fault is lifted, then the connection is closed
                      HOLD    nothing passes until the fault is lifted, in neither direction: a
                              network that swallows packets; then all goes on
                      LOSE    the server does it, and the connection is closed instead of an answer
                      BREAK   the connection is closed in the middle of the answer's body
                      SHORTEN the answer's body ends early, and its head says that this is all
                      STALE   a listing does not show what was created after a moment
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from urllib.parse import unquote

HEADERS_MAX_BYTES = 1 << 20
_LISTING = "list-type=2"
_LISTED = re.compile(rb"<Contents>.*?<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
_REFUSAL = b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n"


class Outcome(Enum):
    """What happens to a request."""

    PASS = "pass"
    REFUSE = "refuse"
    RESET = "reset"
    HANG = "hang"
    HOLD = "hold"
    LOSE = "lose"
    BREAK = "break"
    SHORTEN = "shorten"
    STALE = "stale"


@dataclass
class Fault:
    """What happens to requests of this method whose path has `match` in it.

    Attributes:
        outcome: What happens.
        method: Empty means every method.
        match: Part of the path.
        delay_s: Waits so long first.
        chance: Of a request that it happens, 0 to 1.
        times: How often it happens at most; None: always.
        window_s: For how many seconds of each period it happens, and the period; None: always.
            What hangs or is held waits for the end of them.
        stale_after: The moment of STALE, by the monotonic clock.
        happened: How often it has happened.
    """

    outcome: Outcome = Outcome.PASS
    method: str = ""
    match: str = ""
    delay_s: float = 0.0
    chance: float = 1.0
    times: int | None = None
    window_s: tuple[float, float] | None = None
    stale_after: float = 0.0
    happened: int = 0
    lifted: asyncio.Event = field(default_factory=asyncio.Event)

    def meets(self, method: str, path: str, luck: random.Random) -> bool:
        """Whether it happens to this request, which is counted then."""
        if self.method not in ("", method) or self.match not in path:
            return False
        if self.times is not None and self.happened >= self.times:
            return False
        if self._left_s() == 0:
            return False
        if luck.random() >= self.chance:
            return False
        self.happened += 1
        return True

    async def over(self) -> None:
        """Wait until it is lifted, or its window is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.lifted.wait(), self._left_s())

    def _left_s(self) -> float | None:
        if self.window_s is None:
            return None
        down_s, period_s = self.window_s
        return max(down_s - time.monotonic() % period_s, 0)


class FaultyStore:
    """The running proxy; `faulty_store` makes it. Its methods may be called from any thread.

    Attributes:
        port: On loopback.
        requests: How many requests came, by method and folder (`GET`, `/bucket/root/broker/0/wal`).
    """

    def __init__(self, upstream_port: int, seed: int) -> None:
        """Before the server on this port of loopback."""
        self.port = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        self._upstream_port = upstream_port
        self._luck = random.Random(seed)
        self._faults: tuple[Fault, ...] = ()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._ready = threading.Event()
        self._created_at: dict[str, float] = {}

    def set(self, *faults: Fault) -> None:
        """From now on these faults, in place of those before; none: all is well."""

        def change() -> None:
            lifted, self._faults = self._faults, faults
            for fault in lifted:
                if fault not in faults:
                    fault.lifted.set()

        self._loop.call_soon_threadsafe(change)

    def created_at(self, match: str) -> list[float]:
        """When objects whose paths have `match` in them were created, by the monotonic clock."""
        return [at for path, at in list(self._created_at.items()) if match in path]

    def count(self, method: str = "", folder: str = "") -> int:
        """How many requests of this method came to folders whose path ends so."""
        return sum(
            count
            for (used, path), count in list(self.requests.items())
            if method in ("", used) and path.endswith(folder)
        )

    def run(self) -> None:
        """Serve until `stop`."""
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    def wait_ready(self) -> None:
        """Returns once it listens."""
        assert self._ready.wait(10)

    def stop(self) -> None:
        """End `run`."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, limit=HEADERS_MAX_BYTES, backlog=256
        )
        self.port = int(server.sockets[0].getsockname()[1])
        self._ready.set()
        await self._stopped.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        upstream = _Upstream(self._upstream_port)
        try:
            while await self._answer(reader, writer, upstream):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The client has gone.
        except asyncio.CancelledError:
            pass  # `stop` was called; asyncio's streams log a cancelled handler as an error.
        finally:
            writer.close()
            upstream.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: _Upstream
    ) -> bool:
        """One request; False: the connection is to be closed."""
        head, body = await _read_message(reader)
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        self.requests[method, path.partition("?")[0].rpartition("/")[0]] += 1
        lose = False
        spoiling: Fault | None = None
        for fault in self._faults:
            if fault.outcome is Outcome.STALE and _LISTING not in path:
                continue
            if not fault.meets(method, path, self._luck):
                continue
            await asyncio.sleep(fault.delay_s)
            if fault.outcome is Outcome.RESET:
                return False
            if fault.outcome is Outcome.HANG:
                await fault.over()
                return False
            if fault.outcome is Outcome.REFUSE:
                writer.write(_REFUSAL)
                await writer.drain()
                return True
            lose = lose or fault.outcome is Outcome.LOSE
            if fault.outcome in (Outcome.BREAK, Outcome.SHORTEN, Outcome.STALE):
                spoiling = fault
            if fault.outcome is Outcome.HOLD:
                await fault.over()
        answer = await upstream.ask(method, head + body)
        if method == "PUT" and answer.startswith(b"HTTP/1.1 200"):
            self._created_at.setdefault(unquote(path), time.monotonic())
        if lose:
            return False
        if spoiling is not None:
            answer = self._spoil(answer, spoiling)
        for fault in self._faults:  # Those of now: an answer is held like a request.
            if fault.outcome is Outcome.HOLD and fault.meets(method, path, self._luck):
                await fault.over()
        writer.write(answer)
        await writer.drain()
        return spoiling is None or spoiling.outcome is not Outcome.BREAK

    def _spoil(self, answer: bytes, fault: Fault) -> bytes:
        """The answer as such a fault leaves it."""
        head, _, body = answer.partition(b"\r\n\r\n")
        if fault.outcome is Outcome.BREAK:
            return head + b"\r\n\r\n" + body[: len(body) // 2]
        if fault.outcome is Outcome.SHORTEN:
            return _with_body(head, body[: len(body) // 2])
        return _with_body(head, _LISTED.sub(partial(self._listed, fault.stale_after), body))

    def _listed(self, stale_after: float, entry: re.Match[bytes]) -> bytes:
        """An entry of a listing, unless it was created later."""
        suffix = "/" + unquote(entry[1].decode())
        ages = (at for path, at in self._created_at.items() if path.endswith(suffix))
        return b"" if any(at > stale_after for at in ages) else entry[0]


def _with_body(head: bytes, body: bytes) -> bytes:
    """The answer with another body, of whatever length."""
    lines = [
        line
        for line in head.split(b"\r\n")
        if not line.lower().startswith((b"content-length", b"transfer-encoding"))
    ]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


class _Upstream:
    """A connection to the server, opened when it is wanted."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, request: bytes) -> bytes:
        """The server's answer."""
        is_fresh = self._streams is None
        try:
            return await self._ask_once(method, request)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            if is_fresh:
                raise
        # The server closes connections that were idle; nothing of this request was read then.
        return await self._ask_once(method, request)

    async def _ask_once(self, method: str, request: bytes) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                "127.0.0.1", self._port, limit=HEADERS_MAX_BYTES
            )
        reader, writer = self._streams
        writer.write(request)
        await writer.drain()
        head, body = await _read_message(reader, has_body=method != "HEAD")
        if b"connection: close" in head.lower():
            self.close()
            lines = head.split(b"\r\n")
            head = b"\r\n".join(
                line for line in lines if not line.lower().startswith(b"connection")
            )
        return head + body

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _read_message(
    reader: asyncio.StreamReader, *, has_body: bool = True
) -> tuple[bytes, bytes]:
    """Head and body of a request or an answer, as they came."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not has_body:
        return head, b""
    headers = {
        name.strip().lower(): value.strip().lower()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    if b"chunked" in headers.get(b"transfer-encoding", b""):
        return head, await _read_chunks(reader)
    return head, await reader.readexactly(int(headers.get(b"content-length", b"0")))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        body += line + await reader.readexactly(size + 2)
        if not size:
            return body


@contextmanager
def faulty_store(upstream_port: int, seed: int = 0) -> Iterator[FaultyStore]:
    """A proxy before the S3 server on this port, in its own thread; no faults at first."""
    store = FaultyStore(upstream_port, seed)
    thread = threading.Thread(target=store.run, name="faulty-store", daemon=True)
    thread.start()
    try:
        store.wait_ready()
        yield store
    finally:
        store.stop()
        thread.join()
