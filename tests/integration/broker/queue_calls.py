"""Calls on queues that several tests make."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from google.protobuf.field_mask_pb2 import FieldMask

from libs.storage.layout.keys import KEY_VERSION, RecordType
from services.broker.core.queue import Queue
from slatemq.v1 import queue_pb2
from tests.integration.broker.rig import Rig
from tests.integration.waiting import eventually


async def update(
    rig: Rig, paths: Sequence[str], queue_id: str = "q", **settings: object
) -> queue_pb2.Queue:
    queue = queue_pb2.Queue(queue_id=queue_id, **settings)  # type: ignore[arg-type]
    request = queue_pb2.UpdateQueueRequest(queue=queue, update_mask=FieldMask(paths=paths))
    return (await rig.queues.UpdateQueue(request)).queue


async def get(rig: Rig, queue_id: str = "q") -> queue_pb2.Queue:
    return (await rig.queues.GetQueue(queue_pb2.GetQueueRequest(queue_id=queue_id))).queue


async def delete(rig: Rig, queue_id: str = "q", etag: str = "") -> None:
    request = queue_pb2.DeleteQueueRequest(queue_id=queue_id, etag=etag)
    await rig.queues.DeleteQueue(request)


async def rows_of_lists(rig: Rig, *, with_attempts: bool = False) -> int:
    """Rows of active, done and failed records of all queues in the database."""
    assert rig.service.database is not None
    end = RecordType.CONFIG if with_attempts else RecordType.ATTEMPTS
    first, last = bytes((KEY_VERSION, RecordType.ACTIVE)), bytes((KEY_VERSION, end))
    return sum([len(rows) async for rows in rig.service.database.scan(first, last)])


def has_garbage(queue: Queue) -> bool:
    """Whether rows are left of what was purged, or of an earlier queue of this name."""
    lists = (queue.done, queue.failed, queue.archived)
    epochs = queue.garbage_epochs or queue.waiting.garbage_epochs
    return bool(epochs or any(one.garbage.last for one in lists))


def sweep_task(rig: Rig) -> asyncio.Task[object]:
    """The background task that sweeps what is left of deleted queues and of what was purged."""
    (found,) = [one for one in rig.service._tasks if "Sweeper.run " in repr(one.get_coro())]
    return found


async def swept(rig: Rig) -> None:
    """Wait until nothing is left of deleted queues and of what was purged."""
    shard = rig.owner.shard
    await eventually(
        lambda: (
            not any(state.garbage_epochs for state in shard.deleted.values())
            and not any(map(has_garbage, shard.queues.values()))
        )
    )
    await rig.owner.durable()
