"""Calls of a service that another process has: the error says which, and where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libs.serving.peers.elsewhere import PACKAGE, SERVED_BY
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.serving.process.config import load
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.broker.config import BrokerConfig
from services.broker.service import BrokerService
from services.ingest.config import IngestConfig
from services.ingest.service import IngestProcess
from services.janitor.config import JanitorConfig
from services.janitor.service import JanitorProcess
from services.router.config import RouterConfig
from services.router.service import RouterProcess
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import Unimplemented
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc
from tests.integration.ingest.server import serving

PROCESSES = {
    "ingest": (IngestConfig, IngestProcess),
    "router": (RouterConfig, RouterProcess),
    "broker": (BrokerConfig, BrokerService),
    "janitor": (JanitorConfig, JanitorProcess),
}


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


@pytest.mark.parametrize("kind", PROCESSES)
async def test_what_a_process_serves_is_what_callers_of_others_learn(kind: str) -> None:
    config_type, build = PROCESSES[kind]
    config: Any = load(config_type, kind, ["--root", "memory:///"], {})
    process: Any = build(config, Telemetry(), open_root(config.root))

    result = {f"{PACKAGE}{name}" for name, kinds in SERVED_BY.items() if kind in kinds}
    assert set(process.grpc_services) == result
