"""A port of gRPC, served by one server after another if need be.

gRPC's server for asyncio decodes the path of a call outside of the call: a path that is not UTF-8
ends the server, which then refuses connections for ever
(`_server_main_loop` of https://github.com/grpc/grpc, 1.85). One frame of anybody who can connect
would do. So the port gets another server at once. Calls in flight have some seconds to end at the
former one; clients that have connections to it are asked to make new ones, and try again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import grpc
import grpc.aio

from libs.serving.tls import ServerTls

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""Between two looks whether the server still runs: clients try again for seconds, and each look
wakes a process that may have nothing else to do."""

FORMER_S: Final = 5.0
"""How long calls of a former server may go on; then they are cancelled, and clients repeat them.
It also has calls that it took while it ended, and will not answer."""


class LateHandlers(grpc.GenericRpcHandler):
    """The handlers of a server that have been registered so far.

    A servicer needs what the start of its service opens, so it is built and registered after that.
    Until then the guard answers its calls with STARTING.
    """

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []

    @property
    def registry(self) -> grpc.aio.Server:
        """The argument of the generated `add_…_to_server` functions, in place of the server."""
        return cast("grpc.aio.Server", self)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((one for one in found if one is not None), None)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Called by generated code with what it has added by `add_generic_rpc_handlers`.

        No method is registered with gRPC's server. It asks its core for the next call of each such
        method, and frees the place for that call when it ends by itself :
        the core then writes into memory that is something else (grpcio 1.85).
        """


class GrpcPort:
    def __init__(self, make: Callable[[], grpc.aio.Server], tls: ServerTls | None) -> None:
        """Serve by servers that `make` returns, with all their handlers."""
        self._make = make
        self._tls = tls
        self._address = ""
        self._server = make()
        self._former: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        self._keeping: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> int:
        """Take the port, a free one for 0; returns which. Raises OSError."""
        self._address = f"{host}:{port}"
        taken = self._listen()
        self._address = f"{host}:{taken}"
        return taken

    async def start(self) -> None:
        await self._server.start()
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self, grace: float) -> None:
        """End all calls, by force after `grace` seconds; may be called again with less."""
        if self._keeping is not None:
            self._keeping.cancel()
        servers = (self._server, *self._former)
        await asyncio.gather(*(server.stop(grace) for server in servers))

    def _listen(self) -> int:
        try:
            if self._tls is None:
                return self._server.add_insecure_port(self._address)
            return self._server.add_secure_port(self._address, self._tls.credentials())
        except RuntimeError as error:
            raise OSError(f"{self._address}: {error}") from error

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            server: Any = self._server  # Its public methods answer only once all calls have ended.
            if not server._server.is_running():
                await self._replace()

    async def _replace(self) -> None:
        log.error("the gRPC server at %s stopped unexpectedly: starting a new one", self._address)
        former = self._server
        self._former[former] = task = asyncio.create_task(former.stop(FORMER_S))
        task.add_done_callback(lambda _: self._former.pop(former))
        self._server = self._make()
        while True:
            try:
                self._listen()
                break
            except OSError as error:
                log.warning("%s", error)  # The former one has not let go of it yet.
                await asyncio.sleep(LOOK_S)
        await self._server.start()
