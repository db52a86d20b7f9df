"""The HTTP port of a process: `GET /health`, `GET /metrics`, and what its service adds.

Loaded where a port is set: aiohttp and the exporter of metrics take 0.1 s and 15 MB.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from libs.serving.http.listening import TlsListener, listen_on
from libs.serving.http.parts import HttpParts, HttpPost, HttpReply
from libs.serving.limits import HTTP_CONNECTIONS_MAX, within_open_files
from libs.serving.live_series import LiveSeries, exposition_of
from libs.serving.process.health import Health
from slatemq.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)

log = logging.getLogger(__name__)

READ_S: Final = 10.0
"""How long a request's body may take to arrive; then 408."""

SEND_S: Final = 10.0
"""How long a piece of the metrics may take to be read: each that reads holds its own text."""

PIECE_BYTES: Final = 1 << 16
"""With 10,000 queues the text is 17 MB, and its encryption in one step takes 80 ms."""

KEEP_ALIVE_S: Final = 75.0

STOP_S: Final = 2.0
"""How long requests in work may go on while the process ends."""

METRICS_AGE_S: Final = 1.0
"""Metrics are rendered this often at most: it takes tens of ms."""

POSTS_MAX: Final = 64
"""POST requests in work at once; over it 503. Each holds its body in memory."""

_TOO_MANY: Final = HttpReply(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "too many POST requests"})


REFUSAL_LENGTH_MAX: Final = 200
"""Of an error of a request that is no HTTP, as it is logged."""

_QUOTE: Final = re.compile(r":?\s+b?['\"].*", re.DOTALL)
"""What such an error quotes of the request, which may be a header with a login."""


class _Refusals(logging.Filter):
    """Makes one line, a warning, of what aiohttp logs with a stack: a request that is no HTTP.

    Anyone can send these: of such warnings most are held back, of errors none.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # The second one is of a body that nothing has read: it is not what its encoding says.
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            text = error.message if isinstance(error, HttpProcessingError) else str(error)
            what = " ".join(_QUOTE.sub("", text).split())[:REFUSAL_LENGTH_MAX]
            record.msg, record.args = "a request is not valid HTTP: %s", (what,)
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = None
        return True


_requests_log: Final = logging.getLogger(f"{__name__}.requests")
_requests_log.addFilter(_Refusals())


class Exposition:
    """The process's metrics, read on request.

    Attributes:
        reader: The reader of the meter provider.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.reader = PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)

    def render(self, series: Iterable[LiveSeries]) -> bytes:
        """The metrics as text, with these series.

        Takes tens of ms, and with 10,000 queues seconds: call it off the event loop.
        """
        return generate_latest(self._registry) + exposition_of(series)


class HttpServer:
    def __init__(
        self,
        health: Health,
        render: Callable[[], bytes] | None,
        parts: HttpParts,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`render` returns the metrics; None serves none. Without `tls` it is plain HTTP."""
        self._health = health
        self._render = render
        self._parts = parts
        self._posts_count = 0
        self._connections_max = within_open_files(HTTP_CONNECTIONS_MAX, 8)
        self._busy: set[object] = set()
        self._rendering = asyncio.Lock()
        self._rendered = b""
        self._rendered_s = float("-inf")
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._tls_listener: TlsListener | None = None

        @web.middleware
        async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(middlewares=[guarded])
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/metrics", self._get_metrics)
        for post in parts.posts:
            app.router.add_post(post.path, self._handler_of(post))
        self._runner = web.AppRunner(
            app,
            logger=_requests_log,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=STOP_S,
        )

    async def start(self, host: str, port: int) -> str:
        """Listen; returns `host:port`. Raises OSError, and then has nothing to stop."""
        await self._runner.setup()
        try:
            return f"{host}:{await self._listen(host, port)}"
        except OSError:
            await self.stop()
            raise

    async def _listen(self, host: str, port: int) -> int:
        if self._tls is not None:
            self._tls_listener = TlsListener(self._tls, self._protocol, self._connections_max)
            return self._tls_listener.start(host, port)
        loop = asyncio.get_running_loop()
        if ":" in host:
            listening = listen_on(host, port)
            self._listener = await loop.create_server(self._protocol, sock=listening)
        else:  # on all addresses of a name
            self._listener = await loop.create_server(self._protocol, host, port)
        number: int = self._listener.sockets[0].getsockname()[1]
        return number

    def _protocol(self) -> asyncio.Protocol:
        """The end of a new connection."""
        server = self._runner.server
        assert server is not None
        opened = [one for one in server.connections if one.transport is not None]
        if len(opened) >= self._connections_max:
            oldest = next((one for one in opened if one not in self._busy), None)
            if oldest is None:
                return _Refusal()
            oldest.force_close()
        protocol: asyncio.Protocol = server()
        return protocol

    async def stop(self) -> None:
        """Let requests in progress end, and stop listening."""
        if self._listener is not None:
            self._listener.close()
        if self._tls_listener is not None:
            await self._tls_listener.stop()
        await self._runner.cleanup()

    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Turn every error into an HTTP response; the log has the rest."""
        self._busy.add(request.protocol)
        try:
            answer: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            allow = {key: value for key, value in error.headers.items() if key == "Allow"}
            return _reply(error.status, {"error": error.reason}, allow)
        except Exception:  # the error is logged, and the process goes on
            log.exception("%s %s failed", request.method, request.path)
            return _reply(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "internal error"})
        else:
            return answer
        finally:
            self._busy.discard(request.protocol)

    async def _get_health(self, _: web.Request) -> web.Response:
        body: dict[str, object] = {"status": "ok"}
        if not self._health.is_serving:
            body = {"status": "not_serving", "reason": self._health.reason}
        if self._parts.queue_health is not None:
            queue = await self._parts.queue_health()
            body["queue"] = dataclasses.asdict(queue)
            if self._health.is_serving and not queue.connected:
                body["status"] = "queue_unavailable"
        is_ok = body["status"] == "ok"
        return _reply(HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE, body)

    async def _get_metrics(self, request: web.Request) -> web.StreamResponse:
        if self._render is None:
            raise web.HTTPNotFound
        async with self._rendering:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._rendered_s > METRICS_AGE_S:
                self._rendered = await asyncio.to_thread(self._render)
                self._rendered_s = now_s
        answer = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
        answer.content_length = len(self._rendered)
        await answer.prepare(request)
        if request.method == "GET":
            await _send(answer, request, self._rendered)
        return answer

    def _handler_of(self, post: HttpPost) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            headers = {name.lower(): value for name, value in request.headers.items()}
            refused = post.check(headers)
            if refused is None and self._posts_count >= POSTS_MAX:
                refused = _TOO_MANY
            if refused is not None:
                return _reply(refused.status, refused.body, refused.headers)
            self._posts_count += 1
            try:
                body = await _read(request, post.body_bytes_max)
                answer = await post.answer(body)
            except SlateMQError as error:
                answer = _refusal(error)
            finally:
                self._posts_count -= 1
            return _reply(answer.status, answer.body, answer.headers)

        return handle


class _Refusal(asyncio.Protocol):
    """Ends a connection that there is no room for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


async def _send(answer: web.StreamResponse, request: web.Request, text: bytes) -> None:
    """Send the text in pieces, as it is read; end the connection where one is not."""
    try:
        for start in range(0, len(text), PIECE_BYTES):
            async with asyncio.timeout(SEND_S):
                await answer.write(text[start : start + PIECE_BYTES])
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()


async def _read(request: web.Request, bytes_max: int) -> bytes:
    """The body. Raises HTTPException: it is too large, damaged, or does not arrive in time."""
    parts: list[bytes] = []
    size = request.content_length or 0
    try:
        async with asyncio.timeout(READ_S):
            while size <= bytes_max:
                part = await request.content.readany()
                if not part:
                    return b"".join(parts)
                parts.append(part)
                size = max(size, sum(map(len, parts)))
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    except web.RequestPayloadError as error:  # what it says is its encoding, it is not
        raise web.HTTPBadRequest from error
    raise web.HTTPRequestEntityTooLarge(bytes_max, size)


def _refusal(error: SlateMQError) -> HttpReply:
    """An error as an HTTP status: 4xx where a repeat would fail too, else 503."""
    body: dict[str, object] = {"error": error.message, "reason": error.reason}
    if isinstance(error, InvalidArgument):
        return HttpReply(HTTPStatus.BAD_REQUEST, body | {"field": error.field})
    if isinstance(error, Unavailable | ResourceExhausted | DeadlineExceeded):
        return HttpReply(HTTPStatus.SERVICE_UNAVAILABLE, body)
    return HttpReply(HTTPStatus.INTERNAL_SERVER_ERROR, body)


def _reply(
    status: int, body: Mapping[str, object], headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.json_response(dict(body), status=status, headers=headers)
