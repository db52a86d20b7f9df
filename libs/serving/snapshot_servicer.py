"""SnapshotService, which every process that owns a database serves in the same way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from libs.storage.database.snapshots import SNAPSHOTS_MAX, Snapshots, TooManySnapshots
from libs.storage.errors import SnapshotNotFound
from slatemq.errors import InvalidArgument, NotFound, ResourceExhausted
from slatemq.v1 import snapshot_pb2, snapshot_pb2_grpc

LIFETIME_MS: Final = 600_000
"""Of a snapshot whose request says nothing."""

LIFETIME_MS_MIN: Final = 10_000
"""Shorter ones would end between two renewals."""

LIFETIME_MS_MAX: Final = 86_400_000
"""A snapshot that a dead job left behind pins its tables for at most this long."""


class SnapshotServicer(snapshot_pb2_grpc.SnapshotServiceServicer):
    def __init__(
        self,
        snapshots: Snapshots,
        now_ms: Callable[[], int],
        prove_ownership: Callable[[], Awaitable[None]],
        purge_epoch: Callable[[], int] | None = None,
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Serve these snapshots.

        Args:
            snapshots: Those of the process's database.
            now_ms: Its clock.
            prove_ownership: See GroupCommit.
            purge_epoch: Returns the purge epoch that is durable; for ingests.
            settled: Waits for what must be in a snapshot though it was not answered yet.
        """
        self._snapshots = snapshots
        self._now_ms = now_ms
        self._prove_ownership = prove_ownership
        self._purge_epoch = purge_epoch
        self._settled = settled

    async def CreateSnapshot(
        self, request: snapshot_pb2.CreateSnapshotRequest, context: Any
    ) -> snapshot_pb2.CreateSnapshotResponse:
        lifetime_ms = _checked_lifetime(request.lifetime_ms)
        snapshots = self._snapshots
        # Both before the snapshot: an epoch raised, or an answer given, since then is not in it.
        taken = snapshot_pb2.Snapshot(
            database=snapshots.database, taken_at_ms=self._now_ms(), lifetime_ms=lifetime_ms
        )
        if self._purge_epoch is not None:
            taken.purge_epoch = self._purge_epoch()
        if self._settled is not None:
            await self._settled()
        # A process that was replaced would pair what the new owner stores with its own old epoch,
        # or show lists without the queues created since: and what they need would be purged.
        await self._prove_ownership()
        try:
            taken.snapshot_id = await snapshots.take(lifetime_ms)
        except TooManySnapshots:
            raise ResourceExhausted(
                f"{SNAPSHOTS_MAX} snapshots of {snapshots.database} are alive",
                reason="TOO_MANY_SNAPSHOTS",
                retry_after_ms=LIFETIME_MS_MIN,
            ) from None
        return snapshot_pb2.CreateSnapshotResponse(snapshot=taken)

    async def RenewSnapshot(
        self, request: snapshot_pb2.RenewSnapshotRequest, context: Any
    ) -> snapshot_pb2.RenewSnapshotResponse:
        lifetime_ms = _checked_lifetime(request.lifetime_ms)
        try:
            await self._snapshots.renew(request.snapshot_id, lifetime_ms)
        except SnapshotNotFound:
            raise NotFound("snapshot", request.snapshot_id) from None
        return snapshot_pb2.RenewSnapshotResponse()

    async def ReleaseSnapshot(
        self, request: snapshot_pb2.ReleaseSnapshotRequest, context: Any
    ) -> snapshot_pb2.ReleaseSnapshotResponse:
        if not request.snapshot_id:
            raise InvalidArgument("snapshot_id", "is empty", reason="REQUIRED")
        await self._snapshots.release(request.snapshot_id)
        return snapshot_pb2.ReleaseSnapshotResponse()


def _checked_lifetime(lifetime_ms: int) -> int:
    if lifetime_ms == 0:
        return LIFETIME_MS
    if not LIFETIME_MS_MIN <= lifetime_ms <= LIFETIME_MS_MAX:
        raise InvalidArgument(
            "lifetime_ms",
            f"must be 0 or within {LIFETIME_MS_MIN}..{LIFETIME_MS_MAX}",
            reason="OUT_OF_RANGE",
        )
    return lifetime_ms
