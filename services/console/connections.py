"""The connections of browsers: those without a request make room for others.

uvicorn gives a connection any time for its first request, so that as many as there may be, which
say nothing, would close the console to everyone. It has no bound of handshakes either: those are
made by our own listener.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTIONS_MAX: Final = 512
"""Of all browsers. One more closes the oldest that has no whole request in work; where all have
one, its request gets 503."""


HANDSHAKES_MAX: Final = 256
"""Of TLS, before a browser has a connection. One more closes the oldest."""


class Connection(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._opened_s = self.loop.time()
        if len(self.connections) >= CONNECTIONS_MAX:
            opened = [one for one in self.connections if isinstance(one, Connection)]
            idle = [one for one in opened if one.is_idle]
            if idle:
                oldest = min(idle, key=lambda one: one._opened_s)
                self.connections.discard(oldest)
                oldest.transport.abort()
        super().connection_made(transport)

    @property
    def is_idle(self) -> bool:
        """Whether no whole request is in work."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body
