"""SettleDeadLetters, from the request to what is durable: reads the rows, uploads, then settles."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

from libs.serving.requests.headers import encoded_headers
from libs.storage.database.blobs import Blobs
from libs.storage.records.queues import FailedMessage
from libs.storage.records.states import FINGERPRINT_BYTES
from services.broker.core.batches.settle import (
    Action,
    Settlement,
    Settlements,
    check,
    settle,
    was_done,
)
from services.broker.core.queue import Queue
from services.broker.dead_letters.push_rows import outbox_row
from services.broker.delivery.responses import consumer_id
from services.broker.entries.finished_pages import FinishedReader
from services.broker.entries.handles import Handle, parse_handle
from services.broker.outbox.conversion import PUSHES_BYTES_MAX, REQUEST_ID_BYTES_MAX, PushLimits
from services.broker.outbox.executor import UPLOAD_AGE_MS_MAX
from services.broker.outbox.targets import OutboxTarget
from services.broker.requests.limits import REASON_BYTES_MAX
from services.broker.shard.owner import ShardOwner
from slatemq.errors import InvalidArgument, NotFound, SlateMQError, Unavailable
from slatemq.v1 import entry_pb2

SETTLEMENTS_MAX: Final = 1000
"""Settlements in one call: they are applied in one go, some 10 ms in which others wait."""

SETTLEMENT_BYTES: Final = 200
"""About what one adds to a commit, beside the row of a push."""

_ACTIONS: Final = {
    None: Action.STAYS,
    "redrive": Action.COMES_BACK,
    "drop": Action.IS_DROPPED,
    "replace": Action.IS_REPLACED,
}


class DeadLetterSettlements:
    """Settles dead letters of one shard's queues."""

    def __init__(
        self,
        owner: ShardOwner,
        failed: FinishedReader[FailedMessage],
        target: OutboxTarget,
        blobs: Blobs,
        limits: PushLimits,
        shard: int,
    ) -> None:
        """Settle those of this owner's shard, whose number is `shard`."""
        self._owner = owner
        self._failed = failed
        self._target = target
        self._blobs = blobs
        self._limits = limits
        self._shard = shard

    async def settle(self, request: entry_pb2.SettleDeadLettersRequest) -> None:
        """See the proto; durable when this returns."""
        queue_id, each = self._checked(request)
        who = consumer_id(request.consumer_id)
        self._owner.admit()
        fingerprint = await asyncio.to_thread(_fingerprint, request)
        queue = await self._owner.find(queue_id)
        async with self._owner.dead_letters.of(queue_id):
            if not was_done(self._owner.shard, request.request_id, fingerprint):
                wanted = Settlements(
                    each, await self._rows(queue, each), {}, 0, who, request.request_id, fingerprint
                )
                await self._settle(queue, request, wanted)
            await self._owner.durable()

    async def _settle(
        self, queue: Queue, request: entry_pb2.SettleDeadLettersRequest, wanted: Settlements
    ) -> None:
        began_ms = self._owner.clock.now_ms()
        replaced = [n for n, one in enumerate(wanted.each) if one.action is Action.IS_REPLACED]
        pushes: dict[int, bytes] = {}
        ingest_shard = 0
        if replaced:
            # Nothing is uploaded for what is refused anyway.
            places = await self._owner.run(lambda now_ms: check(queue, wanted, now_ms))
            ingest_shard = await self._target.choose()
            limits = self._limits.at(self._target.payload_bytes_max(ingest_shard))
            for number in replaced:
                replace = request.settlements[number].replace
                _check_payload(number, replace, limits)
                dead_letter = wanted.rows[wanted.each[number].order][places[number]]
                pushes[number] = await outbox_row(
                    queue.queue_id,
                    replace,
                    dead_letter.retention_deadline_ms,
                    self._blobs,
                    began_ms,
                )
        final = Settlements(
            wanted.each,
            wanted.rows,
            pushes,
            ingest_shard,
            wanted.who,
            wanted.request_id,
            wanted.fingerprint,
        )

        def run(now_ms: int) -> None:
            if now_ms - began_ms > UPLOAD_AGE_MS_MAX:
                raise Unavailable("the upload took over an hour, retry")
            if not self._owner.owns(queue):
                raise NotFound("queue", queue.queue_id)
            settle(self._owner.shard, queue, final, now_ms)

        size_bytes = sum(map(len, pushes.values())) + SETTLEMENT_BYTES * len(final.each)
        await self._owner.run(run, size_bytes)

    async def _rows(self, queue: Queue, each: list[Settlement]) -> dict[int, list[FailedMessage]]:
        await self._owner.durable()
        return {order: await self._failed.row(queue, order) for order in {o.order for o in each}}

    # --- The request --------------------------------------------------------

    def _checked(self, request: entry_pb2.SettleDeadLettersRequest) -> tuple[str, list[Settlement]]:
        """The queue, and what was decided. Raises InvalidArgument naming what breaks a rule."""
        count = len(request.settlements)
        if not 1 <= count <= SETTLEMENTS_MAX:
            raise InvalidArgument("settlements", f"1 to {SETTLEMENTS_MAX}, not {count}")
        if len(request.request_id.encode()) > REQUEST_ID_BYTES_MAX:
            raise InvalidArgument("request_id", f"has more than {REQUEST_ID_BYTES_MAX} bytes")
        queue_id, size_bytes = "", 0
        each: list[Settlement] = []
        for number, item in enumerate(request.settlements):
            field = f"settlements[{number}]"
            try:
                handle = self._dead_letter(f"{field}.handle", item.handle)
                queue_id = queue_id or handle.queue_id
                if handle.queue_id != queue_id:
                    raise InvalidArgument(f"{field}.handle", f"is not of queue {queue_id!r}")
                size_bytes += item.ByteSize()
                if size_bytes > PUSHES_BYTES_MAX:
                    raise InvalidArgument(
                        field, f"they have more than {PUSHES_BYTES_MAX} bytes together"
                    )
                each.append(self._settlement(field, item, handle))
            except SlateMQError as error:
                error.metadata.setdefault("settlement", str(number))
                raise
        return queue_id, each

    def _dead_letter(self, field: str, text: str) -> Handle:
        try:
            handle = parse_handle(text, self._shard)
        except InvalidArgument as error:
            raise InvalidArgument(field, error.description) from error
        if handle.failed is None:
            raise InvalidArgument(field, "is not the handle of a dead letter: list them")
        return handle

    def _settlement(
        self, field: str, proto: entry_pb2.DeadLetterSettlement, handle: Handle
    ) -> Settlement:
        action = _ACTIONS[proto.WhichOneof("action")]
        if len(proto.note.encode()) > REASON_BYTES_MAX:
            raise InvalidArgument(f"{field}.note", f"has more than {REASON_BYTES_MAX} bytes")
        if action is Action.STAYS and not proto.note:
            raise InvalidArgument(field, "must say what to do, or have a note")
        if action is Action.IS_REPLACED:
            self._limits.check_payload(f"{field}.replace.payload", len(proto.replace.payload))
            encoded_headers(f"{field}.replace.headers", 0, dict(proto.replace.headers))
        assert handle.failed is not None, "see _letter"
        return Settlement(handle.message_id, handle.failed, action, proto.note)


def _check_payload(number: int, proto: entry_pb2.ReplaceDeadLetter, limits: PushLimits) -> None:
    try:
        limits.check_payload(f"settlements[{number}].replace.payload", len(proto.payload))
    except InvalidArgument as error:
        error.metadata.setdefault("settlement", str(number))
        raise


def _fingerprint(request: entry_pb2.SettleDeadLettersRequest) -> bytes:
    data = request.SerializeToString(deterministic=True)
    return hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES).digest()
