"""PurgeService; protobuf messages stop here."""

from __future__ import annotations

from typing import Any, Final

from services.ingest.edit.purge_rules import Reason
from services.ingest.edit.purging import Purge, Purger
from services.ingest.wire import check_message_ids
from slatemq.errors import InvalidArgument
from slatemq.v1 import purge_pb2, purge_pb2_grpc

_REASONS: Final = {
    purge_pb2.PURGE_REASON_EXPIRED: Reason.EXPIRED,
    purge_pb2.PURGE_REASON_UNREFERENCED: Reason.UNREFERENCED,
}


class PurgeServicer(purge_pb2_grpc.PurgeServiceServicer):
    def __init__(self, shard: int, purger: Purger) -> None:
        self._shard = shard
        self._purger = purger

    async def PurgeMessages(
        self, request: purge_pb2.PurgeMessagesRequest, context: Any
    ) -> purge_pb2.PurgeMessagesResponse:
        wanted = _to_purge(request, self._shard)
        purged = await self._purger.purge(wanted)
        return purge_pb2.PurgeMessagesResponse(
            purged_count=purged.count,
            gone_count=len(wanted.message_ids) - purged.count - len(purged.refused_ids),
            refused_ids=purged.refused_ids,
            purged_bytes=purged.size_bytes,
        )


def _to_purge(request: purge_pb2.PurgeMessagesRequest, shard: int) -> Purge:
    if request.purge_epoch < 0:
        raise InvalidArgument("purge_epoch", "must not be negative")
    reason = _REASONS.get(request.reason)
    if reason is None:
        known = ", ".join(map(purge_pb2.PurgeReason.Name, _REASONS))
        raise InvalidArgument("reason", f"must be one of {known}")
    check_message_ids(request.message_ids, shard)
    return Purge(request.purge_epoch, reason, list(set(request.message_ids)))
