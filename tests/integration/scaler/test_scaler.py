"""KEDA's calls, by a client of KEDA's proto, at a scaler beside a stack with TLS and a policy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import slatemq
from libs.serving.process.healthprobe import probe
from services.scaler.stubs import externalscaler_pb2
from services.scaler.stubs.externalscaler_pb2_grpc import ExternalScalerStub
from slatemq.cli.access.dev_certificates import SERVICE_NAME
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc
from tests.acceptance.local_stack import REPOSITORY, LocalStack, peer_address, wait_until
from tests.integration.stack.secured import Secured
from tests.integration.waiting import WAIT_SECONDS
from tests.ready_process import popen

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # A whole stack, and two processes beside it.

VERBS = ["publish", "consume", "inspect", "edit", "administer", "operate"]

POLICY = {
    "roles": {
        "all": [{"verbs": VERBS}],
        "scaler": [{"verbs": ["inspect"], "queues": ["work-*"]}],
    },
    "bindings": [
        {"principals": ["ops"], "roles": ["all"]},
        {"principals": ["scaler"], "roles": ["scaler"]},
    ],
}

KEDA = "dev-client"
"""The name in the client's certificate that is made for tests."""


class ScalerProcess:
    """`python -m services.scaler`, as a Deployment has it but for its address."""

    def __init__(self, secured: Secured, stack: LocalStack, **settings: str) -> None:
        self.secured = secured
        self._ready_file = secured.folder / f"scaler-{len(list(secured.folder.iterdir()))}.json"
        token_file = secured.folder / "scaler.token"
        token_file.write_text(secured.tokens["scaler"].token)
        token_file.chmod(0o600)
        tls = {name: file for name, file in secured.environ.items() if "TLS" in name}
        environ = tls | {
            "SLATEMQ_ENDPOINT": stack.endpoints["broker"],
            "SLATEMQ_TOKEN_FILE": str(token_file),
            "SLATEMQ_KEDA_IDENTITY": KEDA,
            "SLATEMQ_READY_FILE": str(self._ready_file),
            **settings,
        }
        self._log = self._ready_file.with_suffix(".log")
        with self._log.open("wb") as log:
            self.process: Any = popen(
                [sys.executable, "-m", "services.scaler"],
                cwd=REPOSITORY,
                env=os.environ | environ,
                stderr=log,
            )
        wait_until(self._ready_file.exists, 60, self._alive)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def _alive(self) -> None:
        assert self.process.poll() is None, self.said

    @property
    def address(self) -> str:
        return str(json.loads(self._ready_file.read_text())["address"])

    def channel(self, certificate: str = "client") -> grpc.aio.Channel:
        """A connection as KEDA makes it, with this certificate; empty: with none."""
        folder = self.secured.certificates
        files = [folder / f"{certificate}.{end}" for end in ("key", "crt")] if certificate else []
        own = [file.read_bytes() for file in files]
        credentials = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes(), *own)
        return grpc.aio.secure_channel(self.address, credentials)

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return int(self.process.wait(timeout=60))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Secured, LocalStack]]:
    made = Secured(tmp_path_factory.mktemp("scaler"), POLICY, ("ops", "scaler"))
    with made.running() as stack:
        yield made, stack


@pytest.fixture(scope="module")
def scaler(secured: tuple[Secured, LocalStack]) -> Iterator[ScalerProcess]:
    process = ScalerProcess(*secured)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
async def ops(secured: tuple[Secured, LocalStack]) -> AsyncIterator[slatemq.Client]:
    made, stack = secured
    async with slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as client:
        yield client


class Keda:
    """What KEDA does with one trigger of a ScaledObject."""

    def __init__(self, channel: grpc.aio.Channel, **metadata: str) -> None:
        self.stub: Any = ExternalScalerStub(channel)
        # KEDA passes on what it reads itself.
        metadata |= {"scalerAddress": "slatemq-scaler.slatemq.svc:7420", "enableTLS": "true"}
        self.ref = externalscaler_pb2.ScaledObjectRef(
            name="worker", namespace="shop", scalerMetadata=metadata
        )

    async def _ask(self, method: Any, request: Any) -> Any:
        """The answer, once the services that the scaler asks have answered it in time."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                try:
                    return await method(request, timeout=60)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                await asyncio.sleep(0.05)

    async def is_active(self) -> bool:
        return bool((await self._ask(self.stub.IsActive, self.ref)).result)

    async def metric(self) -> tuple[str, float]:
        """The name that GetMetricSpec gives, and the value that GetMetrics has for it."""
        (spec,) = (await self._ask(self.stub.GetMetricSpec, self.ref)).metricSpecs
        # The autoscaler of Kubernetes asks in lower case, whatever the name is.
        request = externalscaler_pb2.GetMetricsRequest(
            scaledObjectRef=self.ref, metricName=spec.metricName.lower()
        )
        (metric,) = (await self._ask(self.stub.GetMetrics, request)).metricValues
        assert metric.metricName == spec.metricName
        assert metric.metricValue == -(-metric.metricValueFloat // 1)
        return str(spec.metricName), float(metric.metricValueFloat)

    async def value(self) -> float:
        return (await self.metric())[1]

    async def refusal(self, call: str = "IsActive") -> tuple[grpc.StatusCode, str]:
        """The status and words of a call that is refused."""
        request: Any = self.ref
        if call == "GetMetrics":
            request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=self.ref)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await getattr(self.stub, call)(request, timeout=60)
        return refused.value.code(), str(refused.value.details())


@asynccontextmanager
async def keda(
    scaler: ScalerProcess, certificate: str = "client", **metadata: str
) -> AsyncIterator[Keda]:
    async with asyncio.timeout(120), scaler.channel(certificate) as channel:
        yield Keda(channel, **({"target": "10"} | metadata))


async def until(ask: Any, expected: object) -> None:
    """Ask until the answer is this: routing takes some milliseconds."""
    async with asyncio.timeout(60):
        while await ask() != expected:
            await asyncio.sleep(0.05)


async def test_a_queue_scales_its_workers_from_zero_and_back(
    scaler: ScalerProcess, ops: slatemq.Client
) -> None:
    await ops.create_queue("work-Depth")
    async with keda(scaler, queue="work-Depth", target="2.5") as asked:
        # Given a queue without messages, its workers are none
        pushed = asked.stub.StreamIsActive(asked.ref)
        assert (await pushed.read()).result is False
        assert await asked.is_active() is False
        assert await asked.metric() == ("slatemq-depth-work-depth", 0)

        # When messages come, it is active at once, by its messages
        await ops.publish_many([slatemq.OutgoingMessage(b"x", {"queue": "work-Depth"})] * 7)
        assert (await pushed.read()).result is True
        await until(asked.value, 7)
        assert await asked.is_active() is True

        # Then messages in flight keep their workers
        claimed = await ops.claim("work-Depth", 7, wait=30)
        assert len(claimed) == 7
        assert await asked.value() == 7

        # And each ack needs fewer, until there is nothing to do
        assert await ops.ack([one.lease_token for one in claimed[:5]]) == [None] * 5
        assert await asked.value() == 2
        await ops.ack([one.lease_token for one in claimed[5:]])
        assert (await pushed.read()).result is False
        assert await asked.value() == 0
        assert await asked.is_active() is False
        pushed.cancel()


async def test_the_target_is_that_of_the_trigger(scaler: ScalerProcess) -> None:
    async with keda(scaler, queue="work-any", target="2.5") as asked:
        (spec,) = (await asked.stub.GetMetricSpec(asked.ref)).metricSpecs
    assert (spec.targetSizeFloat, spec.targetSize) == (2.5, 3)


async def test_by_age_the_oldest_claimable_message_counts(
    scaler: ScalerProcess, ops: slatemq.Client
) -> None:
    await ops.create_queue("work-age", default_delay=900)
    await ops.create_queue("work-age-now")
    async with (
        keda(scaler, queue="work-age", mode="age") as delayed,
        keda(scaler, queue="work-age-now", mode="age") as waiting,
    ):
        for name in ("work-age", "work-age-now"):
            await ops.publish(b"x", {"queue": name})
        await until(waiting.is_active, True)
        first = await waiting.value()
        async with asyncio.timeout(60):
            while await waiting.value() <= first:
                await asyncio.sleep(0.01)

        # A message that is not to be delivered yet needs no worker
        assert (await ops.get_queue("work-age")).counts.delayed_count == 1
        assert await delayed.is_active() is False
        assert await delayed.value() == 0


async def test_by_rate_the_arrivals_count_also_when_workers_keep_up(
    scaler: ScalerProcess, ops: slatemq.Client
) -> None:
    await ops.create_queue("work-rate")
    async with keda(scaler, queue="work-rate", mode="rate") as asked:
        assert await asked.is_active() is False
        assert await asked.metric() == ("slatemq-rate-work-rate", 0)

        for _ in range(3):
            await ops.publish(b"x", {"queue": "work-rate"})
            (message,) = await ops.claim("work-rate", wait=30)
            await message.ack()

        assert await asked.is_active() is True
        assert 3 / 60 <= await asked.value() <= 3


async def test_wrong_metadata_is_refused_by_its_key(scaler: ScalerProcess) -> None:
    wrong = {
        "queue: ": {"queue": ""},
        "queue: queue 'work-none' does not exist": {"queue": "work-none"},
        "target: ": {"queue": "work-depth", "target": "-3"},
        "mode: ": {"queue": "work-depth", "mode": "lag"},
        "taget: ": {"queue": "work-depth", "taget": "3"},
    }
    for words, metadata in wrong.items():
        async with keda(scaler, **metadata) as asked:
            for call in ("IsActive", "GetMetrics"):
                code, problem = await asked.refusal(call)
                assert code == grpc.StatusCode.INVALID_ARGUMENT
                if call == "IsActive":
                    assert problem.startswith(words)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asked.stub.StreamIsActive(asked.ref).read()
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_metric_of_another_name_is_refused(
    scaler: ScalerProcess, ops: slatemq.Client
) -> None:
    await ops.create_queue("work-named")
    async with keda(scaler, queue="work-named") as asked:
        code, problem = await asked.refusal("GetMetrics")
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "slatemq-depth-work-named" in problem


async def test_streams_of_specs_are_not_served_so_that_keda_polls(scaler: ScalerProcess) -> None:
    async with keda(scaler, queue="work-any") as asked:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asked.stub.StreamMetricSpec(asked.ref).read()
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_queue_that_the_scaler_may_not_inspect_is_denied(
    scaler: ScalerProcess, ops: slatemq.Client
) -> None:
    await ops.create_queue("secret")
    async with keda(scaler, queue="secret") as asked:
        assert (await asked.refusal())[0] == grpc.StatusCode.PERMISSION_DENIED


async def test_a_paused_queue_is_an_error_so_that_replicas_stay(
    scaler: ScalerProcess, ops: slatemq.Client
) -> None:
    await ops.create_queue("work-paused")
    await ops.pause_queue("work-paused")
    async with keda(scaler, queue="work-paused") as asked:
        code, problem = await asked.refusal()
        assert (code, "paused" in problem) == (grpc.StatusCode.FAILED_PRECONDITION, True)

        await ops.resume_queue("work-paused")
        assert await asked.is_active() is False


async def test_a_queue_in_quarantine_counts_what_is_in_it_and_is_else_an_error(
    scaler: ScalerProcess, secured: tuple[Secured, LocalStack], ops: slatemq.Client
) -> None:
    # Given a queue with a message, which routing then leaves out
    queue = await ops.create_queue("work-slow")
    await ops.publish(b"x", {"queue": "work-slow"})
    (message,) = await ops.claim("work-slow", wait=30)
    await _quarantine(*secured, queue)
    async with (
        keda(scaler, queue="work-slow") as depth,
        keda(scaler, queue="work-slow", mode="rate") as rate,
    ):
        # Then its message keeps its worker
        assert await depth.is_active() is True
        assert await depth.value() == 1

        # But what comes is not known, nor, without it, whether there is work
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rate.value()
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        await message.ack()
        for asked in (depth, rate):
            code, problem = await asked.refusal()
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert "tried by hand" in problem


async def _quarantine(made: Secured, stack: LocalStack, queue: slatemq.Queue) -> None:
    """As a router does."""
    files = [made.certificates / name for name in ("ca.crt", "service.key", "service.crt")]
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    request = assignment_pb2.QuarantineQueueRequest(
        queue_id=queue.queue_id, queue_revision=queue.revision, reason="tried by hand"
    )
    address = await peer_address(stack, "broker")
    async with grpc.aio.secure_channel(address, credentials) as channel:
        stub: Any = assignment_pb2_grpc.AssignmentServiceStub(channel)
        await stub.QuarantineQueue(request, timeout=60)


async def test_a_broker_that_does_not_answer_is_an_error_and_never_no_work(
    scaler: ScalerProcess, secured: tuple[Secured, LocalStack], ops: slatemq.Client
) -> None:
    _, stack = secured
    await ops.create_queue("work-away")
    async with keda(scaler, queue="work-away") as asked:
        stack.signal("broker", signal.SIGSTOP)
        try:
            assert (await asked.refusal())[0] == grpc.StatusCode.UNAVAILABLE
        finally:
            stack.signal("broker", signal.SIGCONT)
        await ops.publish(b"x", {"queue": "work-away"})
        await until(asked.is_active, True)


async def test_a_stream_is_silent_while_its_broker_is_away_and_goes_on_when_it_is_back(
    scaler: ScalerProcess, secured: tuple[Secured, LocalStack], ops: slatemq.Client
) -> None:
    _, stack = secured
    await ops.create_queue("work-returning")
    async with keda(scaler, queue="work-returning") as asked:
        pushed = asked.stub.StreamIsActive(asked.ref)
        assert (await pushed.read()).result is False
        stack.signal("broker", signal.SIGSTOP)
        try:
            # When it is away for so long that this stream, and one opened now, look in vain
            opened_later = asked.stub.StreamIsActive(asked.ref)
            for _ in range(2):
                assert (await asked.refusal())[0] == grpc.StatusCode.UNAVAILABLE
        finally:
            stack.signal("broker", signal.SIGCONT)
        await ops.publish(b"x", {"queue": "work-returning"})

        # Then both go on with what is new
        assert (await pushed.read()).result is True
        async with asyncio.timeout(60):
            while (await opened_later.read()).result is not True:
                pass
        for stream in (pushed, opened_later):
            stream.cancel()


async def test_keda_alone_is_answered_by_its_certificate(scaler: ScalerProcess) -> None:
    async with keda(scaler, "service", queue="work-depth") as asked:
        code, problem = await asked.refusal()
        assert (code, KEDA in problem) == (grpc.StatusCode.PERMISSION_DENIED, True)
    facts = ("slatemq.audit: audit", "externalscaler.ExternalScaler/IsActive", "PERMISSION_DENIED")

    def is_logged() -> bool:
        return any(all(one in line for one in facts) for line in scaler.said.splitlines())

    await asyncio.to_thread(wait_until, is_logged, 60)
    async with keda(scaler, "", queue="work-depth") as asked:
        assert (await asked.refusal())[0] == grpc.StatusCode.UNAVAILABLE  # no handshake


async def test_probes_see_its_health_by_its_own_certificate(scaler: ScalerProcess) -> None:
    folder = scaler.secured.certificates
    files = {"ca": "ca.crt", "cert": "service.crt", "key": "service.key"}
    tls = {name: str(folder / file) for name, file in files.items()} | {"identity": SERVICE_NAME}

    await until(lambda: asyncio.to_thread(probe, scaler.address, tls), "")


async def test_a_scaler_that_ends_ends_its_streams_without_an_error(
    secured: tuple[Secured, LocalStack], ops: slatemq.Client
) -> None:
    await ops.create_queue("work-ending")
    process = await asyncio.to_thread(ScalerProcess, *secured)
    async with keda(process, queue="work-ending") as asked:
        pushed = asked.stub.StreamIsActive(asked.ref)
        assert (await pushed.read()).result is False
        assert await asyncio.to_thread(process.close) == 0
        assert await pushed.read() == grpc.aio.EOF


async def test_a_scaler_with_a_token_that_is_not_known_says_so(
    secured: tuple[Secured, LocalStack], ops: slatemq.Client
) -> None:
    made, stack = secured
    await ops.create_queue("work-unknown")
    token_file = made.folder / "unknown.token"
    token_file.write_text("smq_" + "x" * 40)
    token_file.chmod(0o600)
    process = await asyncio.to_thread(
        lambda: ScalerProcess(made, stack, SLATEMQ_TOKEN_FILE=str(token_file))
    )
    try:
        async with keda(process, queue="work-unknown") as asked:
            code, problem = await asked.refusal()
    finally:
        await asyncio.to_thread(process.close)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "the instance does not know the scaler" in problem


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--host", "0.0.0.0"], "--host"),
        (["--tls-cert", "missing.crt"], "--tls-ca"),
        (["--token-file", "missing"], "--token-file"),
        (["--endpoint", "nowhere"], "--endpoint"),
    ],
)
def test_wrong_settings_end_it_with_their_names(
    tmp_path: Path, arguments: list[str], named: str
) -> None:
    with (tmp_path / "log").open("wb") as log:
        process: Any = popen(
            [sys.executable, "-m", "services.scaler", *arguments],
            cwd=REPOSITORY,
            env={name: text for name, text in os.environ.items() if "SLATEMQ_" not in name},
            stderr=log,
        )
    assert process.wait(timeout=60) == 2
    assert f"{named}: " in (tmp_path / "log").read_text()
