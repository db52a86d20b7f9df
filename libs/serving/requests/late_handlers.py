"""Handlers that are registered once the service has started; its port is bound before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import grpc
import grpc.aio


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
        """Called by generated code with what it has added by `add_generic_rpc_handlers`."""
