"""A service of three methods, one of each kind that there is, for the tests of libs/serving.

Requests and answers are google.protobuf.StringValue, so no proto is compiled for it. What the
request says decides what the handler does. Run as a program it is a whole service process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import StringValue

from libs.serving.main import main
from libs.serving.process.config import ServingConfig
from libs.serving.process.exits import ExitCause, FatalError
from libs.serving.process.settings import setting
from libs.serving.service import Service
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root, open_root
from libs.storage.errors import Fenced, StoreUnavailable
from slatemq.errors import FailedPrecondition

NAME = "test.Echo"
METHODS = {kind: f"/{NAME}/{kind}" for kind in ("uu", "us", "ss")}


@dataclass
class EchoServicer:
    """Answers as the request says."""

    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    flooded: int = 0
    failure: Callable[[], BaseException] = RuntimeError

    async def answer(self, word: str) -> StringValue:
        match word:
            case "refuse":
                raise FailedPrecondition("LEASE_EXPIRED", "the lease ended", subject="lease 1")
            case "fail":
                raise self.failure()
            case "wait":
                self.waiting.set()
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
        return StringValue(value=word)

    async def uu(self, request: StringValue, context: Any) -> StringValue:
        return await self.answer(request.value)

    async def us(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        try:
            for word in request.value.split():
                yield await self.answer(word)
                while word.startswith("flood"):
                    self.flooded += 1
                    yield StringValue(value=word)
        finally:
            self.closed.set()

    async def ss(
        self, requests: AsyncIterator[StringValue], context: Any
    ) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield await self.answer(request.value)

    def add_to(self, server: grpc.aio.Server) -> None:
        codec = (StringValue.FromString, StringValue.SerializeToString)
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods: dict[str, Any] = {
            "uu": unary(self.uu, *codec),
            "us": grpc.unary_stream_rpc_method_handler(self.us, *codec),
            "ss": stream(self.ss, *codec),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, methods),))


class EchoService(Service[ServingConfig]):
    """The servicer as a whole service, whose steps a test can hold up or make fail."""

    kind = "echo"
    grpc_services: Sequence[str] = (NAME,)

    def __init__(self) -> None:
        config = ServingConfig(root="memory:///")
        super().__init__(config, 0, Telemetry(), open_root(config.root))
        self.servicer = EchoServicer()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.fatal: asyncio.Future[ExitCause] = asyncio.get_running_loop().create_future()
        self.steps: list[str] = []
        self.peer_address = ""
        self.start_error: Exception | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        self.servicer.add_to(server)

    async def start(self, address: str, peer_address: str) -> None:
        self.peer_address = peer_address
        self.steps.append(f"start {address}")
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error

    async def wait_fatal(self) -> ExitCause:
        return await asyncio.shield(self.fatal)

    async def drain(self) -> None:
        self.steps.append("drain")

    async def stop(self) -> None:
        self.steps.append("stop")


@dataclass(frozen=True, kw_only=True)
class EchoConfig(ServingConfig):
    """An echo."""

    end: str = setting(
        "How to end: fenced, failed, unavailable, signalled, wrong; or not.", default=""
    )


def build(config: EchoConfig, telemetry: Telemetry, root: Root) -> EchoService:
    service = EchoService()
    match config.end:
        case "fenced":
            service.fatal.set_result(ExitCause.fenced("another broker owns shard 3"))
        case "failed":
            service.fatal.set_exception(Fenced("detected newer DB client"))
        case "unavailable":
            service.start_error = StoreUnavailable("no such bucket")
        case "signalled":
            os.kill(os.getpid(), signal.SIGTERM)
        case "wrong":
            raise FatalError(ExitCause.usage("the shard is of another instance"))
    return service


if __name__ == "__main__":
    main("echo", EchoConfig, build)
