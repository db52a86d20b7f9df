"""A broker that was replaced and does not know it yet: what it says of what is not there.

Both run in this process, and the first one goes on serving: nothing ends it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.serving.process.exits import ExitCause
from services.broker.service import BrokerService
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import FailedPrecondition, NotFound, Unavailable
from slatemq.v1 import (
    consumer_pb2,
    entry_pb2,
    entry_pb2_grpc,
    outbox_pb2,
    outbox_pb2_grpc,
    queue_pb2,
)
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running
from tests.integration.waiting import eventually

LOOKUPS = 200

Call = Callable[[Rig, str], Awaitable[Any]]
"""Asks a broker for something, given a lease token of the queue `q`."""


@pytest.fixture(autouse=True)
def nothing_ends_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_fatal(_: BrokerService) -> ExitCause:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(BrokerService, "wait_fatal", wait_fatal)


@asynccontextmanager
async def replaced(folder: Path) -> AsyncIterator[tuple[Rig, Rig, str]]:
    """A broker, the one that has its shard by now with the queue `q`, and a lease token of that."""
    async with running(folder) as first, running(folder) as second:
        await second.create("q")
        await second.assign([1])
        (message,) = await second.claim()
        yield first, second, message.lease_token


async def result_of(answer: Awaitable[Any]) -> Any:
    """The response of a call about one lease. Raises what its result says."""
    (status,) = (getattr(one, "status", one) for one in (await answer).results)
    if status.code == grpc.StatusCode.NOT_FOUND.value[0]:
        raise NotFound("lease", "")


async def first_of(stream: Any) -> Any:
    return await anext(aiter(stream))


def consume(rig: Rig) -> Any:
    start = consumer_pb2.ConsumeStart(queue_id="q")
    return rig.consumers.Consume(iter([consumer_pb2.ConsumeRequest(start=start)]))


def execute(rig: Rig, **action: Any) -> Any:
    commands = [consumer_pb2.Command(**action)]
    return rig.consumers.Execute(consumer_pb2.ExecuteRequest(commands=commands))


def get_queue(rig: Rig, queue_id: str = "q") -> Any:
    return rig.queues.GetQueue(queue_pb2.GetQueueRequest(queue_id=queue_id))


ASKED: dict[str, Call] = {
    "a queue": lambda rig, _: get_queue(rig),
    "a queue to delete": lambda rig, _: rig.queues.DeleteQueue(
        queue_pb2.DeleteQueueRequest(queue_id="q")
    ),
    "a queue to claim from": lambda rig, _: rig.claim(),
    "a queue to consume": lambda rig, _: first_of(consume(rig)),
    "a lease to ack": lambda rig, token: result_of(
        rig.consumers.Ack(consumer_pb2.AckRequest(lease_tokens=[token]))
    ),
    "a lease to nack": lambda rig, token: result_of(
        rig.consumers.Nack(
            consumer_pb2.NackRequest(items=[consumer_pb2.NackItem(lease_token=token)])
        )
    ),
    "a lease to extend": lambda rig, token: result_of(
        rig.consumers.ExtendLease(
            consumer_pb2.ExtendLeaseRequest(lease_tokens=[token], lease_ms=60_000)
        )
    ),
    "a lease to complete with others": lambda rig, token: execute(
        rig, complete=consumer_pb2.CompleteCommand(lease_token=token)
    ),
    "a queue to push to": lambda rig, _: execute(
        rig, push=consumer_pb2.PushCommand(queue_id="q", payload=b"x")
    ),
    "a redrive": lambda rig, _: entry_pb2_grpc.DeadLetterServiceStub(rig.channel).GetRedrive(
        entry_pb2.GetRedriveRequest(redrive_id="0-1")
    ),
    "a refused push": lambda rig, _: outbox_pb2_grpc.OutboxServiceStub(rig.channel).GetRefusedPush(
        outbox_pb2.GetRefusedPushRequest(push_id="0-0-1")
    ),
}


@pytest.mark.parametrize("what", ASKED)
async def test_it_never_says_that_something_is_not_there(tmp_path: Path, what: str) -> None:
    async with replaced(tmp_path) as (first, second, token):
        with pytest.raises(Unavailable), raising_slatemq_errors():
            await ASKED[what](first, token)

        # And the one that has the shard answers, if only that there is none
        with suppress(NotFound, FailedPrecondition), raising_slatemq_errors():
            await ASKED[what](second, token)


async def test_lookups_of_what_is_not_there_share_their_proofs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        commits_bytes, asked_count = list[int](), 0
        rig.owner.commits.measure = lambda _, size_bytes: commits_bytes.append(size_bytes)
        prove = rig.owner.commits.prove_ownership

        async def counted() -> None:
            nonlocal asked_count
            asked_count += 1
            await prove()

        monkeypatch.setattr(rig.owner.commits, "prove_ownership", counted)
        # Given a slow disk, and many that look for queues which do not exist
        disk.free.clear()
        asked = [asyncio.create_task(refusal(get_queue(rig, f"q-{n}"))) for n in range(LOOKUPS)]
        await eventually(lambda: asked_count == LOOKUPS)

        disk.free.set()

        codes = {code for code, _, _ in await asyncio.gather(*asked)}
        assert codes == {grpc.StatusCode.NOT_FOUND}
        assert 0 < len(commits_bytes) < LOOKUPS / 20
