"""DeadLetterService: redrives, and settlements of single dead letters."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

from libs.access.current import caller_name, hold_to, may, may_some, require
from libs.access.verbs import Verb
from libs.filters import SOURCE_BYTES_MAX
from libs.serving.limits import REQUEST_ID_BYTES_MAX
from libs.serving.requests.expressions import checking_expression
from libs.serving.requests.paging import bad_page_token, checked_page_size
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.records.redrive_records import RedriveRecord, RedriveState
from services.broker.dead_letters.mover import Mover
from services.broker.dead_letters.redrive_runner import RedriveRunner, dead_letter_filter
from services.broker.dead_letters.settler import DeadLetterSettler
from services.broker.requests.limits import within_bytes
from services.broker.requests.queues import checked_id
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound
from slatemq.v1 import entry_pb2, entry_pb2_grpc

RATE_MAX: Final = 100_000
IDS_MAX: Final = 10_000

_ID = re.compile(r"([0-9a-f]{1,4})-([0-9a-f]{1,16})", re.ASCII)


class DeadLetterServicer(entry_pb2_grpc.DeadLetterServiceServicer):
    def __init__(
        self, shard: int, mover: Mover, runner: RedriveRunner, settler: DeadLetterSettler
    ) -> None:
        self._shard = shard
        self._owner = mover.owner
        self._mover = mover
        self._runner = runner
        self._settler = settler

    async def StartRedrive(
        self, request: entry_pb2.StartRedriveRequest, context: Any
    ) -> entry_pb2.StartRedriveResponse:
        queue_id, target_id = await self._checked(request)
        if self._owner.shard.redrives.of_request(request.request_id) is None:
            await self._owner.find(queue_id)
            await self._mover.is_elsewhere(target_id, queue_id)  # or it is here
            # What has failed before the call is in rows when this is over.
            await self._owner.durable()

        principal = caller_name()

        def start(now_ms: int) -> int:
            redrives = self._owner.shard.redrives
            known = redrives.of_request(request.request_id)
            if known is not None:
                return known
            redrives.check_capacity(principal)
            queue = self._owner.staying(queue_id)
            return redrives.start(
                RedriveRecord(
                    queue_revision=queue.created_revision,
                    state=RedriveState.RUNNING,
                    rate=request.rate,
                    created_at_ms=now_ms,
                    ended_at_ms=0,
                    total_count=queue.failed.stored_count,
                    examined_count=0,
                    redriven_count=0,
                    next_order=queue.failed.oldest_order,
                    next_place=0,
                    end_order=queue.orders.last,
                    queue_id=queue_id,
                    target_queue_id=target_id,
                    filter=request.filter,
                    request_id=request.request_id,
                    principal=principal,
                    message_ids=tuple(request.message_ids),
                )
            )

        number = await self._owner.run(start)
        redrive = self._redrive(number)
        if (redrive.queue_id, redrive.target_queue_id) != (queue_id, target_id):
            raise InvalidArgument(
                "request_id", "was used for a redrive of other queues", reason="REQUEST_ID_REUSED"
            )
        await self._owner.durable()
        self._runner.wake()
        return entry_pb2.StartRedriveResponse(redrive=redrive)

    async def _checked(self, request: entry_pb2.StartRedriveRequest) -> tuple[str, str]:
        queue_id = checked_id(request.queue_id, "queue_id")
        target_id = request.target_queue_id
        target_id = checked_id(target_id, "target_queue_id") if target_id else queue_id
        if not 0 <= request.rate <= RATE_MAX:
            raise InvalidArgument("rate", f"must be within 0..{RATE_MAX}", reason="OUT_OF_RANGE")
        if len(request.message_ids) > IDS_MAX:
            raise InvalidArgument("message_ids", f"at most {IDS_MAX} IDs")
        for place, message_id in enumerate(request.message_ids):
            if not 0 < message_id <= MAX_MESSAGE_ID:
                raise InvalidArgument(f"message_ids[{place}]", "is not a message ID")
        within_bytes("request_id", request.request_id, REQUEST_ID_BYTES_MAX)
        if within_bytes("filter", request.filter, SOURCE_BYTES_MAX):
            with checking_expression("filter"):
                chosen = await asyncio.to_thread(dead_letter_filter, request.filter)
            hold_to("filter_cost", chosen.checked.cost)
        return queue_id, target_id

    async def GetRedrive(
        self, request: entry_pb2.GetRedriveRequest, context: Any
    ) -> entry_pb2.GetRedriveResponse:
        redrive = self._redrive(await self._number(request.redrive_id, "inspect"))
        await self._owner.durable()
        return entry_pb2.GetRedriveResponse(redrive=redrive)

    async def ListRedrives(
        self, request: entry_pb2.ListRedrivesRequest, context: Any
    ) -> entry_pb2.ListRedrivesResponse:
        queue_id = checked_id(request.queue_id, "queue_id") if request.queue_id else ""
        size = checked_page_size(request.page_size)
        below = self._page_number(request.page_token)
        numbers = [
            number
            for number, record in reversed(list(self._owner.shard.redrives))
            if (below is None or number < below)
            and queue_id in ("", record.queue_id)
            and may("inspect", record.queue_id)
        ]
        answer = entry_pb2.ListRedrivesResponse(
            redrives=[self._redrive(number) for number in numbers[:size]]
        )
        if len(numbers) > size:
            answer.next_page_token = self._id(numbers[size - 1])
        await self._owner.durable()
        return answer

    def _page_number(self, token: str) -> int | None:
        if not token:
            return None
        found = _ID.fullmatch(token)
        if found is None or int(found[1], 16) != self._shard:
            raise bad_page_token()
        return int(found[2], 16)

    async def CancelRedrive(
        self, request: entry_pb2.CancelRedriveRequest, context: Any
    ) -> entry_pb2.CancelRedriveResponse:
        redrive = await self._set(request.redrive_id, RedriveState.CANCELLED)
        return entry_pb2.CancelRedriveResponse(redrive=redrive)

    async def ResumeRedrive(
        self, request: entry_pb2.ResumeRedriveRequest, context: Any
    ) -> entry_pb2.ResumeRedriveResponse:
        redrive = await self._set(request.redrive_id, RedriveState.RUNNING)
        self._runner.wake()
        return entry_pb2.ResumeRedriveResponse(redrive=redrive)

    async def SettleDeadLetters(
        self, request: entry_pb2.SettleDeadLettersRequest, context: Any
    ) -> entry_pb2.SettleDeadLettersResponse:
        await self._settler.settle(request)
        return entry_pb2.SettleDeadLettersResponse()

    async def _set(self, redrive_id: str, state: RedriveState) -> entry_pb2.Redrive:
        number = await self._number(redrive_id, "inspect", "edit")
        redrive = self._redrive(number)
        require("edit", redrive.queue_id)
        if state == RedriveState.RUNNING:
            require("edit", redrive.target_queue_id)

        principal = caller_name()

        def change(now_ms: int) -> None:
            redrives = self._owner.shard.redrives
            record = redrives.get(number)
            if record is None:
                raise NotFound("redrive", redrive_id)
            if record.state == RedriveState.DONE:
                raise FailedPrecondition(
                    "REDRIVE_DONE", f"redrive {redrive_id} is done", subject=redrive_id
                )
            if record.state == state:
                return
            if state == RedriveState.RUNNING:
                queue = self._owner.staying(record.queue_id)
                if queue.created_revision != record.queue_revision:
                    raise NotFound("queue", record.queue_id)
                redrives.check_capacity(principal)
                record = record._replace(principal=principal)
            ended_ms = 0 if state == RedriveState.RUNNING else now_ms
            redrives.put(number, record._replace(state=state, ended_at_ms=ended_ms, error=""))

        await self._owner.run(change)
        redrive = self._redrive(number)
        await self._owner.durable()
        return redrive

    async def _number(self, redrive_id: str, *verbs: Verb) -> int:
        """Its number; raises NotFound once it is proven that there is none.

        And to callers that may do nothing of this in its queue: IDs count up, and an answer of
        another kind would say of each whether it is there.
        """
        found = _ID.fullmatch(redrive_id)
        number = int(found[2], 16) if found and int(found[1], 16) == self._shard else 0
        record = self._owner.shard.redrives.get(number)
        if record is None or not may_some(verbs, record.queue_id):
            await self._owner.commits.prove_ownership()
            raise NotFound("redrive", redrive_id)
        return number

    def _id(self, number: int) -> str:
        return f"{self._shard:x}-{number:x}"

    def _redrive(self, number: int) -> entry_pb2.Redrive:
        record = self._owner.shard.redrives.get(number)
        assert record is not None
        names = set(entry_pb2.Redrive.DESCRIPTOR.fields_by_name) - {"redrive_id", "state"}
        return entry_pb2.Redrive(
            redrive_id=self._id(number),
            state=entry_pb2.Redrive.State.ValueType(record.state),
            **{name: getattr(record, name) for name in names},
        )
