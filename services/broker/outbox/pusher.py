"""The pushes of one command, before it runs: where they go, and the objects of large payloads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from libs.storage.database.blobs import FOLDER, UPLOAD_AGE_MS_MAX, Blobs
from libs.storage.errors import StorageError, first_raised
from libs.storage.records.execution_records import NOT_SET, OutboxRecord, encode_outbox
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES, PayloadUri
from services.broker.core.moves import moving
from services.broker.outbox.targets import OtherBrokers, OutboxTarget
from services.broker.shard.owner import ShardOwner
from slatemq.errors import InvalidArgument, Unavailable

UPLOADS_AT_ONCE: Final = 8
"""Payloads of one command that are uploaded at the same time, and copied for it."""


PUSHES_BYTES_MAX = 64 << 20
"""Payloads and headers of the pushes of one call, unless one alone has more: as much as a claim may
return."""

_SOME_URI: Final = PayloadUri(f"{FOLDER}/00/{'0' * 62}")
"""As long as that of any payload."""


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


def check_together(field: str, count: int, size_bytes: int) -> None:
    """Raises InvalidArgument where the pushes of a call are too large; `field` has the last."""
    # One alone may be a legal message: a payload and headers, each of the largest.
    if count > 1 and size_bytes > PUSHES_BYTES_MAX:
        raise InvalidArgument(field, f"they have more than {PUSHES_BYTES_MAX} bytes together")


def row_bytes(record: OutboxRecord) -> int:
    """The bytes of its row, in which a large payload is an object."""
    is_large = record.payload_bytes > INLINE_PAYLOAD_MAX_BYTES
    rest = record._replace(payload=_SOME_URI if is_large else b"")
    return len(encode_outbox(rest)) + (0 if is_large else record.payload_bytes)


class MessageContent(Protocol):
    """What a message carries; the protobuf messages that have both fields are of this shape."""

    @property
    def payload(self) -> bytes:
        """Any bytes."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Any texts by name."""


@dataclass(eq=False)
class PushBatch:
    """Pushes to one ingest shard; `rows` are their outbox rows, by the caller's keys."""

    ingest_shard: int
    limits: PushLimits
    _blobs: Blobs
    _began_ms: int
    rows: dict[int, bytes] = field(default_factory=dict, init=False)
    _large: dict[int, tuple[OutboxRecord, MessageContent]] = field(default_factory=dict, init=False)
    _has_objects: bool = field(default=False, init=False)
    _uploads: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(UPLOADS_AT_ONCE), init=False
    )

    def add(
        self,
        key: int,
        queue_id: str,
        content: MessageContent,
        retention_deadline_ms: int,
        delay_ms: int = NOT_SET,
    ) -> None:
        """Adds a push of this content to a queue; it ends when the dead letter would have.

        `delay_ms` NOT_SET: it has the queue's default delay. One with a large payload has a row
        once it is uploaded.
        """
        payload = content.payload
        is_large = len(payload) > INLINE_PAYLOAD_MAX_BYTES
        record = OutboxRecord(
            pushed_at_ms=self._began_ms,
            queue_id=queue_id,
            payload=_SOME_URI if is_large else payload,
            payload_bytes=len(payload),
            headers=dict(content.headers),
            retention_s=0,
            delay_ms=delay_ms,
            retention_deadline_ms=retention_deadline_ms,
        )
        if is_large:
            self._large[key] = (record, content)
        else:
            self.rows[key] = encode_outbox(record)

    async def upload(self) -> None:
        """Stores the large payloads of what was added, durably. Raises StoreUnavailable."""
        large, self._large = self._large, {}
        # Where one fails, the others stay: nothing refers to them, and the janitor removes such.
        with first_raised(StorageError):
            async with asyncio.TaskGroup() as uploads:
                for key, (record, content) in large.items():
                    uploads.create_task(self._upload(key, record, content))

    async def _upload(self, key: int, record: OutboxRecord, content: MessageContent) -> None:
        async with self._uploads:
            # Asked for only now: each time protobuf gives a copy.
            record = record._replace(payload=await self._put(content.payload))
        self.rows[key] = encode_outbox(record)

    async def uploaded(self, record: OutboxRecord) -> OutboxRecord:
        """The record; a payload too large for a row is a durable object once this returns."""
        if record.payload_bytes <= INLINE_PAYLOAD_MAX_BYTES:
            return record
        assert isinstance(record.payload, bytes)
        async with self._uploads:
            return record._replace(payload=await self._put(record.payload))

    async def _put(self, payload: bytes) -> PayloadUri:
        self._has_objects = True
        return PayloadUri(await self._blobs.put(payload))

    @property
    def count(self) -> int:
        return len(self.rows) + len(self._large)

    @property
    def size_bytes(self) -> int:
        """Of the rows, also of those that are not made yet."""
        large = sum(row_bytes(record) for record, _ in self._large.values())
        return sum(map(len, self.rows.values())) + large

    def check_age(self, now_ms: int) -> None:
        """Raises Unavailable if objects may be too old to be referred to."""
        if self._has_objects and now_ms - self._began_ms > UPLOAD_AGE_MS_MAX:
            raise Unavailable("the upload took over an hour, retry")


@dataclass(eq=False)
class Pusher:
    _owner: ShardOwner
    _target: OutboxTarget
    _others: OtherBrokers
    _blobs: Blobs
    limits: PushLimits

    async def elsewhere(self, queue_ids: Set[str]) -> frozenset[str]:
        """The queues, of these, that are on another shard. Raises Unavailable."""
        for queue_id in filter(self._owner.shard.moves.has, sorted(queue_ids)):
            raise moving(queue_id)
        return await self._others.having(queue_ids - self._owner.shard.queues.keys())

    async def begin(self) -> PushBatch:
        """An empty batch. Raises Unavailable where no ingest can take pushes."""
        ingest_shard = await self._target.choose()
        # An ingest that still runs with an older instance record may have a smaller limit.
        limits = self.limits.at(self._target.payload_bytes_max(ingest_shard))
        return PushBatch(ingest_shard, limits, self._blobs, self._owner.clock.now_ms())
