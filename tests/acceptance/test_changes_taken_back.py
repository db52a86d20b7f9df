"""A crash that takes back the newest change of a queue, while an older one was answered."""

import asyncio
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from services.stack.process import until_serving
from slatemq.v1 import assignment_pb2, consumer_pb2, ingest_pb2, queue_pb2
from slatemq.v1.assignment_pb2_grpc import AssignmentServiceStub
from tests.acceptance.local_stack import LocalStack, peer_address
from tests.acceptance.stubs import Stubs, persist
from tests.claimed_runs import messages_of
from tests.faults.faulty_store import Fault, FaultyStore, Outcome, faulty_store
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url
from tests.integration.waiting import WAIT_SECONDS, eventually

pytestmark = [pytest.mark.stack, pytest.mark.s3]

WAL = "/broker/0/wal/"

CREATED_S = 10.0
"""A creation that is not answered by then waits for a write that hangs."""

CREATIONS_MAX = 5
"""At least one of these creations is held by its own write."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with moto() as port, faulty_store(port) as before:
        yield before
        before.set()


def pause(stubs: Stubs, queue_id: str) -> Any:
    return stubs.queues.PauseQueue(queue_pb2.PauseQueueRequest(queue_id=queue_id))


def update(stubs: Stubs, queue_id: str) -> Any:
    queue = queue_pb2.Queue(queue_id=queue_id, filter='headers.to == "nobody"')
    request = queue_pb2.UpdateQueueRequest(queue=queue)
    request.update_mask.paths.append("filter")
    return stubs.queues.UpdateQueue(request)


async def changed_and_crashed(
    stack: LocalStack, store: FaultyStore, stubs: Stubs, queue_id: str, change: Any
) -> bool:
    """Create a queue, and change it before that is durable; the crash takes back the change.

    Returns whether the queue was created: the write that was held may have been another one.
    """
    first, second = Fault(Outcome.HOLD, "PUT", WAL), Fault(Outcome.HANG, "PUT", WAL)
    store.set(first)
    queue = queue_pb2.Queue(queue_id=queue_id, filter=f'headers.to == "{queue_id}"')
    request = queue_pb2.CreateQueueRequest(queue=queue)
    creating = asyncio.ensure_future(stubs.queues.CreateQueue(request))
    await eventually(lambda: first.happened)
    changing = asyncio.ensure_future(change(stubs, queue_id))
    async with grpc.aio.insecure_channel(await peer_address(stack, "broker")) as channel:
        # The broker has read the change when it answers what came after it.
        routing: Any = AssignmentServiceStub(channel)
        await routing.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
    store.set(second)
    created, _ = await asyncio.wait([creating], timeout=CREATED_S)
    for call in created:
        await call
    await eventually(lambda: second.happened)
    killed = stack.signal("broker", signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError):
        await changing
    await asyncio.gather(creating, return_exceptions=True)
    store.set()
    await asyncio.to_thread(stack.wait_restarted, "broker", killed)
    await until_serving(stack.endpoints["broker"])
    return bool(created)


async def test_a_queue_gets_messages_after_a_crash_took_back_its_newest_change(
    tmp_path: Path, store: FaultyStore
) -> None:
    with LocalStack(tmp_path, "--store", root_url(store.port, "changes"), ready=True) as stack:
        async with Stubs() as stubs:
            await stubs.connect(stack.endpoint)
            for name, change in {"paused": pause, "updated": update}.items():
                # Given a router that runs on, and a queue whose creation alone is durable
                for number in range(CREATIONS_MAX):
                    queue_id = f"{name}-{number}"
                    if await changed_and_crashed(stack, store, stubs, queue_id, change):
                        break
                else:
                    pytest.fail(f"none of {CREATIONS_MAX} creations was answered")

                # When a message is published to it
                message = ingest_pb2.PublishRun(payloads=[b""], headers={"to": queue_id})
                publish = ingest_pb2.PublishRequest(runs=[message])
                await persist(lambda p=publish: stubs.ingest.Publish(p))  # type: ignore[misc]

                # Then it arrives
                claim = consumer_pb2.ClaimRequest(queue_id=queue_id, max_messages=1, wait_ms=10_000)
                async with asyncio.timeout(WAIT_SECONDS):
                    answer: Any = None
                    while answer is None or not answer.runs:
                        answer = await persist(lambda c=claim: stubs.consumer.Claim(c))  # type: ignore[misc]
                assert [one.message.headers["to"] for one in messages_of(answer)] == [queue_id]
