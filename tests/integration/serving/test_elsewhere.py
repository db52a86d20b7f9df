"""Calls of a service that another process has: the error says which, and where it is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import grpc.aio
import pytest

from libs.serving.peers.elsewhere import SERVED_BY, Elsewhere
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.serving.requests.doors import ServiceDoor
from libs.serving.requests.gate import Gate
from libs.serving.requests.guard import CallGuard
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from slatemq import v1
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import Unimplemented
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc
from tests.integration.ingest.server import serving


async def called(channel: Any, method: str, *, is_stream: bool = False) -> Unimplemented:
    stub: Any = consumer_pb2_grpc.ConsumerServiceStub(channel)
    if is_stream:
        call: Any = anext(aiter(stub.Consume(iter([consumer_pb2.ConsumeRequest()]))))
    else:
        call = channel.unary_unary(method)(b"\x0a\x01q", timeout=30)
    with pytest.raises(Unimplemented) as caught, raising_slatemq_errors():
        await call
    return caught.value


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_to_the_wrong_service_says_where_the_right_one_is(
    tmp_path: Path, is_stream: bool
) -> None:
    # Given an ingest, and two brokers in its topology
    directory = TopologyDirectory(open_root(tmp_path.as_uri()).objects)
    for shard in (0, 1):
        await directory.announce(Peer("broker", shard, f"10.0.0.{shard}:7421", "inside:1"))
    async with serving(tmp_path.as_uri()) as ingest:
        # When a consumer calls the ingest
        error = await called(
            ingest.channel, "/slatemq.v1.ConsumerService/Claim", is_stream=is_stream
        )

    assert error.reason == "WRONG_SERVICE"
    assert error.metadata == {
        "service": "slatemq.v1.ConsumerService",
        "served_by": "broker",
        "addresses": "10.0.0.0:7421,10.0.0.1:7421",
    }
    assert "call a broker, at 10.0.0.0:7421, 10.0.0.1:7421" in error.message


async def test_who_must_prove_who_they_are_first_learn_no_address(tmp_path: Path) -> None:
    directory = TopologyDirectory(open_root(tmp_path.as_uri()).objects)
    await directory.announce(Peer("broker", 0, "10.0.0.0:7421", "inside:1"))
    gate = Gate(10)
    gate.open()
    guard = CallGuard(gate, Telemetry(), elsewhere=Elsewhere(directory)).of_door(ServiceDoor("us"))
    server = grpc.aio.server(interceptors=[guard])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        error = await called(channel, "/slatemq.v1.ConsumerService/Claim")
    await server.stop(0)

    assert error.reason == "WRONG_SERVICE"
    assert error.metadata["addresses"] == ""
    assert "10.0.0.0" not in error.message


@pytest.mark.parametrize(
    "method",
    [
        "/slatemq.v1.IngestService/NoSuchMethod",
        "/slatemq.v1.NoSuchService/Get",
        "/other.v1.ConsumerService/Claim",
        "/",
        "/" + "x" * 5_000,
    ],
)
async def test_a_method_that_no_service_has_is_unimplemented(tmp_path: Path, method: str) -> None:
    async with serving(tmp_path.as_uri()) as ingest:
        error = await called(ingest.channel, method)

    assert error.reason == "UNIMPLEMENTED"


def test_every_service_of_the_api_has_the_processes_that_serve_it() -> None:
    modules = [import_module(f"slatemq.v1.{one.name}") for one in iter_modules(v1.__path__)]

    files = [module.DESCRIPTOR for module in modules if module.__name__.endswith("_pb2")]
    assert {name for file in files for name in file.services_by_name} == SERVED_BY.keys()
