"""Execute, from the request to what is durable: asks others, uploads, then runs the commands.

The limits of the proto are checked here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from libs.serving import telemetry
from libs.serving.limits import REQUEST_ID_BYTES_MAX, RETENTION_S_MAX
from libs.serving.requests.headers import check_delay_ms, encoded_headers
from libs.storage.layout.own_keys import MINUTE_MS
from libs.storage.records.execution_records import NOT_SET, OutboxRecord, encode_outbox
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES
from libs.storage.records.states import FINGERPRINT_BYTES
from services.broker.core.batches.execute import (
    Command,
    Complete,
    Execution,
    Extend,
    Fail,
    Push,
    Release,
    Transfer,
    execute,
    plan,
    repeated,
)
from services.broker.core.lists.executed import WINDOW_MINUTES
from services.broker.core.settings import MAX_LEASE_MS
from services.broker.outbox.pusher import PushBatch, Pusher, PushLimits, check_together, row_bytes
from services.broker.requests.limits import REASON_BYTES_MAX, lease_ms_of, within, within_bytes
from services.broker.requests.queues import checked_id
from services.broker.requests.tokens import denied_queues, parse_token
from services.broker.shard.owner import ShardOwner
from slatemq.errors import InvalidArgument, NotFound, SlateMQError
from slatemq.v1 import consumer_pb2

HASH_INLINE_BYTES_MAX = 1 << 20
"""Commands up to this size are hashed on the event loop: some milliseconds."""

COMMAND_BYTES = 200
"""About what a command adds to a commit, beside the row of a push."""

FORGET_EVERY_S = 10.0

COMMANDS_MAX = 1000
"""Commands in one call at most: they are applied in one go, some 10 ms in which others wait."""

STEP_COMMANDS = 100
"""Commands checked, or made rows of, in one step."""

MAX_PRIORITY = 255

Draft = Command | OutboxRecord
"""A command; a push is its record until its payload is where it belongs."""


@dataclass(eq=False)
class Executor:
    _owner: ShardOwner
    _pusher: Pusher
    _shard: int
    _stepped_ms: int = field(default=0, init=False)
    _kept_until_ms: int = field(default=0, init=False)

    async def execute(self, request: consumer_pb2.ExecuteRequest) -> consumer_pb2.ExecuteResponse:
        """Answers Execute when its commands are durable; raises what the proto says."""
        began_ms = self._owner.clock.now_ms()
        drafts = await drafts_of(request, self._shard, self._pusher.limits, began_ms)
        self._check_leases(drafts)
        self._owner.admit()
        commands: list[Command] = [
            Push(draft.queue_id, b"") if isinstance(draft, OutboxRecord) else draft
            for draft in drafts
        ]
        execution = Execution(commands, request.request_id, await _fingerprint(request))
        # A repeat asks no other process and uploads nothing.
        ends = await self._owner.run(lambda _: repeated(self._owner.shard, execution))
        if ends is None:
            ends = await self._run(drafts, execution)
        await self._owner.durable()
        return consumer_pb2.ExecuteResponse(
            results=[consumer_pb2.CommandResult(lease_deadline_ms=end_ms) for end_ms in ends]
        )

    def _check_leases(self, drafts: Sequence[Draft]) -> None:
        """Raises PermissionDenied for a lease of a queue from which the caller may not consume."""
        leases = self._owner.shard.leases
        tokens = {
            index: draft.token
            for index, draft in enumerate(drafts)
            if not isinstance(draft, Push | OutboxRecord)
        }
        denied = denied_queues(leases, [*tokens.values()])
        if not denied:
            return
        for index, token in tokens.items():
            lease = leases.running(token)
            if lease is not None and lease.queue.queue_id in denied:
                error = denied[lease.queue.queue_id]
                error.metadata["command"] = str(index)
                raise error

    async def forget(self) -> None:
        """Forgets request IDs whose time is over; runs until cancelled."""
        while True:
            await self._owner.run(self.forget_once)
            await asyncio.sleep(FORGET_EVERY_S)

    def forget_once(self, now_ms: int) -> None:
        """Forgets them, but none for a whole window after a step of the clock: none grew older."""
        stepped_ms = self._owner.clock.stepped_ms
        if stepped_ms != self._stepped_ms:
            self._stepped_ms = stepped_ms
            self._kept_until_ms = now_ms + WINDOW_MINUTES * MINUTE_MS
        if now_ms >= self._kept_until_ms:
            self._owner.shard.executed.forget(now_ms)

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
        arrived_ms = self._owner.clock.now_ms()

        def run(now_ms: int) -> list[int]:
            self._owner.shard.check_stays()
            if batch is not None:
                batch.check_age(now_ms)
            return execute(self._owner.shard, execution, now_ms, arrived_ms)

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
            sizes = [row_bytes(draft) for draft in drafts if isinstance(draft, OutboxRecord)]
            self._owner.shard.outbox.check_capacity(len(sizes), sum(sizes))
        # If one fails the others stay: nothing refers to them, and the janitor removes such.
        records = await asyncio.gather(*map(batch.uploaded, large.values()))
        stored = dict(zip(large, records, strict=True))
        return [stored.get(place, draft) for place, draft in enumerate(drafts)]


async def _fingerprint(request: consumer_pb2.ExecuteRequest) -> bytes:
    if not request.request_id:
        return b""
    if request.ByteSize() > HASH_INLINE_BYTES_MAX:
        return await asyncio.to_thread(fingerprint, request.commands)
    return fingerprint(request.commands)


async def drafts_of(
    request: consumer_pb2.ExecuteRequest, shard: int, limits: PushLimits, now_ms: int
) -> list[Draft]:
    """The commands of a request. Raises InvalidArgument naming what breaks a rule.

    In steps of STEP_COMMANDS, between which others have turns: each may have hundreds of headers.

    The errors have the place of the command in their metadata. NotFound (LEASE_UNKNOWN) for a lease
    of another shard.
    """
    if not 1 <= len(request.commands) <= COMMANDS_MAX:
        raise InvalidArgument(
            "commands", f"1 to {COMMANDS_MAX} commands, not {len(request.commands)}"
        )
    within_bytes("request_id", request.request_id, REQUEST_ID_BYTES_MAX)
    drafts: list[Draft] = []
    pushes = size_bytes = 0
    for index, command in enumerate(request.commands):
        if index % STEP_COMMANDS == STEP_COMMANDS - 1:
            await asyncio.sleep(0)
        try:
            draft = _draft(f"commands[{index}]", command, shard, limits, now_ms)
            if isinstance(draft, OutboxRecord):
                pushes += 1
                size_bytes += command.ByteSize()
                check_together(f"commands[{index}].push", pushes, size_bytes)
        except SlateMQError as error:
            error.metadata.setdefault("command", str(index))
            raise
        drafts.append(draft)
    return drafts


def check_drafts(drafts: Sequence[Draft], limits: PushLimits) -> None:
    """Raises InvalidArgument, as `drafts_of`, for pushes whose payloads are too large."""
    for index, draft in enumerate(drafts):
        if isinstance(draft, OutboxRecord):
            try:
                limits.check_payload(f"commands[{index}].push.payload", draft.payload_bytes)
            except InvalidArgument as error:
                error.metadata.setdefault("command", str(index))
                raise


def final(draft: Draft) -> Command:
    """The command of a draft; the payload of a push must fit into a row by now."""
    if isinstance(draft, OutboxRecord):
        return Push(draft.queue_id, encode_outbox(draft))
    return draft


def fingerprint(commands: Sequence[consumer_pb2.Command]) -> bytes:
    """A digest of every field of every command: equal for equal commands."""
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for command in commands:
        data = command.SerializeToString(deterministic=True)
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


def _draft(
    field: str, command: consumer_pb2.Command, shard: int, limits: PushLimits, now_ms: int
) -> Draft:
    action = command.WhichOneof("action")
    if action is None:
        raise InvalidArgument(field, "must say what to do")
    field = f"{field}.{action}"
    result = getattr(command, action)
    if action == "push":
        return _push(field, result, limits, now_ms)
    token = _lease(f"{field}.lease_token", result.lease_token, shard)
    match action:
        case "complete":
            return Complete(token)
        case "fail":
            return Fail(token, within_bytes(f"{field}.reason", result.reason, REASON_BYTES_MAX))
        case "extend":
            return Extend(token, lease_ms_of(f"{field}.lease_ms", result.lease_ms))
    delay_ms = within(f"{field}.delay_ms", result.delay_ms, 0, MAX_LEASE_MS)
    if action == "release":
        return Release(token, delay_ms)
    target = checked_id(result.target_queue_id, f"{field}.target_queue_id")
    priority = None
    if result.HasField("priority"):
        priority = within(f"{field}.priority", result.priority, 0, MAX_PRIORITY)
    return Transfer(token, target, priority, delay_ms if result.HasField("delay_ms") else None)


def _lease(field: str, text: str, shard: int) -> int:
    its_shard, lease = parse_token(text, field)
    if its_shard != shard:
        raise NotFound("lease", text, reason="LEASE_UNKNOWN")
    return lease


def _push(
    field: str, push_command: consumer_pb2.PushCommand, limits: PushLimits, now_ms: int
) -> OutboxRecord:
    queue_id = checked_id(push_command.queue_id, f"{field}.queue_id")
    payload_bytes = len(push_command.payload)
    limits.check_payload(f"{field}.payload", payload_bytes)
    headers = dict(push_command.headers)
    encoded_headers(f"{field}.headers", 0, headers)
    telemetry.inject(headers)
    present = {descriptor.name for descriptor, _ in push_command.ListFields()}
    if {"delay_ms", "visible_at_ms"} <= present:
        raise InvalidArgument(f"{field}.delay_ms", "not together with visible_at_ms")
    if "delay_ms" in present:
        check_delay_ms(f"{field}.delay_ms", push_command.delay_ms, limits.delay_ms)
    bounds = {"retention_s": RETENTION_S_MAX, "delay_ms": None, "visible_at_ms": None}
    given = {
        name: within(f"{field}.{name}", getattr(push_command, name), 0, most)
        for name, most in bounds.items()
        if name in present
    }
    return OutboxRecord(
        now_ms,
        queue_id,
        push_command.payload,
        payload_bytes,
        headers,
        given.get("retention_s", NOT_SET),
        given.get("delay_ms", NOT_SET),
        given.get("visible_at_ms", NOT_SET),
    )
