"""Each command of ingest with each field at its extremes: refused, or stored and read again.

What ingest takes and cannot encode would end it, and its successor, when the caller tries again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import pytest

from libs.storage.database.roots import open_root
from slatemq.v1 import ingest_pb2, purge_pb2, snapshot_pb2, task_pb2
from tests.integration.extreme_fields import FAULTS, caller, count_taken
from tests.integration.ingest.server import Ingest, message, serving
from tests.services import service_of

LATER_MS: Final = 1 << 42
DAY_S: Final = 86_400

READING: Final = {
    "BatchGetMessages",
    "GetMessageMetadata",
    "TailLog",
    "GetLogStatus",
    "FindLogPosition",
    "GetTask",
    "WaitTask",
    "ListFailedTasks",
    "ListPendingTasks",
}
"""They change nothing."""

SERVICES: Final = ("Ingest", "Purge", "Task", "Snapshot")


def methods() -> dict[str, Any]:
    """All commands of an ingest, by name."""
    found = [method for name in SERVICES for method in service_of(f"{name}Service").methods]
    return {one.name: one for one in found if one.name not in READING}


FIELDS: Final[dict[str, Any]] = {
    "headers": {"a": "b"},
    "created_at_ms": 1,
    "retention_s": DAY_S,
    "visible_at_ms": LATER_MS,
}


async def publish(ingest: Ingest) -> Any:
    number = (await ingest.status()).durable_sequence
    messages = [ingest_pb2.PublishRun(payloads=[b"x"], dedupe_keys=[f"key-{number}"], **FIELDS)]
    return ingest_pb2.PublishRequest(runs=messages, request_id=f"request-{number}")


async def publish_delayed(ingest: Ingest) -> Any:
    return ingest_pb2.PublishRequest(runs=[ingest_pb2.PublishRun(payloads=[b""], delay_ms=1)])


async def publish_run(ingest: Ingest) -> Any:
    run = ingest_pb2.PublishRun(headers={"a": "b"}, payloads=[b"x", b"y"])
    return ingest_pb2.PublishRequest(runs=[run])


async def publish_on_a_stream(ingest: Ingest) -> Any:
    request = ingest_pb2.PublishRequest(runs=[message(b"x", a="b")])
    return ingest_pb2.PublishStreamRequest(number=1, publish=request)


async def push(ingest: Ingest) -> Any:
    row = ingest_pb2.PushedMessage(
        payload=b"x", queue_id="q", retention_deadline_ms=LATER_MS, **FIELDS
    )
    request = ingest_pb2.PushRequest(broker_shard=1, first_number=1, messages=[row])
    # Stored once, and from then on told how far the outbox is.
    request.first_number += (await ingest.stub.Push(request)).last_number
    return request


async def replace(ingest: Ingest) -> Any:
    [message_id, _] = await ingest.publish(message(b"old"), message(b"beside"))
    return ingest_pb2.ReplaceMessageRequest(
        message_id=message_id, payload=b"new", headers={"a": "b"}, queue_id="q"
    )


async def raise_epoch(ingest: Ingest) -> Any:
    return ingest_pb2.RaisePurgeEpochRequest()


async def purge(ingest: Ingest) -> Any:
    [message_id] = await ingest.publish(message(b"old"))
    reason = purge_pb2.PURGE_REASON_UNREFERENCED
    return purge_pb2.PurgeMessagesRequest(reason=reason, message_ids=[message_id])


async def retry(ingest: Ingest) -> Any:
    return task_pb2.RetryFailedTasksRequest()


async def take_snapshot(ingest: Ingest) -> Any:
    return snapshot_pb2.CreateSnapshotRequest(lifetime_ms=60_000)


async def snapshot_id(ingest: Ingest) -> str:
    call = caller(ingest.channel, methods()["CreateSnapshot"])
    answer = await call(await take_snapshot(ingest))
    return str(answer.snapshot.snapshot_id)


async def renew(ingest: Ingest) -> Any:
    taken = await snapshot_id(ingest)
    return snapshot_pb2.RenewSnapshotRequest(snapshot_id=taken, lifetime_ms=60_000)


async def release(ingest: Ingest) -> Any:
    return snapshot_pb2.ReleaseSnapshotRequest(snapshot_id=await snapshot_id(ingest))


REQUESTS: Final[dict[str, list[Callable[[Ingest], Awaitable[Any]]]]] = {
    "Publish": [publish, publish_delayed, publish_run],
    "PublishStream": [publish_on_a_stream],
    "Push": [push],
    "ReplaceMessage": [replace],
    "RaisePurgeEpoch": [raise_epoch],
    "PurgeMessages": [purge],
    "RetryFailedTasks": [retry],
    "CreateSnapshot": [take_snapshot],
    "RenewSnapshot": [renew],
    "ReleaseSnapshot": [release],
}

NOTHING_THERE: Final = {"RetryFailedTasks"}
"""There is no task without an event backend."""


def call_of(ingest: Ingest, name: str) -> Callable[[Any], Awaitable[Any]]:
    if name != "PublishStream":
        return caller(ingest.channel, methods()[name])

    async def on_a_stream(request: Any) -> None:
        call = ingest.stub.PublishStream(iter([request]))
        async for response in call:
            for answer in response.answers:
                assert answer.error.code not in {code.value[0] for code in FAULTS}, answer.error

    return on_a_stream


async def stored(ingest: Ingest) -> list[Any]:
    """All messages, as the log and the payloads have them."""
    log = await ingest.log() if (await ingest.status()).durable_sequence else []
    found: list[Any] = []
    for one in log:
        answer = await ingest.read(one.message_id)
        found += [one, list(answer.messages)]
    return found


def test_each_command_has_its_extremes_tried() -> None:
    assert set(REQUESTS) == set(methods())


@pytest.mark.repeated
@pytest.mark.parametrize(
    ("name", "make"), [(name, make) for name, makes in REQUESTS.items() for make in makes]
)
async def test_what_is_taken_is_stored_and_read_again(
    name: str, make: Callable[[Ingest], Awaitable[Any]]
) -> None:
    # In memory, and there for the next process, too.
    root = open_root("memory:///")
    async with serving(root, purge_grace_s=0, heartbeat_ms=20) as ingest:
        taken = await count_taken(call_of(ingest, name), partial(make, ingest))
        before = await stored(ingest)
    assert taken or name in NOTHING_THERE
    async with serving(root, purge_grace_s=0, heartbeat_ms=20) as ingest:
        assert await stored(ingest) == before
        await ingest.publish(message(b"later"))
