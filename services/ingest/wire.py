"""Publishes, and what brokers ask, from protobuf. The limits of the proto are checked here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.serving import telemetry
from libs.serving.limits import HEADER_TEXT_BYTES_MAX, REQUEST_ID_BYTES_MAX, RETENTION_S_MAX
from libs.serving.requests.headers import check_delay_ms, encoded_headers
from libs.storage.layout.ids import MAX_SHARD, shard_of
from libs.storage.records.metadata import encode_headers
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES
from services.ingest.batches import MESSAGE_OVERHEAD_BYTES, NOT_SET, Accepted, Columns
from services.ingest.edit.replacing import Replacement
from services.ingest.write.pushing import Push
from slatemq._counts import counted
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import WRONG_SHARD, InvalidArgument
from slatemq.v1.ingest_pb2 import (
    PublishRequest,
    PublishRun,
    PushedMessage,
    PushRequest,
    ReplaceMessageRequest,
)

MESSAGES_MAX: Final = 10_000
"""Messages in a batch, and IDs in a request for payloads: some milliseconds of the event loop."""

DEDUPE_KEY_BYTES_MAX: Final = 255

REPEATED_HEADER_BYTES_MAX: Final = 4 << 20
"""Headers of all messages behind the first of their run: as many as are hashed on the event loop,
and far from what a large request may have."""


_NO_HEADERS: Final = encode_headers({})


@dataclass(frozen=True, slots=True)
class Rules:
    """An instance's limits; `retention_s` is for messages that state none."""

    payload_bytes_max: int
    retention_s: int
    delay_ms_max: int


def accept(request: PublishRequest, rules: Rules) -> Accepted:
    """The batch as columns. Raises InvalidArgument naming the first field that breaks a rule.

    Protobuf has checked that text is UTF-8.
    """
    if len(request.request_id.encode()) > REQUEST_ID_BYTES_MAX:
        raise InvalidArgument("request_id", f"at most {REQUEST_ID_BYTES_MAX} bytes")
    runs = request.runs
    if len(runs) > MESSAGES_MAX:  # Each has a message at least.
        raise InvalidArgument("runs", f"at most {MESSAGES_MAX} messages, not {len(runs)} runs")
    accepting = _Accepting(rules, "runs[{}]")
    for at, run in enumerate(runs):
        payloads = run.payloads
        count = len(payloads)
        if count == 1:
            accepting.take_single(at, run, payloads[0])
            continue
        if len(accepting.payloads) + count > MESSAGES_MAX:
            check_count("runs", sum(len(run.payloads) for run in runs))
        accepting.take_run(at, run, list(payloads))
    check_count("runs", len(accepting.payloads))
    return accepting.accepted(request.request_id)


def accept_pushed(messages: Sequence[PushedMessage], rules: Rules) -> Accepted:
    """Messages of an outbox as columns. Raises InvalidArgument (`messages[3].headers`)."""
    check_count("messages", len(messages))
    accepting = _Accepting(rules, "messages[{}]")
    for at, message in enumerate(messages):
        payload = message.payload
        if len(payload) > INLINE_PAYLOAD_MAX_BYTES:
            accepting.check_payload(f"messages[{at}].payload", at, len(payload))
        accepting.take(at, message, (payload,))
    return accepting.accepted("")


def check_count(field: str, count: int) -> None:
    """Raise InvalidArgument for no messages, or more than a request may have."""
    if not 1 <= count <= MESSAGES_MAX:
        raise InvalidArgument(field, f"1 to {MESSAGES_MAX} messages, not {count}")


class _Accepting:
    """What is accepted of a request so far; `field` is its list of messages."""

    def __init__(self, rules: Rules, field: str) -> None:
        self.payloads: list[bytes] = []
        self._repeated_header_bytes = 0
        self._dedupe_keys: dict[int, str] = {}
        self._keyed_runs: list[tuple[int, int]] = []
        self._rules = rules
        self._field = field
        self._columns = Columns()
        self._large: list[int] = []
        self._size_bytes = 0
        # Neighbours tend to have equal headers, and share them.
        self._headers: dict[str, str] = {}
        self._encoded = _NO_HEADERS

    def check_payload(self, field: str, at: int, payload_bytes: int) -> None:
        """Note a payload that is too large for a record. Raises InvalidArgument."""
        most = self._rules.payload_bytes_max
        if payload_bytes > most:
            raise InvalidArgument(field, f"{payload_bytes} bytes, at most {most} are allowed")
        self._large.append(at)

    def take_single(self, at: int, run: PublishRun, payload: bytes) -> None:
        """Accept a run of one: as `take_run`, in less time."""
        if len(payload) > INLINE_PAYLOAD_MAX_BYTES:
            self.check_payload(f"runs[{at}].payloads[0]", len(self.payloads), len(payload))
        if run.dedupe_keys:
            self._take_keys(at, run.dedupe_keys, 1)
        self.take(at, run, (payload,))

    def take_run(self, at: int, run: PublishRun, payloads: Sequence[bytes]) -> None:
        if not payloads:
            raise InvalidArgument(f"runs[{at}].payloads", "must not be empty")
        first = len(self.payloads)
        if max(map(len, payloads)) > INLINE_PAYLOAD_MAX_BYTES:
            for place, payload in enumerate(payloads):
                if len(payload) > INLINE_PAYLOAD_MAX_BYTES:
                    field = f"runs[{at}].payloads[{place}]"
                    self.check_payload(field, first + place, len(payload))
        if run.dedupe_keys:
            self._take_keys(at, run.dedupe_keys, len(payloads))
        self.take(at, run, payloads)
        # Sent once, kept for each message: a small request must not become gigabytes.
        if self._repeated_header_bytes > REPEATED_HEADER_BYTES_MAX:
            raise InvalidArgument(
                "runs",
                "the headers of the messages behind the first of each run, counted for each "
                f"message, have over {REPEATED_HEADER_BYTES_MAX} bytes: make shorter runs",
            )

    def _take_keys(self, at: int, keys: Sequence[str], count: int) -> None:
        if len(keys) != count:
            raise InvalidArgument(
                f"runs[{at}].dedupe_keys",
                f"{counted(len(keys), 'key')} for {counted(count, 'payload')}: give one for each, "
                "or none",
            )
        first = len(self.payloads)
        self._keyed_runs.append((first, at))
        for place, key in enumerate(keys):
            if len(key.encode()) > DEDUPE_KEY_BYTES_MAX:
                raise InvalidArgument(
                    f"runs[{at}].dedupe_keys[{place}]",
                    f"at most {DEDUPE_KEY_BYTES_MAX} bytes are allowed",
                )
            if key:
                self._dedupe_keys[first + place] = key

    def take(self, at: int, message: PublishRun | PushedMessage, payloads: Sequence[bytes]) -> None:
        """Accept messages that differ only in these payloads."""
        columns, count = self._columns, len(payloads)
        created, retention = NOT_SET, self._rules.retention_s
        if message.HasField("created_at_ms"):
            created = message.created_at_ms
            if created < 0:
                raise InvalidArgument(
                    f"{self._field.format(at)}.created_at_ms", "must not be negative"
                )
        if message.HasField("retention_s"):
            retention = message.retention_s
            if not 0 <= retention <= RETENTION_S_MAX:
                raise InvalidArgument(
                    f"{self._field.format(at)}.retention_s", f"must be within 0..{RETENTION_S_MAX}"
                )
        if message.visible_at_ms or message.HasField("delay_ms"):
            self._take_times(self._field.format(at), message, count)
        given = message.headers
        own = {key: given[key] for key in given}  # dict(given) takes half as long again
        if own != self._headers:
            self._headers = own
            self._encoded = encoded_headers(f"{self._field}.headers", at, own)
        self._repeated_header_bytes += (count - 1) * len(self._encoded)
        each_bytes = len(self._encoded) + MESSAGE_OVERHEAD_BYTES
        if count == 1:
            # As below, in half of the time: batches may have nothing else.
            (payload,) = payloads
            self.payloads.append(payload)
            columns.headers.append(self._headers)
            columns.header_bytes.append(self._encoded)
            columns.created_at_ms.append(created)
            columns.retention_s.append(retention)
            columns.payload_bytes.append(len(payload))
            self._size_bytes += len(payload) + each_bytes
            return
        sizes = list(map(len, payloads))
        self.payloads += payloads
        columns.headers += [self._headers] * count
        columns.header_bytes += [self._encoded] * count
        columns.created_at_ms += [created] * count
        columns.retention_s += [retention] * count
        columns.payload_bytes += sizes
        self._size_bytes += sum(sizes) + count * each_bytes

    def _take_times(self, field: str, message: PublishRun | PushedMessage, count: int) -> None:
        places = range(len(self.payloads), len(self.payloads) + count)
        if message.HasField("delay_ms"):
            if message.HasField("visible_at_ms"):
                raise InvalidArgument(f"{field}.delay_ms", "cannot be combined with visible_at_ms")
            most_ms = self._rules.delay_ms_max
            delay_ms = check_delay_ms(f"{field}.delay_ms", message.delay_ms, most_ms)
            self._columns.delay_ms.update(dict.fromkeys(places, delay_ms))
        elif message.visible_at_ms < 0:
            raise InvalidArgument(f"{field}.visible_at_ms", "must not be negative")
        elif message.visible_at_ms > 0:
            self._columns.visible_at_ms.update(dict.fromkeys(places, message.visible_at_ms))

    def accepted(self, request_id: str) -> Accepted:
        return Accepted(
            self.payloads,
            self._columns,
            request_id,
            self._large,
            self._size_bytes,
            self._dedupe_keys,
            keyed_runs=self._keyed_runs,
        )


def carry_trace(columns: Columns) -> None:
    """Add the current trace context to the headers of each message that has room for it."""
    for at, headers in enumerate(columns.headers):
        telemetry.inject(headers)
        columns.header_bytes[at] = encode_headers(headers)


def check_dedupe_shards(accepted: Accepted, shards: Collection[int], shard: int) -> None:
    """Raise InvalidArgument for a dedupe key that belongs to another shard."""
    for at, key in accepted.dedupe_keys.items():
        wanted = dedupe_shard(key, shards)
        if wanted != shard:
            first, run = accepted.keyed_runs[
                bisect_right(accepted.keyed_runs, (at, MESSAGES_MAX)) - 1
            ]
            raise InvalidArgument(
                f"runs[{run}].dedupe_keys[{at - first}]",
                f"belongs to ingest shard {wanted}, this is {shard}",
                reason=WRONG_SHARD,
                metadata={"shard": str(wanted)},
            )


def check_message_ids(message_ids: Sequence[int], shard: int) -> None:
    """Raise InvalidArgument for too few or too many IDs, or one of another shard."""
    if not 1 <= len(message_ids) <= MESSAGES_MAX:
        raise InvalidArgument("message_ids", f"1 to {MESSAGES_MAX} IDs, not {len(message_ids)}")
    if min(message_ids) > 0 and shard_of(min(message_ids)) == shard == shard_of(max(message_ids)):
        return  # the shard is in the highest bits
    for at, message_id in enumerate(message_ids):
        if message_id <= 0 or shard_of(message_id) != shard:
            raise InvalidArgument(
                f"message_ids[{at}]", f"{message_id} is not a message of ingest shard {shard}"
            )


NUMBER_MAX: Final = 1 << 62
"""No outbox gets so far."""

QUEUE_ID_BYTES_MAX: Final = 255

DELAY_MS_MAX: Final = (1 << 62) - 1
"""The broker has judged the delay. One that is no longer allowed must not hold the outbox up."""


def accept_push(request: PushRequest, rules: Rules) -> tuple[Push, Accepted, dict[int, str]]:
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
    accepted = accept_pushed(request.messages, rules)
    uris: dict[int, str] = {}
    for at, row in enumerate(request.messages):
        if not 1 <= len(row.queue_id.encode()) <= QUEUE_ID_BYTES_MAX:
            raise InvalidArgument(
                f"messages[{at}].queue_id", f"must have 1 to {QUEUE_ID_BYTES_MAX} bytes"
            )
        accepted.columns.direct_queue_id[at] = row.queue_id
        if row.retention_deadline_ms < 0:
            raise InvalidArgument(f"messages[{at}].retention_deadline_ms", "must not be negative")
        if row.retention_deadline_ms:
            accepted.columns.deadline_ms[at] = row.retention_deadline_ms
        if row.payload_uri:
            uris[at] = _uri(at, row, rules.payload_bytes_max)
            accepted.columns.payload_bytes[at] = row.payload_bytes
            accepted.elsewhere.append(at)
    return push, accepted, uris


def _uri(at: int, row: PushedMessage, payload_bytes_max: int) -> str:
    if row.payload:
        raise InvalidArgument(f"messages[{at}].payload_uri", "cannot be combined with a payload")
    if len(row.payload_uri.encode()) > HEADER_TEXT_BYTES_MAX:
        raise InvalidArgument(
            f"messages[{at}].payload_uri", f"at most {HEADER_TEXT_BYTES_MAX} bytes"
        )
    if not 0 <= row.payload_bytes <= payload_bytes_max:
        raise InvalidArgument(
            f"messages[{at}].payload_bytes", f"must be within 0..{payload_bytes_max}"
        )
    return row.payload_uri


def check_message_id(message_id: int, shard: int) -> None:
    """Raises InvalidArgument unless this is the ID of a message of the shard."""
    if message_id <= 0 or shard_of(message_id) != shard:
        raise InvalidArgument(
            "message_id", f"{message_id} is not a message of ingest shard {shard}"
        )


def to_replacement(
    request: ReplaceMessageRequest, payload_bytes_max: int, shard: int
) -> Replacement:
    check_message_id(request.message_id, shard)
    if request.keep_payload and request.keep_headers:
        raise InvalidArgument("keep_headers", "nothing is left to be replaced")
    if request.keep_payload and request.payload:
        raise InvalidArgument("payload", "must be empty where it is kept")
    if request.keep_headers and request.headers:
        raise InvalidArgument("headers", "must be empty where they are kept")
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
        request.headers_etag,
    )
