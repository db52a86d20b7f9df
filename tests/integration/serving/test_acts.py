"""What is recorded of acts, by real calls: what became of each, however its call ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml

from libs.access.audit import Act
from libs.access.callers import Callers
from libs.access.policy import Policy
from libs.access.reloading import ReloadedFile
from libs.access.token_file import TokenFile
from libs.serving import limits
from libs.serving.peers.channels import open_channel
from libs.serving.process.logs import REPEATS_MAX
from libs.serving.requests.auditing import Auditor
from libs.serving.requests.doors import ClientDoor
from libs.serving.requests.gate import Gate
from libs.serving.requests.guard import CallGuard
from libs.serving.telemetry import Telemetry
from slatemq._tokens import new_token
from slatemq.errors import NotFound
from slatemq.v1 import queue_pb2, queue_pb2_grpc
from tests.integration.waiting import eventually
from tests.manual_clock import ManualSeconds

pytestmark = pytest.mark.usefixtures("cheap_hashes")

POLICY = """
roles: {owner: [{verbs: [administer], queues: [orders]}]}
bindings: [{principals: [shop], roles: [owner]}]
"""
LIMITED = f"{POLICY}limits: [{{principals: [shop], calls_per_s: 1}}]"
PURGE = "/slatemq.v1.QueueService/PurgeQueue"


class Servicer(queue_pb2_grpc.QueueServiceServicer):
    """Of a broker, as far as these tests call it: a purge has effect once it may go on.

    Attributes:
        begun_count: Purges that have begun.
        goes_on: When purges may go on.
        is_there: Whether there is such a queue.
    """

    def __init__(self) -> None:
        self.begun_count = 0
        self.goes_on = asyncio.Event()
        self.is_there = True

    async def PurgeQueue(self, request: queue_pb2.PurgeQueueRequest, context: Any) -> Any:  # noqa: N802
        self.begun_count += 1
        await self.goes_on.wait()
        if not self.is_there:
            raise NotFound("queue", "orders")
        return queue_pb2.PurgeQueueResponse()


class Served:
    """A server of queues, and its caller `shop`.

    Attributes:
        acts: What the server has recorded.
    """

    def __init__(self, channel: grpc.aio.Channel, servicer: Servicer, token: str) -> None:
        self.acts: list[Act] = []
        self.servicer = servicer
        self._proof = (("authorization", f"Bearer {token}"),)
        self._purge: Any = channel.unary_unary(PURGE)

    def purge(self, request: bytes | None = None) -> Any:
        if request is None:
            request = queue_pb2.PurgeQueueRequest(queue_id="orders").SerializeToString()
        return self._purge(request, metadata=self._proof, timeout=60)

    async def outcomes(self, count: int) -> list[str]:
        await eventually(lambda: len(self.acts) >= count)
        return [act.outcome for act in self.acts]


@asynccontextmanager
async def served(folder: Path, policy: str = POLICY) -> AsyncIterator[Served]:
    made = new_token("shop")
    (folder / "policy.yaml").write_text(policy)
    (folder / "tokens.yaml").write_text(yaml.safe_dump({"tokens": [made.entry]}))
    callers = Callers(
        ReloadedFile.of_document(folder / "policy.yaml", Policy),
        ReloadedFile.of_document(folder / "tokens.yaml", TokenFile),
    )
    gate = Gate(100)
    gate.open()
    # By a clock that stands still: what is held back comes in no later interval.
    auditor = Auditor("broker-0", lambda act: one.acts.append(act), ManualSeconds())
    guard = CallGuard(gate, Telemetry()).of_door(ClientDoor(callers, auditor))
    server = grpc.aio.server(interceptors=[guard], options=limits.server_options())
    servicer_type: Any = Servicer  # Not all of it: so it is abstract.
    servicer: Servicer = servicer_type()
    queue_pb2_grpc.add_QueueServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as opened:
        one = Served(opened, servicer, made.token)
        yield one
    await server.stop(0)


async def test_an_act_that_is_cancelled_before_it_is_done_is_recorded_as_that(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as made:
        calls = [made.purge() for _ in range(5)]
        await eventually(lambda: made.servicer.begun_count == 5)

        for call in calls:
            call.cancel()

        assert await made.outcomes(5) == ["CANCELLED"] * 5


@pytest.mark.parametrize(("is_there", "outcome"), [(True, "OK"), (False, "NOT_FOUND")])
async def test_an_act_is_recorded_with_the_end_of_its_handler(
    tmp_path: Path, is_there: bool, outcome: str
) -> None:
    async with served(tmp_path) as made:
        made.servicer.is_there = is_there
        made.servicer.goes_on.set()

        await made.purge().code()

        assert await made.outcomes(1) == [outcome]


async def test_an_act_that_a_limit_refuses_is_recorded_and_many_are_held_back(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, LIMITED) as made:
        made.servicer.goes_on.set()
        calls = [made.purge() for _ in range(15)]
        codes = [await call.code() for call in calls]
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) > REPEATS_MAX
        done_count = codes.count(grpc.StatusCode.OK)

        outcomes = await made.outcomes(done_count + REPEATS_MAX)

        assert outcomes.count("RESOURCE_EXHAUSTED") == REPEATS_MAX
        assert outcomes.count("OK") == done_count
        assert {(act.principal, act.act) for act in made.acts} == {("shop", PURGE)}


async def test_an_act_whose_request_cannot_be_read_is_recorded_and_many_are_held_back(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as made:
        for _ in range(REPEATS_MAX + 5):
            assert await made.purge(b"\xff").code() is grpc.StatusCode.INVALID_ARGUMENT
        made.servicer.goes_on.set()
        await made.purge().code()

        await eventually(lambda: made.acts[-1:] and made.acts[-1].outcome == "OK")
        outcomes = await made.outcomes(1)

        assert outcomes == ["INVALID_ARGUMENT"] * REPEATS_MAX + ["OK"]
