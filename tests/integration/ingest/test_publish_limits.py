"""Limits of the policy on publishes, through the port for clients of a real ingest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml

from libs.serving.server import RunningService, Signals
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.ingest.config import IngestConfig
from services.ingest.service import IngestProcess
from slatemq._rpc.rpc_status import from_rpc_error, from_status
from slatemq._tokens import new_token
from slatemq.errors import ResourceExhausted
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc
from tests.configs import config_of
from tests.integration.ingest.server import message
from tests.integration.waiting import eventually

PUBLISH = "/slatemq.v1.IngestService/Publish"


class Publishers:
    """An ingest, and two principals; `shop` is limited."""

    def __init__(self, running: RunningService, channel: grpc.aio.Channel) -> None:
        self.usage = running._protection.callers.usage  # type: ignore[union-attr]
        self.channel = channel
        self.stub: Any = ingest_pb2_grpc.IngestServiceStub(channel)
        self.proofs: dict[str, Any] = {}

    async def publish(self, name: str, count: int, payload: bytes = b"x", **headers: str) -> int:
        run = ingest_pb2.PublishRun(payloads=[payload] * count, headers={"queue": "q", **headers})
        request = ingest_pb2.PublishRequest(runs=[run])
        answer = await self.stub.Publish(request, metadata=self.proofs[name])
        return len(answer.message_ids)

    async def refused(self, call: Any, limit: str) -> ResourceExhausted:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return limited_by(from_rpc_error(caught.value), limit)


def limited_by(error: BaseException, limit: str) -> ResourceExhausted:
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.metadata) == ("PRINCIPAL_LIMIT", {"limit": limit})
    return error


@asynccontextmanager
async def limited(folder: Path, **limits: int) -> AsyncIterator[Publishers]:
    made = {name: new_token(name) for name in ("shop", "other")}
    policy = {
        "roles": {"all": [{"verbs": ["publish"]}]},
        "bindings": [{"principals": [*made], "roles": ["all"]}],
        "limits": [{"principals": ["shop"], **limits}],
    }
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    tokens = {"tokens": [one.entry for one in made.values()]}
    (folder / "tokens.yaml").write_text(yaml.safe_dump(tokens))
    config = config_of(
        IngestConfig,
        root="memory:///",
        port=0,
        access_policy=str(folder / "policy.yaml"),
        access_tokens=str(folder / "tokens.yaml"),
    )
    process = IngestProcess(config, Telemetry(), open_root(config.root))
    running, signals = RunningService(process, config, Telemetry()), Signals()
    ended = asyncio.create_task(running.run(signals))
    await eventually(lambda: ended.done() or running.gate._closed is None)
    try:
        async with grpc.aio.insecure_channel(running.address) as channel:
            publishers = Publishers(running, channel)
            for name, one in made.items():
                publishers.proofs[name] = (("authorization", f"Bearer {one.token}"),)
            yield publishers
    finally:
        signals.first.set()
        assert (await ended).code == 0


async def test_who_owes_time_publishes_nothing_and_others_do(tmp_path: Path) -> None:
    async with limited(tmp_path, publish_messages_per_s=1) as made:
        assert await made.publish("shop", 1000) == 1000

        error = await made.refused(made.publish("shop", 1), "publish_messages_per_s")
        assert error.retry_after_ms == 60_000
        assert await made.publish("other", 1000) == 1000
        # Before the request is parsed
        raw: Any = made.channel.unary_unary(PUBLISH)
        unreadable = raw(b"\xff\xff", metadata=made.proofs["shop"])
        await made.refused(unreadable, "publish_messages_per_s")
        assert made.usage.refused == {("publish_messages_per_s", "shop"): 2}


async def test_bytes_are_those_of_payloads_and_headers(tmp_path: Path) -> None:
    async with limited(tmp_path, publish_bytes_per_s=1000) as made:
        await made.publish("shop", 1, b"", note="x" * 60_000)

        await made.refused(made.publish("shop", 1), "publish_bytes_per_s")


async def test_a_stream_goes_on_after_requests_that_are_refused(tmp_path: Path) -> None:
    async with limited(tmp_path, publish_messages_per_s=1) as made:
        await made.publish("shop", 1000)
        stream = made.stub.PublishStream(metadata=made.proofs["shop"])
        publish = ingest_pb2.PublishRequest(runs=[message(b"x", queue="q")])

        answered = []
        for number in (1, 2, 3):
            await stream.write(ingest_pb2.PublishStreamRequest(number=number, publish=publish))
            answered += (await stream.read()).answers

        assert [one.number for one in answered] == [1, 2, 3]
        for one in answered:
            limited_by(from_status(one.error), "publish_messages_per_s")
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await eventually(lambda: not made.usage.open.total())
