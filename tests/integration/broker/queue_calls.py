"""Calls on queues that several tests make."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from google.protobuf.field_mask_pb2 import FieldMask

from slatemq.v1 import queue_pb2
from tests.integration.broker.rig import Rig


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


async def swept(rig: Rig) -> None:
    """Wait until nothing is left of deleted queues."""
    while any(state.garbage_epochs for state in rig.owner.shard.deleted.values()):
        await asyncio.sleep(0.002)
    await rig.owner.durable()
