"""The process: its listener, TLS, start and end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.types import ASGIApp

from libs.serving.http.listening import TlsListener, listen_on
from libs.serving.http.parts import HttpParts
from libs.serving.process.exits import EXIT_CLEAN, ExitCause
from libs.serving.process.health import Health
from libs.serving.process.memory import bound_arenas, keep_for_good, return_memory
from libs.serving.process.ready_file import write_ready_file
from libs.serving.process.settings import flag_of
from libs.serving.startup import begin, recorder_of
from libs.serving.tls import certificate_files, https_context, require_tls, setting_of
from services.console import connections
from services.console.app import build_app
from services.console.config import ConsoleConfig
from slatemq._rpc.endpoints import addresses_of
from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from libs.serving.http.server import Exposition, HttpServer

log = logging.getLogger(__name__)

HEADERS_BYTES_MAX: Final = 32 * 1024
"""Of a request: the cookie has 4 KiB, an address some hundred bytes."""

KEEP_ALIVE_S: Final = 20

END_S: Final = 2
"""How long pages in work may go on at the end: browsers keep idle connections open for longer."""


def run(config: ConsoleConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    bound_arenas()
    exposition = begin("console", config)
    for name in ("uvicorn.error", "uvicorn.asgi"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        check(config)
        tls = https_context(certificate_files(config))
        listener = listen_on(config.host, config.port)
    except InvalidArgument as error:
        setting = flag_of(setting_of(error.field))
        return _refuse(ExitCause.usage(f"{setting}: {error.description}"))
    except OSError as error:
        return _refuse(_cannot_listen(config.address_host, config.port, error))
    return asyncio.run(_serve(config, listener, tls, exposition))


def _cannot_listen(host: str, port: int, error: OSError) -> ExitCause:
    return ExitCause.failed(f"cannot listen on {host}:{port}: {error.strerror or error}")


def _refuse(cause: ExitCause) -> int:
    cause.log(log)
    return cause.code


def check(config: ConsoleConfig) -> None:
    """Raises InvalidArgument for settings that do not go together, or would open the console."""
    try:
        addresses_of(config.endpoint)
    except InvalidArgument as error:
        raise InvalidArgument("endpoint", error.description) from error
    certificate_files(config)
    require_tls(config, "docs/how-to/secure.md")


async def _serve(
    config: ConsoleConfig,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    exposition: Exposition | None,
) -> int:
    recorder = recorder_of("console", config, exposition)
    app = build_app(config, recorder)
    server = server_of(config, app, tls)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        # Open pages connect again later; otherwise their streams would be waited for.
        app.state.console.watches.stop_streams()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    host, port = config.address_host, listener.getsockname()[1]
    scheme = "http" if tls is None else "https"
    facts = {"address": f"{host}:{port}"}
    http: HttpServer | None = None
    if exposition is not None:
        try:
            render = partial(exposition.render, recorder.series)
            http, facts["http_address"] = await _http_port(config, render, tls)
        except OSError as error:
            return _refuse(_cannot_listen(host, config.http_port, error))
    log.info("serving", extra={**facts, "address": f"{scheme}://{host}:{port}"})
    write_ready_file(config.ready_file, facts)
    keep_for_good()
    returning = asyncio.create_task(return_memory(has_few_objects=True))
    try:
        await server.serve([listener])
    finally:
        returning.cancel()
        if http is not None:
            await http.stop()
        await app.state.console.watches.close()
        await app.state.console.clients.close()
    await asyncio.to_thread(recorder.shutdown)
    log.info("stopped")
    return EXIT_CLEAN


def server_of(config: ConsoleConfig, app: ASGIApp, tls: ssl.SSLContext | None) -> uvicorn.Server:
    """The server of these pages, not yet started."""
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        http=connections.Connection,
        limit_concurrency=connections.CONNECTIONS_MAX + 1,
        h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=min(END_S, max(1, config.drain_ms // 1000)),
    )
    return _Server(settings, tls)


async def _http_port(
    config: ConsoleConfig, render: Callable[[], bytes], tls: ssl.SSLContext | None
) -> tuple[HttpServer, str]:
    """The port of health and metrics, and its address. Raises OSError."""
    health = Health(())
    await health.serving()
    server: HttpServer = import_module("libs.serving.http.server").HttpServer(
        health, render, HttpParts(), tls
    )
    return server, await server.start(config.address_host, config.http_port)


class _Server(uvicorn.Server):
    """Leaves signals to the loop: its own way would end the process by the signal."""

    def __init__(self, settings: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(settings)
        self._tls: TlsListener | None = None
        if tls is not None:
            self._tls = TlsListener(tls, self._connection, connections.HANDSHAKES_MAX)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None or not sockets:
            await super().startup(sockets)
            return
        await super().startup([])
        self._tls.accept(sockets[0])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is not None:
            await self._tls.stop()
        await super().shutdown(sockets)

    def _connection(self) -> connections.Connection:
        return connections.Connection(self.config, self.server_state, self.lifespan.state)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
