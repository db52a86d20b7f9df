"""What brokers ask of ingest, from and to protobuf; its limits are checked here, as in `wire`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from libs.serving.limits import HEADER_TEXT_BYTES_MAX
from libs.serving.requests.headers import encoded_headers
from libs.storage.layout.ids import MAX_SHARD, shard_of
from services.ingest.batches import Accepted, Columns
from services.ingest.edit.replacing import Replacement
from services.ingest.wire import publishes as wire
from services.ingest.write.pushing import Push
from slatemq.errors import InvalidArgument
from slatemq.v1.ingest_pb2 import (
    PushedMessage,
    PushRequest,
    ReplaceMessageRequest,
)

NUMBER_MAX: Final = 1 << 62
"""No outbox gets so far."""

QUEUE_ID_BYTES_MAX: Final = 255

DELAY_MS_MAX: Final = (1 << 62) - 1
"""The broker has judged the delay. One that is no longer allowed must not hold the outbox up."""


def accept_push(request: PushRequest, rules: wire.Rules) -> tuple[Push, Accepted, dict[int, str]]:
    """Which rows they are, their messages, and the URIs of payloads that are objects, by offset.

    Raises InvalidArgument naming the first field that breaks a rule.
    """
    if not 0 <= request.broker_shard <= MAX_SHARD:
        raise InvalidArgument("broker_shard", f"must be within 0..{MAX_SHARD}")
    if not 1 <= request.first_number <= NUMBER_MAX:
        raise InvalidArgument("first_number", f"must be within 1..{NUMBER_MAX}")
    aside = request.set_aside_count
    if not 0 <= aside < request.first_number:
        raise InvalidArgument("set_aside_count", "must be within 0..first_number - 1")
    push = Push(request.broker_shard, request.first_number, aside)
    if aside and not request.messages:
        return push, Accepted([], Columns(), "", [], 0), {}
    rules = replace(rules, delay_ms_max=DELAY_MS_MAX)
    accepted = wire.accept_pushed(request.messages, rules)
    uris: dict[int, str] = {}
    for at, row in enumerate(request.messages):
        if not 1 <= len(row.queue_id.encode()) <= QUEUE_ID_BYTES_MAX:
            raise InvalidArgument(
                f"messages[{at}].queue_id", f"must have 1 to {QUEUE_ID_BYTES_MAX} bytes"
            )
        accepted.columns.direct_queue_id[at] = row.queue_id
        if row.retention_deadline_ms < 0:
            raise InvalidArgument(f"messages[{at}].retention_deadline_ms", "may not be negative")
        if row.retention_deadline_ms:
            accepted.columns.deadline_ms[at] = row.retention_deadline_ms
        if row.payload_uri:
            uris[at] = _uri(at, row, rules.payload_bytes_max)
            accepted.columns.payload_bytes[at] = row.payload_bytes
            accepted.elsewhere.append(at)
    return push, accepted, uris


def _uri(at: int, row: PushedMessage, payload_bytes_max: int) -> str:
    if row.payload:
        raise InvalidArgument(
            f"messages[{at}].payload_uri", "may not be given together with a payload"
        )
    if len(row.payload_uri.encode()) > HEADER_TEXT_BYTES_MAX:
        raise InvalidArgument(
            f"messages[{at}].payload_uri", f"at most {HEADER_TEXT_BYTES_MAX} bytes"
        )
    if not 0 <= row.payload_bytes <= payload_bytes_max:
        raise InvalidArgument(
            f"messages[{at}].payload_bytes", f"must be within 0..{payload_bytes_max}"
        )
    return row.payload_uri


def to_replacement(
    request: ReplaceMessageRequest, payload_bytes_max: int, shard: int
) -> Replacement:
    if request.message_id <= 0 or shard_of(request.message_id) != shard:
        raise InvalidArgument(
            "message_id", f"{request.message_id} is not a message of ingest shard {shard}"
        )
    if request.keep_payload and request.keep_headers:
        raise InvalidArgument("keep_headers", "nothing is left to be replaced")
    if request.keep_payload and request.payload:
        raise InvalidArgument("payload", "may not be given when it is kept")
    if request.keep_headers and request.headers:
        raise InvalidArgument("headers", "may not be given when they are kept")
    if len(request.payload) > payload_bytes_max:
        raise InvalidArgument(
            "payload", f"{len(request.payload)} bytes, at most {payload_bytes_max} are allowed"
        )
    headers = {key: request.headers[key] for key in request.headers}
    encoded_headers("headers", 0, headers)
    return Replacement(
        request.message_id,
        request.etag,
        None if request.keep_payload else request.payload,
        None if request.keep_headers else headers,
        request.queue_id,
    )
