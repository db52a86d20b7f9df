"""Execute's commands, from protobuf. The limits of the proto are checked here."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from libs.serving import telemetry
from libs.serving.limits import RETENTION_S_MAX
from libs.serving.requests.headers import check_delay_ms, encoded_headers
from libs.storage.records.execution_records import NOT_SET, OutboxRecord, encode_outbox
from libs.storage.records.states import FINGERPRINT_BYTES
from services.broker.core.batches.execute import (
    Command,
    Complete,
    Extend,
    Fail,
    Push,
    Release,
    Transfer,
)
from services.broker.core.settings import MAX_LEASE_MS
from services.broker.requests.limits import REASON_BYTES_MAX, lease_ms_of, within, within_bytes
from services.broker.requests.queues import checked_id
from services.broker.requests.tokens import parse_token
from slatemq.errors import InvalidArgument, NotFound, SlateMQError
from slatemq.v1 import consumer_pb2

COMMANDS_MAX = 1000
"""Commands in one call at most: they are applied in one go, some 10 ms in which others wait."""

STEP_COMMANDS = 100
"""Commands checked, or made rows of, in one step."""

PUSHES_BYTES_MAX = 64 << 20
"""Payloads and headers of the pushes of one call: as much as a claim may give."""

REQUEST_ID_BYTES_MAX = 128
"""A UUID has 36."""

MAX_PRIORITY = 255


@dataclass(frozen=True, slots=True)
class PushLimits:
    """What a pushed message may have: settings of the instance, the same as at ingest."""

    payload_bytes: int
    delay_ms: int

    def at(self, ingest_payload_bytes: int | None) -> PushLimits:
        """The limits for an ingest with this largest payload (None: unknown)."""
        if ingest_payload_bytes is None or ingest_payload_bytes >= self.payload_bytes:
            return self
        return replace(self, payload_bytes=ingest_payload_bytes)

    def check_payload(self, field: str, payload_bytes: int) -> None:
        """Raises InvalidArgument for a payload that is too large."""
        if payload_bytes > self.payload_bytes:
            raise InvalidArgument(
                field, f"{payload_bytes} bytes, at most {self.payload_bytes} are allowed"
            )


Draft = Command | OutboxRecord
"""A command; a push is its record until its payload is where it belongs."""


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
    size_bytes = 0
    for index, command in enumerate(request.commands):
        if index % STEP_COMMANDS == STEP_COMMANDS - 1:
            await asyncio.sleep(0)
        try:
            draft = _draft(f"commands[{index}]", command, shard, limits, now_ms)
            if isinstance(draft, OutboxRecord):
                size_bytes += command.ByteSize()
                if size_bytes > PUSHES_BYTES_MAX:
                    raise InvalidArgument(
                        f"commands[{index}].push",
                        f"the pushes have more than {PUSHES_BYTES_MAX} bytes together",
                    )
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
    return _FINISHING[action](field, result, token)


def _lease(field: str, text: str, shard: int) -> int:
    its_shard, lease = parse_token(text, field)
    if its_shard != shard:
        raise NotFound("lease", text, reason="LEASE_UNKNOWN")
    return lease


def _complete(field: str, complete_command: consumer_pb2.CompleteCommand, token: int) -> Command:
    return Complete(token)


def _fail(field: str, fail_command: consumer_pb2.FailCommand, token: int) -> Command:
    return Fail(token, within_bytes(f"{field}.reason", fail_command.reason, REASON_BYTES_MAX))


def _release(field: str, release_command: consumer_pb2.ReleaseCommand, token: int) -> Command:
    return Release(token, within(f"{field}.delay_ms", release_command.delay_ms, 0, MAX_LEASE_MS))


def _extend(field: str, extend_command: consumer_pb2.ExtendCommand, token: int) -> Command:
    return Extend(token, lease_ms_of(f"{field}.lease_ms", extend_command.lease_ms))


def _transfer(field: str, transfer_command: consumer_pb2.TransferCommand, token: int) -> Command:
    target = checked_id(transfer_command.target_queue_id, f"{field}.target_queue_id")
    priority = None
    if transfer_command.HasField("priority"):
        priority = within(f"{field}.priority", transfer_command.priority, 0, MAX_PRIORITY)
    delay_ms = within(f"{field}.delay_ms", transfer_command.delay_ms, 0, MAX_LEASE_MS)
    return Transfer(token, target, priority, delay_ms)


_FINISHING: dict[str, Callable[[str, Any, int], Command]] = {
    "complete": _complete,
    "fail": _fail,
    "release": _release,
    "extend": _extend,
    "transfer": _transfer,
}


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
