from collections.abc import AsyncIterator

import grpc.aio
import pytest

from libs.serving import limits
from libs.serving.peers.channels import open_channel
from libs.serving.requests.gate import Gate
from libs.serving.requests.guard import CallGuard
from libs.serving.telemetry import Telemetry
from tests.integration.serving.echo_service import EchoServicer


@pytest.fixture
def gate() -> Gate:
    opened = Gate(calls_max=3)
    opened.open()
    return opened


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@pytest.fixture
def servicer() -> EchoServicer:
    return EchoServicer()


@pytest.fixture
async def channel(
    servicer: EchoServicer, gate: Gate, telemetry: Telemetry
) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(
        interceptors=[CallGuard(gate, telemetry)], options=limits.server_options()
    )
    servicer.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(0)
