"""Execute, from the request to what is durable: asks others, uploads, then runs the commands."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from libs.storage.database.blobs import Blobs
from libs.storage.records.execution_records import OutboxRecord
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES, PayloadUri
from services.broker.core.batches.execute import (
    Command,
    Execution,
    Push,
    Transfer,
    check,
    execute,
    repeated,
)
from services.broker.outbox.conversion import (
    STEP_COMMANDS,
    Draft,
    PushLimits,
    check_drafts,
    drafts_of,
    final,
    fingerprint,
)
from services.broker.outbox.targets import OtherBrokers, OutboxTarget
from services.broker.shard.owner import ShardOwner
from slatemq.errors import Unavailable
from slatemq.v1 import consumer_pb2

HASH_INLINE_BYTES_MAX = 1 << 20
"""Commands up to this size are hashed on the event loop: some milliseconds."""

UPLOADS_AT_ONCE = 8
"""Payloads of one call that are uploaded at the same time."""

UPLOAD_AGE_MS_MAX = 60 * 60 * 1000
"""A blob that nobody refers to may be collected after a while; one that is older than this when its
push would be stored may be next."""

COMMAND_BYTES = 200
"""About what a command adds to a commit, beside the row of a push."""

FORGET_EVERY_S = 10.0


class Executor:
    """Runs lists of commands on one shard."""

    def __init__(
        self,
        owner: ShardOwner,
        blobs: Blobs,
        target: OutboxTarget,
        others: OtherBrokers,
        shard: int,
        limits: PushLimits,
    ) -> None:
        """Run commands on this owner's shard, whose number is `shard`."""
        self._owner = owner
        self._blobs = blobs
        self._target = target
        self._others = others
        self._shard = shard
        self._limits = limits

    async def execute(self, request: consumer_pb2.ExecuteRequest) -> consumer_pb2.ExecuteResponse:
        """See the proto."""
        began_ms = self._owner.clock.now_ms()
        drafts = await drafts_of(request, self._shard, self._limits, began_ms)
        self._owner.admit()
        execution = Execution(
            [_sketch(draft) for draft in drafts], request.request_id, await _fingerprint(request)
        )
        # A repeat asks nobody and uploads nothing.
        ends = await self._owner.run(lambda _: repeated(self._owner.shard, execution))
        if ends is None:
            execution = await self._prepared(drafts, execution)
            ends = await self._run(await self._stored(drafts, execution), began_ms)
        await self._owner.durable()
        return consumer_pb2.ExecuteResponse(
            results=[consumer_pb2.CommandResult(lease_deadline_ms=end_ms) for end_ms in ends]
        )

    async def _run(self, execution: Execution, began_ms: int) -> list[int]:
        rows = [command.value for command in execution.commands if isinstance(command, Push)]
        size_bytes = sum(map(len, rows)) + COMMAND_BYTES * len(execution.commands)

        came_ms = self._owner.clock.now_ms()

        def run(now_ms: int) -> list[int]:
            if now_ms - began_ms > UPLOAD_AGE_MS_MAX:
                raise Unavailable("the upload took over an hour, retry")
            return execute(self._owner.shard, execution, now_ms, came_ms)

        return await self._owner.run(run, size_bytes)

    async def forget(self) -> None:
        """Forgets request IDs whose time is over; runs until cancelled."""
        while True:
            await self._owner.run(self._owner.shard.executed.forget)
            await asyncio.sleep(FORGET_EVERY_S)

    async def _prepared(self, drafts: Sequence[Draft], execution: Execution) -> Execution:
        """The execution with what must be known of other shards."""
        pushes = [draft for draft in drafts if isinstance(draft, OutboxRecord)]
        named = {draft.queue_id for draft in pushes}
        named |= {draft.target for draft in drafts if isinstance(draft, Transfer)}
        elsewhere = await self._others.having(named - self._owner.shard.queues.keys())
        ingest_shard = await self._target.choose() if pushes else 0
        if pushes:
            # An ingest that still runs with an older instance record may have a smaller limit.
            check_drafts(drafts, self._limits.at(self._target.payload_bytes_max(ingest_shard)))
        return replace(execution, elsewhere=elsewhere, ingest_shard=ingest_shard)

    async def _stored(self, drafts: Sequence[Draft], execution: Execution) -> Execution:
        """The execution whose pushes are rows; payloads too large for one are durable objects."""
        large = {
            place: draft
            for place, draft in enumerate(drafts)
            if isinstance(draft, OutboxRecord) and draft.payload_bytes > INLINE_PAYLOAD_MAX_BYTES
        }
        if large:
            # Nothing is uploaded for what is refused anyway.
            await self._owner.run(lambda _: check(self._owner.shard, execution))
        uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)

        async def upload(draft: OutboxRecord) -> OutboxRecord:
            assert isinstance(draft.payload, bytes)
            async with uploads:
                return draft._replace(payload=PayloadUri(await self._blobs.put(draft.payload)))

        # When one fails the others stay: nothing refers to them, and the janitor removes such.
        stored = dict(zip(large, await asyncio.gather(*map(upload, large.values())), strict=True))
        commands: list[Command] = []
        for place, draft in enumerate(drafts):
            if place % STEP_COMMANDS == STEP_COMMANDS - 1:
                await asyncio.sleep(0)
            commands.append(final(stored.get(place, draft)))
        return replace(execution, commands=commands)


def _sketch(draft: Draft) -> Command:
    """The command of a draft, without what a push carries."""
    return Push(draft.queue_id, b"") if isinstance(draft, OutboxRecord) else draft


async def _fingerprint(request: consumer_pb2.ExecuteRequest) -> bytes:
    if not request.request_id:
        return b""
    if request.ByteSize() > HASH_INLINE_BYTES_MAX:
        return await asyncio.to_thread(fingerprint, request.commands)
    return fingerprint(request.commands)
