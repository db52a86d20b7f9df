"""What callers send by HTTP."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from typing import Any, Final, cast

from libs.serving.http.parts import HttpParts, HttpPost, HttpReply
from libs.serving.http.server import HttpServer
from libs.serving.process.health import Health
from services.ingest.events.s3_events import S3Events
from slatemq.events.s3 import read_notifications
from tests.fuzz.compare import Wrong

_BODY_BYTES_MAX: Final = 512
_TURNS: Final = 12
"""Of the event loop: more than a request needs."""


class _Written(asyncio.Transport):
    """The end of a connection, which keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def pause_reading(self) -> None:
        """All of an input is given at once."""

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0


class _HttpPort:
    """The HTTP port of an ingest, without a socket; on a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._errors: list[Any] = []
        self._loop.set_exception_handler(lambda _, context: self._errors.append(context))
        events = S3Events(cast("Any", None), cast("Any", None), lambda: "secret", 1 << 20)

        async def answered(body: bytes) -> HttpReply:
            count = len(read_notifications(body).events)
            return HttpReply(200, {"count": count})

        posts = [
            HttpPost("/s3-events", _BODY_BYTES_MAX, answered, events.post.check),
            HttpPost("/open", _BODY_BYTES_MAX, answered, lambda _: None),
        ]
        self._server = HttpServer(Health([]), None, HttpParts(posts))
        self._loop.run_until_complete(self._server._runner.setup())

    def take(self, data: bytes) -> bytes:
        """What is answered to these bytes on a new connection."""
        return self._loop.run_until_complete(self._take(data))

    async def _take(self, data: bytes) -> bytes:
        protocol = self._server._protocol()
        transport = _Written()
        protocol.connection_made(transport)
        protocol.data_received(data)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if self._errors:
            raise Wrong(f"an error in the event loop: {self._errors}")
        return bytes(transport.data)


@cache
def _http_port() -> _HttpPort:
    return _HttpPort()


_INTERNAL: Final = re.compile(rb"(^|\n)HTTP/[0-9.]+ 500 ")


def http(data: bytes) -> None:
    """The bytes of an HTTP connection: each request is answered, and none as an internal error."""
    written = _http_port().take(data)
    if written and not written.startswith(b"HTTP/"):
        raise Wrong(f"not an answer of HTTP: {written[:80]!r}")
    # aiohttp fails to quote an Expect header that is not ASCII, before anything of ours runs.
    if _INTERNAL.search(written) and b"expect" not in data.lower():
        raise Wrong(f"an internal error: {written!r}")
