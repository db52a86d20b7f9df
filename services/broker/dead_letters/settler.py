"""The policy of settlements: what SettleDeadLetters decides about single dead letters."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from functools import partial
from typing import Final

from libs.access.current import require_pushes
from libs.serving.limits import REQUEST_ID_BYTES_MAX
from libs.serving.requests.headers import encoded_headers
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
from services.broker.dead_letters.mover import Mover
from services.broker.delivery.responses import consumer_id
from services.broker.entries.handles import Handle, parse_handle
from services.broker.outbox.pusher import PushBatch, PushLimits, check_together
from services.broker.requests.limits import REASON_BYTES_MAX, within_bytes
from slatemq.errors import InvalidArgument, SlateMQError
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


class DeadLetterSettler:
    def __init__(self, mover: Mover, shard: int) -> None:
        self._mover = mover
        self._owner = mover.owner
        self._limits = mover.pusher.limits
        self._shard = shard

    async def settle(self, request: entry_pb2.SettleDeadLettersRequest) -> None:
        """Applies all settlements or none; they are durable when this returns.

        Raises what the proto says.
        """
        queue_id, each = self._checked(request)
        await _require_replacements(queue_id, request)
        consumer = consumer_id(request.consumer_id)
        self._owner.admit()
        fingerprint = await asyncio.to_thread(_fingerprint, request)
        queue = await self._owner.find(queue_id)
        failed = self._mover.lists.failed
        async with self._mover.lock(queue_id, failed):
            if was_done(self._owner.shard, request.request_id, fingerprint):
                return
            rows = {order: await failed.row(queue, order) for order in {o.order for o in each}}
            settlements = Settlements(each, rows, {}, 0, consumer, request.request_id, fingerprint)
            pushes = await self._replaced(queue, request, settlements)
            if pushes is not None:
                settlements = replace(
                    settlements, pushes=pushes.rows, ingest_shard=pushes.ingest_shard
                )
            command = partial(settle, self._owner.shard, queue, settlements)
            await self._mover.run(queue, command, SETTLEMENT_BYTES * len(each), pushes)

    async def _replaced(
        self, queue: Queue, request: entry_pb2.SettleDeadLettersRequest, settlements: Settlements
    ) -> PushBatch | None:
        """The pushes of what replaces dead letters, uploaded; None where nothing does."""
        each = settlements.each
        numbers = [n for n, one in enumerate(each) if one.action is Action.IS_REPLACED]
        if not numbers:
            return None
        # Nothing is uploaded for what is refused anyway.
        places = await self._owner.run(lambda now_ms: check(queue, settlements, now_ms))
        pushes = await self._mover.begin_pushes()
        for number in numbers:
            content = request.settlements[number].replace
            _check_payload(number, content, pushes.limits)
            dead_letter = settlements.rows[each[number].order][places[number]]
            ends_ms = dead_letter.retention_deadline_ms
            pushes.add(number, queue.queue_id, content, ends_ms)
        await self._mover.upload(pushes)
        return pushes

    # --- The request --------------------------------------------------------

    def _checked(self, request: entry_pb2.SettleDeadLettersRequest) -> tuple[str, list[Settlement]]:
        """The queue, and what was decided. Raises InvalidArgument naming what breaks a rule."""
        count = len(request.settlements)
        if not 1 <= count <= SETTLEMENTS_MAX:
            raise InvalidArgument("settlements", f"1 to {SETTLEMENTS_MAX}, not {count}")
        within_bytes("request_id", request.request_id, REQUEST_ID_BYTES_MAX)
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
                check_together(field, number + 1, size_bytes)
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
        if handle.mark != "f":
            raise InvalidArgument(
                field, "is not the handle of a dead letter: list dead letters to get one"
            )
        return handle

    def _settlement(
        self, field: str, proto: entry_pb2.DeadLetterSettlement, handle: Handle
    ) -> Settlement:
        action = _ACTIONS[proto.WhichOneof("action")]
        within_bytes(f"{field}.note", proto.note, REASON_BYTES_MAX)
        if action is Action.STAYS and not proto.note:
            raise InvalidArgument(field, "must say what to do, or have a note")
        if action is Action.IS_REPLACED:
            self._limits.check_payload(f"{field}.replace.payload", len(proto.replace.payload))
            encoded_headers(f"{field}.replace.headers", 0, dict(proto.replace.headers))
        return Settlement(handle.message_id, handle.number, action, proto.note)


def _check_payload(number: int, content: entry_pb2.ReplaceDeadLetter, limits: PushLimits) -> None:
    try:
        limits.check_payload(f"settlements[{number}].replace.payload", len(content.payload))
    except InvalidArgument as error:
        error.metadata.setdefault("settlement", str(number))
        raise


async def _require_replacements(queue_id: str, request: entry_pb2.SettleDeadLettersRequest) -> None:
    """Raises as a publish of what replaces dead letters."""
    replacements = (
        (place, queue_id, item.replace.headers, len(item.replace.payload))
        for place, item in enumerate(request.settlements)
        if item.HasField("replace")
    )
    await require_pushes(replacements, "settlement")


def _fingerprint(request: entry_pb2.SettleDeadLettersRequest) -> bytes:
    data = request.SerializeToString(deterministic=True)
    return hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES).digest()
