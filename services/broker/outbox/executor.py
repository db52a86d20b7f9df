"""Execute, from the request to what is durable: asks others, uploads, then runs the commands."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from libs.storage.records.execution_records import OutboxRecord
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES
from services.broker.core.batches.execute import (
    Command,
    Execution,
    Push,
    Transfer,
    execute,
    plan,
    repeated,
)
from services.broker.outbox.conversion import (
    STEP_COMMANDS,
    Draft,
    check_drafts,
    drafts_of,
    final,
    fingerprint,
)
from services.broker.outbox.pusher import PushBatch, Pusher
from services.broker.shard.owner import ShardOwner
from slatemq.v1 import consumer_pb2

HASH_INLINE_BYTES_MAX = 1 << 20
"""Commands up to this size are hashed on the event loop: some milliseconds."""

COMMAND_BYTES = 200
"""About what a command adds to a commit, beside the row of a push."""

FORGET_EVERY_S = 10.0


@dataclass(eq=False)
class Executor:
    """Runs lists of commands on one shard."""

    _owner: ShardOwner
    _pusher: Pusher
    _shard: int

    async def execute(self, request: consumer_pb2.ExecuteRequest) -> consumer_pb2.ExecuteResponse:
        """Answers Execute when its commands are durable; raises what the proto says."""
        began_ms = self._owner.clock.now_ms()
        drafts = await drafts_of(request, self._shard, self._pusher.limits, began_ms)
        self._owner.admit()
        execution = Execution(
            [_sketch(draft) for draft in drafts], request.request_id, await _fingerprint(request)
        )
        # A repeat asks no other process and uploads nothing.
        ends = await self._owner.run(lambda _: repeated(self._owner.shard, execution))
        if ends is None:
            ends = await self._run(drafts, execution)
        await self._owner.durable()
        return consumer_pb2.ExecuteResponse(
            results=[consumer_pb2.CommandResult(lease_deadline_ms=end_ms) for end_ms in ends]
        )

    async def forget(self) -> None:
        """Forgets request IDs whose time is over; runs until cancelled."""
        while True:
            await self._owner.run(self._owner.shard.executed.forget)
            await asyncio.sleep(FORGET_EVERY_S)

    async def _run(self, drafts: Sequence[Draft], execution: Execution) -> list[int]:
        pushes = [draft for draft in drafts if isinstance(draft, OutboxRecord)]
        named = {draft.queue_id for draft in pushes}
        named |= {draft.target for draft in drafts if isinstance(draft, Transfer)}
        elsewhere = await self._pusher.elsewhere(named)
        execution = replace(execution, elsewhere=elsewhere)
        batch = await self._pusher.begin() if pushes else None
        if batch is not None:
            check_drafts(drafts, batch.limits)
            execution = replace(execution, ingest_shard=batch.ingest_shard)
            drafts = await self._uploaded(drafts, execution, batch)
        commands: list[Command] = []
        for place, draft in enumerate(drafts):
            if place % STEP_COMMANDS == STEP_COMMANDS - 1:
                await asyncio.sleep(0)
            commands.append(final(draft))
        execution = replace(execution, commands=commands)
        rows = [command.value for command in commands if isinstance(command, Push)]
        size_bytes = sum(map(len, rows)) + COMMAND_BYTES * len(commands)
        came_ms = self._owner.clock.now_ms()

        def run(now_ms: int) -> list[int]:
            if batch is not None:
                batch.check_age(now_ms)
            return execute(self._owner.shard, execution, now_ms, came_ms)

        return await self._owner.run(run, size_bytes)

    async def _uploaded(
        self, drafts: Sequence[Draft], execution: Execution, batch: PushBatch
    ) -> list[Draft]:
        """The drafts; payloads too large for a row are durable objects."""
        large = {
            place: draft
            for place, draft in enumerate(drafts)
            if isinstance(draft, OutboxRecord) and draft.payload_bytes > INLINE_PAYLOAD_MAX_BYTES
        }
        if large:
            # Nothing is uploaded for a list that is refused anyway.
            await self._owner.run(lambda now_ms: plan(self._owner.shard, execution, now_ms))
        # If one fails the others stay: nothing refers to them, and the janitor removes such.
        records = await asyncio.gather(*map(batch.uploaded, large.values()))
        stored = dict(zip(large, records, strict=True))
        return [stored.get(place, draft) for place, draft in enumerate(drafts)]


def _sketch(draft: Draft) -> Command:
    """The command of a draft, without what a push carries."""
    return Push(draft.queue_id, b"") if isinstance(draft, OutboxRecord) else draft


async def _fingerprint(request: consumer_pb2.ExecuteRequest) -> bytes:
    if not request.request_id:
        return b""
    if request.ByteSize() > HASH_INLINE_BYTES_MAX:
        return await asyncio.to_thread(fingerprint, request.commands)
    return fingerprint(request.commands)
