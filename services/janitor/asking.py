"""Calls to owners, and looks for them, with errors that name the owner that is down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from libs.serving.peers.channels import Channels
from libs.storage.errors import StorageError
from slatemq._cancelling import end_all
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import DeadlineExceeded, NotFound, SlateMQError, Unavailable
from slatemq.v1 import snapshot_pb2, snapshot_pb2_grpc

log = logging.getLogger(__name__)


_ANSWERED: Final = ("QUEUE_MOVING", "ROWS_BUSY", "INGEST_DOWN", "BROKER_DOWN")
"""Reasons of a shard that is there, and cannot do now what was asked."""


@contextmanager
def asking(service: str, shard: int) -> Iterator[None]:
    """Calls to one shard raise SlateMQError in this block, which names a shard that is down."""
    try:
        with raising_slatemq_errors():
            yield
    except (Unavailable, DeadlineExceeded) as error:
        name = f"{service} {shard}"
        if name not in error.message and error.reason not in _ANSWERED:
            what = "is down" if isinstance(error, Unavailable) else "does not answer"
            error.message = f"{name} {what}: {error.message}"
            error.args = (error.message,)
        raise


def is_moving(error: Exception, queue_id: str) -> bool:
    """Whether a broker says that this queue is moving: another one has it then, soon."""
    if not isinstance(error, Unavailable) or error.reason != "QUEUE_MOVING":
        return False
    return error.metadata.get("queue_id") == queue_id


async def find_owner(shards: Iterable[int], ask: Callable[[int], Awaitable[object]]) -> int | None:
    """The first broker shard that answers other than NotFound; None if all of them answer so.

    All are asked at once: one that is down hides nothing that another has. Raises what it raised,
    Unavailable or DeadlineExceeded, where none of the others has it.
    """

    async def answered(shard: int) -> int:
        await ask(shard)
        return shard

    calls = [asyncio.ensure_future(answered(shard)) for shard in shards]
    down: Unavailable | DeadlineExceeded | None = None
    try:
        for call in asyncio.as_completed(calls):
            try:
                return await call
            except NotFound:
                continue
            except (Unavailable, DeadlineExceeded) as error:
                down = error
    finally:
        await end_all(calls)
    if down is not None:
        raise down
    return None


async def release_snapshot(
    channels: Channels, database: str, snapshot_id: str, timeout_s: float
) -> None:
    """Release a snapshot; where its owner is down, it expires."""
    service, _, shard = database.partition("/")
    request = snapshot_pb2.ReleaseSnapshotRequest(snapshot_id=snapshot_id)
    try:
        stub = snapshot_pb2_grpc.SnapshotServiceStub(await channels.to(service, int(shard)))
        with raising_slatemq_errors():
            await stub.ReleaseSnapshot(request, timeout=timeout_s)
    except (SlateMQError, StorageError) as error:
        log.warning("the snapshot of %s is left to its lifetime: %s", database, error)
