"""Calls to owners, with errors that name the owner that is down."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from libs.serving.peers.channels import Channels
from libs.storage.errors import StorageError
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import DeadlineExceeded, SlateMQError, Unavailable
from slatemq.v1 import snapshot_pb2, snapshot_pb2_grpc

log = logging.getLogger(__name__)


@contextmanager
def asking(service: str, shard: int) -> Iterator[None]:
    """Calls to one shard raise SlateMQError in this block, which names a shard that is down."""
    try:
        with raising_slatemq_errors():
            yield
    except (Unavailable, DeadlineExceeded) as error:
        name = f"{service} {shard}"
        if name not in error.message:
            what = "is away" if isinstance(error, Unavailable) else "does not answer"
            error.message = f"{name} {what}: {error.message}"
            error.args = (error.message,)
        raise


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
