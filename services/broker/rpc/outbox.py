"""OutboxService: what waits for the ingests, and what they refused permanently."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from libs.access.current import ALL_QUEUES, require
from libs.storage.database.blobs import Blobs
from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord, DamagedObject, ForeignUri, ObjectNotFound
from libs.storage.layout.ids import MAX_SHARD
from libs.storage.layout.own_keys import refused_push_key
from libs.storage.records.execution_records import OutboxRecord, decode_outbox, decode_refused_push
from libs.storage.records.payloads import PayloadUri
from services.broker.core.lists.outbox import RefusedPush
from services.broker.outbox.sender import OutboxSender
from services.broker.outbox.targets import OutboxTarget
from services.broker.shard.owner import ShardOwner
from slatemq.errors import InvalidArgument, NotFound
from slatemq.v1 import outbox_pb2, outbox_pb2_grpc

_ID: Final = re.compile(r"([0-9a-f]{1,4})-([0-9a-f]{1,4})-([0-9a-f]{1,16})", re.ASCII)

PushKey = tuple[int, int]
"""The ingest shard of a refused push, and its number."""


@dataclass(eq=False)
class OutboxServicer(outbox_pb2_grpc.OutboxServiceServicer):
    _shard: int
    _owner: ShardOwner
    _database: Database
    _blobs: Blobs
    _target: OutboxTarget
    _sender: OutboxSender

    async def GetOutbox(
        self, request: outbox_pb2.GetOutboxRequest, context: Any
    ) -> outbox_pb2.GetOutboxResponse:
        outbox = self._owner.shard.outbox
        answer = outbox_pb2.GetOutboxResponse(
            lines=[
                outbox_pb2.OutboxLine(
                    ingest_shard=ingest_shard,
                    waiting_count=outbox.waiting_count(ingest_shard),
                    waiting_bytes=outbox.counter(ingest_shard).waiting_bytes,
                    oldest_pushed_at_ms=outbox.oldest_ms(ingest_shard) or 0,
                    halted_reason=outbox.halts.get(ingest_shard, ""),
                )
                for ingest_shard in sorted(outbox.ingest_shards)
            ],
            refused_pushes=[self._refused_push(*one) for one in sorted(outbox.refused.items())],
        )
        await self._owner.durable()
        return answer

    async def GetRefusedPush(
        self, request: outbox_pb2.GetRefusedPushRequest, context: Any
    ) -> outbox_pb2.GetRefusedPushResponse:
        place = await self._place(request.push_id)
        push = self._owner.shard.outbox.refused[place]
        require("inspect", push.queue_id)
        record = decode_outbox(await self._stored(request.push_id, place))
        return outbox_pb2.GetRefusedPushResponse(
            push=self._refused_push(place, push),
            payload=await self._payload(record),
            headers=record.headers,
        )

    async def RetryRefusedPush(
        self, request: outbox_pb2.RetryRefusedPushRequest, context: Any
    ) -> outbox_pb2.RetryRefusedPushResponse:
        place = await self._place(request.push_id)
        require("edit", self._owner.shard.outbox.refused[place].queue_id)
        value = await self._stored(request.push_id, place)
        decode_outbox(value)  # a damaged row would be refused again
        ingest_shard = await self._target.choose()
        outbox = self._owner.shard.outbox

        def retry(now_ms: int) -> None:
            outbox.check_capacity(1, len(value))
            self._forget(request.push_id, place)
            outbox.push(ingest_shard, value, now_ms)

        await self._run(retry)
        return outbox_pb2.RetryRefusedPushResponse()

    async def DiscardRefusedPush(
        self, request: outbox_pb2.DiscardRefusedPushRequest, context: Any
    ) -> outbox_pb2.DiscardRefusedPushResponse:
        place = await self._place(request.push_id)
        require("edit", self._owner.shard.outbox.refused[place].queue_id)
        await self._run(lambda _: self._forget(request.push_id, place))
        return outbox_pb2.DiscardRefusedPushResponse()

    async def ResumeOutbox(
        self, request: outbox_pb2.ResumeOutboxRequest, context: Any
    ) -> outbox_pb2.ResumeOutboxResponse:
        if not 0 <= request.ingest_shard <= MAX_SHARD:
            raise InvalidArgument(
                "ingest_shard", f"must be within 0..{MAX_SHARD}", reason="OUT_OF_RANGE"
            )
        require("edit", ALL_QUEUES)  # What the ingest has lost, of any queue, is not sent again.
        self._sender.resume(request.ingest_shard)
        return outbox_pb2.ResumeOutboxResponse()

    # --- One refused push ---------------------------------------------------

    async def _run(self, command: Callable[[int], None]) -> None:
        await self._owner.run(command)
        await self._owner.durable()

    def _forget(self, push_id: str, place: PushKey) -> None:
        if not self._owner.shard.outbox.forget(place):
            raise NotFound("refused push", push_id)

    async def _stored(self, push_id: str, place: PushKey) -> bytes:
        """Its outbox value, once it is durable."""
        await self._owner.durable()
        stored = await self._database.get(refused_push_key(*place))
        if stored is None:
            await self._owner.commits.prove_ownership()  # It went during the read.
            raise NotFound("refused push", push_id)
        return decode_refused_push(stored).outbox

    async def _payload(self, record: OutboxRecord) -> bytes:
        if not isinstance(record.payload, PayloadUri):
            return record.payload
        try:
            return await self._blobs.get(record.payload.uri)
        except (ObjectNotFound, DamagedObject, ForeignUri) as error:
            raise CorruptRecord("refused push", f"its payload cannot be read: {error}") from error

    async def _place(self, push_id: str) -> PushKey:
        """Its place; raises NotFound once it is proven that there is none."""
        found = _ID.fullmatch(push_id)
        if found is not None:
            shard, ingest_shard, number = (int(part, 16) for part in found.groups())
            if shard == self._shard and (ingest_shard, number) in self._owner.shard.outbox.refused:
                return ingest_shard, number
        await self._owner.commits.prove_ownership()
        raise NotFound("refused push", push_id)

    def _refused_push(self, place: PushKey, push: RefusedPush) -> outbox_pb2.RefusedPush:
        ingest_shard, number = place
        return outbox_pb2.RefusedPush(
            push_id=f"{self._shard:x}-{ingest_shard:x}-{number:x}",
            ingest_shard=ingest_shard,
            **push._asdict(),
        )
