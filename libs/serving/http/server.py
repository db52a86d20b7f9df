"""The HTTP port of a process: `GET /health`, `GET /metrics`, and what its service adds.

Loaded where a port is set: aiohttp and the exporter of metrics take 0.1 s and 15 MB.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from libs.serving.http.parts import HttpParts, HttpPost, HttpReply
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

KEEP_ALIVE_S: Final = 75.0

STOP_S: Final = 2.0
"""How long requests in work may go on while the process ends."""

POSTS_MAX: Final = 64
"""POST requests in work at once; over it 503. Each holds its body in memory."""

_TOO_MANY: Final = HttpReply(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "too many POST requests"})


class Exposition:
    """The process's metrics, read on request.

    Attributes:
        reader: The reader of the meter provider.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.reader = PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)

    def render(self) -> bytes:
        """The metrics as text; takes tens of ms with many queues, so call it off the event loop."""
        return generate_latest(self._registry)


class HttpServer:
    def __init__(
        self, health: Health, render: Callable[[], bytes] | None, parts: HttpParts
    ) -> None:
        """`render` returns the metrics; None serves none."""
        self._health = health
        self._render = render
        self._parts = parts
        self._posts_count = 0

        @web.middleware
        async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(middlewares=[guarded])
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/metrics", self._get_metrics)
        for post in parts.posts:
            app.router.add_post(post.path, self._handler_of(post))
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=STOP_S
        )

    async def start(self, host: str, port: int) -> str:
        """Listen; returns `host:port`. Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return f"{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Let requests in progress end, and stop listening."""
        await self._runner.cleanup()

    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Turn every error into an HTTP response; the log has the rest."""
        try:
            answer: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            return _reply(error.status, {"error": error.reason}, error.headers.get("Allow"))
        except Exception:  # the error is logged, and the process goes on
            log.exception("%s %s failed", request.method, request.path)
            return _reply(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "internal error"})
        else:
            return answer

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

    async def _get_metrics(self, _: web.Request) -> web.Response:
        if self._render is None:
            raise web.HTTPNotFound
        text = await asyncio.to_thread(self._render)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    def _handler_of(self, post: HttpPost) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            headers = {name.lower(): value for name, value in request.headers.items()}
            refused = post.check(headers)
            if refused is None and self._posts_count >= POSTS_MAX:
                refused = _TOO_MANY
            if refused is not None:
                return _reply(refused.status, refused.body)
            self._posts_count += 1
            try:
                body = await _read(request, post.body_bytes_max)
                answer = await post.answer(body)
            except SlateMQError as error:
                answer = _refusal(error)
            finally:
                self._posts_count -= 1
            return _reply(answer.status, answer.body)

        return handle


async def _read(request: web.Request, bytes_max: int) -> bytes:
    """The body. Raises HTTPException where it is too large, or does not arrive in time."""
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
    raise web.HTTPRequestEntityTooLarge(bytes_max, size)


def _refusal(error: SlateMQError) -> HttpReply:
    """An error as an HTTP status: 4xx where a repeat would fail too, else 503."""
    body: dict[str, object] = {"error": error.message, "reason": error.reason}
    if isinstance(error, InvalidArgument):
        return HttpReply(HTTPStatus.BAD_REQUEST, body | {"field": error.field})
    if isinstance(error, Unavailable | ResourceExhausted | DeadlineExceeded):
        return HttpReply(HTTPStatus.SERVICE_UNAVAILABLE, body)
    return HttpReply(HTTPStatus.INTERNAL_SERVER_ERROR, body)


def _reply(status: int, body: Mapping[str, object], allow: str | None = None) -> web.Response:
    headers = {"Allow": allow} if allow else None
    return web.json_response(dict(body), status=status, headers=headers)
