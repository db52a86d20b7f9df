"""gRPC's servers in a simulated world: what they give to the services' own handlers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from tests.simulation.loop import MACHINE
from tests.simulation.network import HALF_CLOSED, Call, Channel, Metadata, Network, Status


class _Details(NamedTuple):
    """grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Metadata


class Server:
    """The calls of grpc.aio.Server that services make."""

    def __init__(self, network: Network, interceptors: Sequence[Any]) -> None:
        self.network = network
        self.machine = MACHINE.get()
        self.is_listening = False
        self._interceptors = interceptors
        self._handlers: list[Any] = []
        self._addresses: list[str] = []
        self._calls: dict[ServedCall, None] = {}
        self._stopped = asyncio.Event()
        self._server = self  # GrpcPort asks gRPC's inner server whether it runs.

    def is_running(self) -> bool:
        return self.is_listening

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """They are generic ones, too."""

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port) or self.network.free_port()
        address = f"{host}:{number}"
        known = self.network.servers.get(address)
        if known is not None and known.machine.is_alive and known.is_listening:
            raise RuntimeError(f"{address} is in use")
        self._addresses.append(address)
        self.network.servers[address] = self
        return number

    async def start(self) -> None:
        self.is_listening = True

    async def stop(self, grace: float | None) -> None:
        self.is_listening = False
        for address in self._addresses:
            if self.network.servers.get(address) is self:
                del self.network.servers[address]
        if grace and self._calls:
            tasks = [call.task for call in self._calls if call.task is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=grace)
        for call in list(self._calls):
            call.call.network.loop.at(
                self.network.loop.time(),
                self.machine,
                call.end,
                Status(grpc.StatusCode.UNAVAILABLE, "GOAWAY received"),
            )
            call.cancel()
        await asyncio.sleep(0)

    def accept(self, call: Call) -> None:
        """A call has arrived."""
        served = call.served = ServedCall(self, call)
        self._calls[served] = None
        served.task = self.network.loop.create_task(served.run())
        served.task.add_done_callback(lambda _: self._calls.pop(served, None))

    async def handler_of(self, details: _Details) -> Any:
        async def registered(details: _Details) -> Any:
            found = (handler.service(details) for handler in self._handlers)
            return next((one for one in found if one is not None), None)

        continuation: Any = registered
        for interceptor in reversed(self._interceptors):
            continuation = _through(interceptor, continuation)
        return await continuation(details)


def _through(interceptor: Any, continuation: Any) -> Any:
    async def intercepted(details: _Details) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return intercepted


class ServedCall:
    """The server's side of a call: grpc.aio.ServicerContext."""

    def __init__(self, server: Server, call: Call) -> None:
        self.call = call
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._status: Status | None = None
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: Metadata = ()
        self._encode: Callable[[Any], bytes] = bytes
        self._is_cancelled = False
        self._is_half_closed = False
        self._done_callbacks: list[Callable[[Any], None]] = []

    async def run(self) -> None:
        try:
            handler = await self._server.handler_of(_Details(self.call.method, self.call.metadata))
            if handler is None:
                self.end(Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
                return
            await self._behave(handler)
            self.end(Status(self._code or grpc.StatusCode.OK, self._details, self._trailing))
        except grpc.aio.AbortError:
            self.end(Status(grpc.StatusCode.UNKNOWN, "aborted without a status"))
        except asyncio.CancelledError:
            self.end(Status(grpc.StatusCode.CANCELLED, "CANCELLED"))
        except Exception as error:
            self._server.network.loop.faults.append(f"{self.call.method} raised {error!r}")
            self.end(Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))

    async def _behave(self, handler: Any) -> None:
        name = "_".join(
            "stream" if many else "unary"
            for many in (handler.request_streaming, handler.response_streaming)
        )
        behavior = getattr(handler, name)
        encode: Callable[[Any], bytes] = handler.response_serializer or bytes
        self._encode = encode
        decode = handler.request_deserializer
        assert handler.request_streaming, "the guard takes requests raw, as streams"
        assert decode is None, "the guard takes requests raw"
        result: Any = behavior(self._requests(), self)
        if inspect.isasyncgen(result):
            async for response in result:
                self._send(encode(response))
            return
        response = await result
        if not handler.response_streaming:
            self._send(encode(response))

    def _send(self, data: bytes) -> None:
        if self._status is None and not self._is_cancelled:
            assert self.call.responses is not None, "begun"
            self.call.responses.send(data)

    def end(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        assert self.call.responses is not None, "begun"
        self.call.responses.send(status)
        for callback in self._done_callbacks:
            callback(self)

    def cancel(self) -> None:
        """The client has gone."""
        if self._status is None:
            self._is_cancelled = True
            if self.task is not None:
                self.task.cancel()

    async def _requests(self) -> AsyncIterator[bytes]:
        while (request := await self.read()) is not grpc.aio.EOF:
            yield request

    # --- grpc.aio.ServicerContext -------------------------------------------

    async def read(self) -> Any:
        if self._is_half_closed:
            return grpc.aio.EOF
        assert self.call.requests is not None, "begun"
        item = await self.call.requests.next()
        if item is HALF_CLOSED:
            self._is_half_closed = True
            return grpc.aio.EOF
        return item

    async def write(self, response: Any) -> None:
        self._send(self._encode(response))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        if self._status is not None:
            raise grpc.aio.UsageError("the call has ended")
        self.end(Status(code, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Clients of the world do not read it."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailing = tuple(metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode | None:
        """What the call ended with; None: it has not ended."""
        return None if self._status is None else self._status.code

    def invocation_metadata(self) -> Metadata:
        return self.call.metadata

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return f"ipv4:{self.call.client.name}:1"

    def peer_identities(self) -> None:
        return None

    def peer_identity_key(self) -> None:
        return None

    def time_remaining(self) -> float | None:
        return self.call.time_remaining()

    def cancelled(self) -> bool:
        return self._is_cancelled

    def done(self) -> bool:
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._done_callbacks.append(callback)


def install(network: Network) -> None:
    """Let clients and services open channels and servers of this network."""

    def server(interceptors: Sequence[Any] = (), **_: Any) -> Server:
        return Server(network, interceptors)

    def insecure_channel(address: str, **_: Any) -> Channel:
        return Channel(network, address)

    public: Any = grpc.aio
    public.server, public.insecure_channel = server, insecure_channel
