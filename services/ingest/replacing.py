"""Replacing the payload and the headers of a stored message.

The messages of a commit share a log entry. So those who replace one of them take turns: each reads
the entry, and the next one begins when its new form is durable.

A replace whose answer was lost is repeated with the etag from before: it is answered like the first
one, as long as the message is still what that made of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

from libs.storage.clocks import Clock
from libs.storage.errors import StorageError
from libs.storage.keys import log_key, log_range, parse_log_key, payload_key
from libs.storage.metadata import MessageMetadata, decode_log_entry, encode_log_entry
from libs.storage.payloads import (
    INLINE_PAYLOAD_MAX_BYTES,
    PayloadUri,
    decode_payload,
    encode_inline,
    encode_uri,
)
from libs.storage.slate import Database
from services.ingest.etags import Etag, etag_of
from services.ingest.publishing import UPLOAD_AGE_MS_MAX, Publisher
from services.ingest.reading import Reader
from services.ingest.tailing import MetadataLog
from slatemq.errors import Aborted, InvalidArgument, NotFound, Unavailable

__all__ = ["Replacement", "Replacer"]

ENTRY_BYTES_MAX: Final = 16 << 20
"""A log entry of several messages may grow to this: it must fit into an answer of TailLog."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a message is to be. None: as it is. An empty `etag` fits every message."""

    message_id: int
    etag: str
    payload: bytes | None
    headers: dict[str, str] | None


class Replacer:
    """Replaces messages of one shard."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        publisher: Publisher,
        log: MetadataLog,
        reader: Reader,
    ) -> None:
        """Write with the publisher's commits; log and reader learn what has changed."""
        self._database = database
        self._clock = clock
        self._publisher = publisher
        self._log = log
        self._reader = reader
        self._turns: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[str]] = set()

    async def replace(self, wanted: Replacement) -> str:
        """Replace a message; durable on return. Gives its new etag.

        Raises NotFound, Aborted with the current etag, InvalidArgument where its log entry has no
        room for the headers, ResourceExhausted, Unavailable, the errors of the store.
        """
        began_ms = self._clock.now_ms()
        sequence = await self._sequence_of(wanted.message_id)
        if sequence is None:
            raise _not_found(wanted.message_id)
        record = None
        if wanted.payload is not None and len(wanted.payload) > INLINE_PAYLOAD_MAX_BYTES:
            record = encode_uri(await self._publisher.upload(wanted.payload))
        elif wanted.payload is not None:
            record = encode_inline(wanted.payload)
        turn = self._turns.setdefault(sequence, asyncio.Lock())

        async def in_turn() -> str:
            async with turn:
                if self._clock.now_ms() - began_ms > UPLOAD_AGE_MS_MAX:
                    raise Unavailable("the upload took over an hour, retry")
                return await self._replace(sequence, wanted, record)

        return await self._to_the_end(in_turn())

    async def _to_the_end(self, work: Coroutine[Any, Any, str]) -> str:
        """Does it to its end, whoever gives up waiting: the next one must find it durable."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have gone

    async def _sequence_of(self, message_id: int) -> int | None:
        """The sequence of the durable entry that would have this message."""
        if message_id > self._log.end.last_message_id:
            return None
        recent = self._log.recent(message_id)
        if recent is not None:
            return recent.sequence
        start, end = log_key(0), log_range(message_id, message_id).end
        async for rows in self._database.scan(start, end, limit=1, durable=True, descending=True):
            return parse_log_key(rows[0][0])
        return None

    async def _replace(self, sequence: int, wanted: Replacement, record: bytes | None) -> str:
        message_id = wanted.message_id
        keys = log_key(sequence), payload_key(message_id)
        entry, stored = await self._database.get_many(keys, durable=True)
        if entry is None or stored is None:
            raise _not_found(message_id)
        messages = await asyncio.to_thread(decode_log_entry, entry)
        at = next((n for n, one in enumerate(messages) if one.message_id == message_id), None)
        if at is None:
            raise _not_found(message_id)
        current = etag_of(stored, messages[at].headers)
        if wanted.etag and wanted.etag != str(current):
            if await self._is_repeat(wanted, record, stored, messages[at]):
                return str(current)
            raise Aborted(f"message {message_id} was changed since", etag=str(current))
        messages[at] = _changed(messages[at], wanted)
        encoded = await asyncio.to_thread(encode_log_entry, messages)
        if len(messages) > 1 and len(encoded) > max(ENTRY_BYTES_MAX, len(entry)):
            raise InvalidArgument(
                "headers",
                f"the log entry that the message shares with others would have {len(encoded)} "
                f"bytes, at most {ENTRY_BYTES_MAX} are allowed",
            )
        await self._commit(sequence, encoded, message_id, record)
        return str(etag_of(record or stored, messages[at].headers))

    async def _is_repeat(
        self, wanted: Replacement, record: bytes | None, stored: bytes, message: MessageMetadata
    ) -> bool:
        """Whether the message is what the replacement makes of the one that its etag stands for."""
        seen, current = Etag.parse(wanted.etag), etag_of(stored, message.headers)
        if wanted.headers is None:
            if seen.headers != current.headers:
                return False
        elif wanted.headers != message.headers:
            return False
        if wanted.payload is None:
            return seen.payload == current.payload
        if record == stored:
            return True
        if message.payload_bytes != len(wanted.payload):
            return False
        told = decode_payload(stored)  # each upload has a name of its own
        return isinstance(told, PayloadUri) and await self._reader.read_blob(told) == wanted.payload

    async def _commit(
        self,
        sequence: int,
        encoded: bytes,
        message_id: int,
        record: bytes | None,
    ) -> None:
        def then() -> None:
            self._log.replace(sequence, encoded)
            self._reader.replaced(message_id, sequence)

        records = [(log_key(sequence), encoded)]
        if record is not None:
            records.append((payload_key(message_id), record))
        self._publisher.admit(sum(len(value) for _, value in records))
        self._reader.replacing(message_id)
        self._publisher.put(records, then)
        try:
            await self._publisher.commits.durable()
        except StorageError as error:
            self._reader.not_replaced(message_id, error)
            raise


def _changed(message: MessageMetadata, wanted: Replacement) -> MessageMetadata:
    if wanted.payload is not None:
        message = message._replace(payload_bytes=len(wanted.payload))
    if wanted.headers is not None:
        message = message._replace(headers=dict(sorted(wanted.headers.items())))
    return message


def _not_found(message_id: int) -> NotFound:
    return NotFound("message", str(message_id))
