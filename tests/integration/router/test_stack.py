"""The router between the real ingest and the real broker, all of them processes, killed at will.

Judged from outside: by what was published, and by what a consumer got.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from slatemq.v1 import (
    assignment_pb2,
    assignment_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from tests.integration.stack.processes import WAIT_SECONDS, Stack, patiently, running

pytestmark = [
    pytest.mark.slow,  # Four processes start, and some of them again.
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


async def test_every_queue_gets_exactly_its_messages_whichever_process_is_killed(
    stack: Stack,
) -> None:
    sent: dict[int, str] = {}
    after: dict[str, set[int]] = {}  # What was published once the queue had been created.
    for queue_id, source in {
        "a": 'headers["kind"] == "a"',
        "ab": 'headers["kind"] in ["a", "b"]',
        "all": "true",
    }.items():
        await stack.create_queue(queue_id, source)

    async def publish(until: asyncio.Task[None]) -> None:
        number = 0
        while not until.done():
            number += 1
            kinds = ["a", "b", "c"][: 1 + number % 3]
            created = list(after)
            ids = await stack.publish(*kinds)
            sent.update(zip(ids, kinds, strict=True))
            for queue_id in created:
                after[queue_id].update(ids)

    async def kill() -> None:
        for victim in (stack.routers[0], stack.broker, stack.routers[1], stack.ingest):
            await stack.create_queue(f"late{len(after)}", "true")
            after[f"late{len(after)}"] = set()
            await victim.kill()
            await victim.start()

    killing = asyncio.create_task(kill())
    await asyncio.gather(publish(killing), killing)
    ids = await stack.publish("a", "b", "c")
    sent.update(zip(ids, "abc", strict=True))
    await stack.routed()

    assert await stack.drained("all") == Counter(sent.keys())
    for queue_id, kinds in {"a": "a", "ab": "ab"}.items():
        expected = Counter(message_id for message_id, kind in sent.items() if kind in kinds)
        assert await stack.drained(queue_id) == expected
    for queue_id, wanted in after.items():
        got = await stack.drained(queue_id)
        assert set(got) >= wanted | set(ids)
        assert set(got.values()) <= {1}


async def test_a_forged_assign_with_a_hole_is_refused(stack: Stack) -> None:
    await stack.create_queue("forged", "true")
    first = await stack.publish("a")
    await stack.routed()
    shard = assignment_pb2_grpc.AssignmentServiceStub(stack.broker.there)
    state = await shard.GetRoutingState(assignment_pb2.GetRoutingStateRequest())

    answer = await shard.Assign(
        assignment_pb2.AssignRequest(
            ranges=[
                assignment_pb2.LogRange(
                    config_revision=state.config_revision,
                    previous_sequence=first[0] + 5,
                    last_sequence=first[0] + 9,
                    assignments=[
                        assignment_pb2.QueueAssignment(
                            queue_id="forged", message_ids=[first[0] + 9]
                        )
                    ],
                )
            ],
        )
    )
    second = await stack.publish("a")
    await stack.routed()

    assert (answer.results[0].applied, answer.results[0].cursor) == (False, first[0])
    assert await stack.drained("forged") == Counter(first + second)


async def test_explain_agrees_with_what_routing_does(stack: Stack) -> None:
    for queue_id in ("gold", "silver"):
        await stack.create_queue(queue_id, f'headers["kind"] == "{queue_id}"')
    router = router_pb2_grpc.RouterServiceStub(stack.routers[0].there)

    request = router_pb2.ExplainRequest(headers={"kind": "gold"})
    matched: dict[str, bool] = {}
    async with asyncio.timeout(WAIT_SECONDS):
        while not matched.keys() >= {"gold", "silver"}:
            response = await patiently(lambda: router.Explain(request))
            matched = {queue.queue_id: queue.matched for queue in response.queues}
    ids = await stack.publish("gold")
    await stack.routed()

    assert (matched["gold"], matched["silver"]) == (True, False)
    assert await stack.drained("gold") == Counter(ids)
    assert await stack.drained("silver") == Counter()
