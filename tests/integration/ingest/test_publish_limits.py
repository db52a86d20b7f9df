"""Limits of the policy on publishes, through the port for clients of a real ingest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest
import yaml

from libs.access import current, quotas
from libs.serving.requests import guard
from libs.serving.server import RunningService, Signals
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.ingest.config import IngestConfig
from services.ingest.service import IngestProcess
from slatemq._rpc.rpc_status import from_rpc_error, from_status
from slatemq._tokens import new_token
from slatemq.errors import PermissionDenied, ResourceExhausted, SlateMQError
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc, task_pb2, task_pb2_grpc
from tests.configs import config_of
from tests.integration.ingest.server import message
from tests.integration.waiting import eventually

pytestmark = pytest.mark.usefixtures("cheap_hashes")

PUBLISH = "/slatemq.v1.IngestService/Publish"

NOTE: Final = "x" * 60_000
FORBIDDEN: Final = ingest_pb2.PublishRequest(runs=[message(b"x", queue="bills", note=NOTE)])
INVALID: Final = ingest_pb2.PublishRequest(
    runs=[
        ingest_pb2.PublishRun(
            payloads=[b"x"], headers={"queue": "q", "note": NOTE}, dedupe_keys=["a", "b"]
        )
    ]
)
REFUSED: Final = {
    "forbidden": FORBIDDEN.SerializeToString(),
    "invalid": INVALID.SerializeToString(),
    "unreadable": b"\xff\xff",
}
"""Publishes that are refused for a fault of their caller."""

CHARGED: Final = {
    "forbidden": FORBIDDEN.SerializeToString(),
    "invalid": INVALID.SerializeToString(),
    "unreadable": b"\xff" * 30_000,
    "large and unreadable": b"\xff" * 60_000,
    "of too many parts": ingest_pb2.PublishRequest(
        runs=[ingest_pb2.PublishRun(payloads=[b""] * 400_000)]
    ).SerializeToString(),
}
"""The same with more bytes than a second may have."""

CHARGED_ON_STREAMS: Final = {
    "unreadable": CHARGED["unreadable"],
    "too large": bytes(3 << 20),
    "invalid": ingest_pb2.PublishStreamRequest(number=1, publish=INVALID).SerializeToString(),
    "of a negative time": ingest_pb2.PublishStreamRequest(
        number=1,
        publish=ingest_pb2.PublishRequest(runs=[message(b"x", queue="q", note=NOTE)]),
        timeout_ms=-1,
    ).SerializeToString(),
}


class Publishers:
    """An ingest, and two principals; `shop` is limited."""

    def __init__(
        self, process: IngestProcess, running: RunningService, channel: grpc.aio.Channel
    ) -> None:
        self.process = process
        self.address = running.address
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
async def limited(
    folder: Path, settings: Mapping[str, Any] | None = None, **limits: int
) -> AsyncIterator[Publishers]:
    made = {name: new_token(name) for name in ("shop", "other")}
    policy = {
        "roles": {"all": [{"verbs": ["publish"], "queues": ["q"]}, {"verbs": ["inspect"]}]},
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
        **(settings or {}),
    )
    process = IngestProcess(config, Telemetry(), open_root(config.root))
    running, signals = RunningService(process, config, Telemetry()), Signals()
    ended = asyncio.create_task(running.run(signals))
    await eventually(lambda: ended.done() or running.gate._closed is None)
    try:
        async with grpc.aio.insecure_channel(running.address) as channel:
            publishers = Publishers(process, running, channel)
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


@pytest.mark.parametrize("kind", CHARGED)
async def test_a_publish_that_is_refused_for_another_reason_counts_as_one(
    tmp_path: Path, kind: str
) -> None:
    async with limited(tmp_path, publish_bytes_per_s=1000) as made:
        publish: Any = made.channel.unary_unary(PUBLISH)
        code = await publish(CHARGED[kind], metadata=made.proofs["shop"]).code()
        assert code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)

        await made.refused(made.publish("shop", 1), "publish_bytes_per_s")
        assert await made.publish("other", 1) == 1


@pytest.mark.parametrize("kind", CHARGED_ON_STREAMS)
async def test_so_does_one_on_a_stream(tmp_path: Path, kind: str) -> None:
    async with limited(tmp_path, publish_bytes_per_s=1000) as made:
        open_stream: Any = made.channel.stream_stream(f"{PUBLISH}Stream")
        stream = open_stream(metadata=made.proofs["shop"])
        await stream.write(CHARGED_ON_STREAMS[kind])
        # It ends with that, or has an answer that refuses the publish
        with suppress(grpc.aio.AioRpcError):
            await stream.read()
        stream.cancel()

        await made.refused(made.publish("shop", 1), "publish_bytes_per_s")
        assert await made.publish("other", 1) == 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """All refusals but the first are held back, for hours; whether each kept its frames."""
    monkeypatch.setattr(quotas, "PROMPT_REFUSALS_PER_S", 0.0001)
    monkeypatch.setattr(quotas, "HELD_S_MAX", 36_000)
    hold_back, kept = current.hold_back, list[bool]()

    async def noted(error: SlateMQError, *args: Any, **named: Any) -> None:
        kept.append(error.__traceback__ is not None)
        await hold_back(error, *args, **named)

    monkeypatch.setattr(guard, "hold_back", noted)
    return kept


@pytest.mark.parametrize("kind", REFUSED)
async def test_answers_of_publishes_that_are_refused_again_and_again_are_held_back(
    tmp_path: Path, held: list[bool], kind: str
) -> None:
    async with limited(tmp_path) as made:
        publish: Any = made.channel.unary_unary(PUBLISH)
        refusal = await publish(REFUSED[kind], metadata=made.proofs["shop"]).code()

        patient = publish(REFUSED[kind], metadata=made.proofs["shop"])
        code = grpc.StatusCode.DEADLINE_EXCEEDED
        while code is grpc.StatusCode.DEADLINE_EXCEEDED:  # On a busy machine.
            code = await publish(REFUSED[kind], metadata=made.proofs["shop"], timeout=4).code()
        assert code is refusal

        # The caller's other publishes, and those of others, have nothing to do with it
        assert [await made.publish(name, 1) for name in ("shop", "other")] == [1, 1]
        assert not patient.done()
        patient.cancel()
        assert len(held) >= 3
        assert not any(held)


async def test_a_stream_is_read_no_further_while_its_refusals_are_held_back(
    tmp_path: Path, held: list[bool]
) -> None:
    async with limited(tmp_path) as made:
        stream = made.stub.PublishStream(metadata=made.proofs["shop"])
        for number in (1, 2):
            request = ingest_pb2.PublishStreamRequest(number=number, publish=FORBIDDEN)
            await stream.write(request)
            (answer,) = (await stream.read()).answers
            assert isinstance(from_status(answer.error), PermissionDenied)

        await stream.write(ingest_pb2.PublishStreamRequest(number=3, publish=FORBIDDEN))
        third = asyncio.create_task(stream.read())
        other = made.stub.PublishStream(metadata=made.proofs["other"])
        publish = ingest_pb2.PublishRequest(runs=[message(b"x", queue="q")])
        for number in range(3):
            await other.write(ingest_pb2.PublishStreamRequest(number=number, publish=publish))
            await other.read()
        assert not third.done()
        stream.cancel()
        other.cancel()
        await asyncio.wait([third])


async def test_asking_for_a_task_is_a_call_and_no_publish(tmp_path: Path) -> None:
    async with limited(tmp_path, publish_messages_per_s=1, calls_per_s=1) as made:
        await made.publish("shop", 1000)
        tasks: Any = task_pb2_grpc.TaskServiceStub(made.channel)
        asked = task_pb2.GetTaskRequest(task_id="no task")

        calls = [tasks.GetTask(asked, metadata=made.proofs["shop"]) for _ in range(10)]
        codes = [await call.code() for call in calls]

        refused = codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert 0 < refused < 10
        assert made.usage.refused == {("calls_per_s", "shop"): refused}
