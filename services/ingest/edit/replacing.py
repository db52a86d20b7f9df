"""Replacing the payload and the headers of a stored message.

A replace whose answer was lost is repeated with the etag from before: it is answered like the first
one, as long as the message is still what that made of it.

The header `slatemq-key` belongs to the payload: it names the key with which a client has encrypted
it, and without it readers take what is encrypted for the content itself. So it stays where the
payload does, whatever headers come; and a payload never gets the key of the one before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from libs.storage.database.blobs import UPLOAD_AGE_MS_MAX
from libs.storage.database.clocks import Clock
from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord, DamagedObject, encoding
from libs.storage.layout.keys import log_key, payload_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.metadata import MessageMetadata, decode_log_entry, encode_log_entry
from libs.storage.records.payload_packs import decode_pack, pack_key, pack_of, rest_of_pack
from libs.storage.records.payloads import (
    INLINE_PAYLOAD_MAX_BYTES,
    PayloadUri,
    decode_payload,
    encode_inline,
    encode_uri,
)
from services.ingest.edit.changes import Change, Changes, Turns
from services.ingest.read.entries import entry_before
from services.ingest.read.etags import Etag, etag_of
from services.ingest.read.reading import Reader
from services.ingest.read.tailing import MetadataLog
from services.ingest.write.publishing import Publisher
from slatemq._secrets import KEY_HEADER
from slatemq.errors import Aborted, InvalidArgument, NotFound, Unavailable

log = logging.getLogger(__name__)

ENTRY_BYTES_MAX: Final = 16 << 20
"""A log entry of several messages may grow to this: it must fit into an answer of TailLog."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a message is to be. None: as it is. An empty etag fits every message.

    `queue_id` is the queue whose entry is edited; its event names it.
    """

    message_id: int
    etag: str
    payload: bytes | None
    headers: dict[str, str] | None
    queue_id: str = ""
    headers_etag: str = ""


OnEdited = Callable[[int, str, int], Sequence[RowChange]]
"""Makes the rows of an edit's event, from the message ID, queue ID and payload bytes."""


class Replacer:
    """Replaces messages of one shard.

    Attributes:
        on_edited: Makes the rows that go with an edit: none in direct mode.
    """

    on_edited: OnEdited = staticmethod(lambda message_id, queue_id, payload_bytes: ())

    def __init__(
        self,
        database: Database,
        clock: Clock,
        publisher: Publisher,
        log: MetadataLog,
        reader: Reader,
        turns: Turns,
        changes: Changes,
    ) -> None:
        self._database = database
        self._clock = clock
        self._publisher = publisher
        self._log = log
        self._reader = reader
        self._turns = turns
        self._changes = changes

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

        async def in_turn() -> str:
            async with self._turns.of([sequence]):
                if self._clock.now_ms() - began_ms > UPLOAD_AGE_MS_MAX:
                    raise Unavailable("the upload took over an hour, retry")
                return await self._replace(sequence, wanted, record)

        return await self._turns.to_the_end(in_turn())

    async def _sequence_of(self, message_id: int) -> int | None:
        """The sequence of the durable entry that may have this message."""
        if message_id > self._log.end.last_message_id:
            return None
        recent = self._log.recent(message_id)
        if recent is not None:
            return recent.sequence
        row = await entry_before(self._database, message_id)
        return None if row is None else row[0]

    async def _replace(self, sequence: int, wanted: Replacement, record: bytes | None) -> str:
        message_id = wanted.message_id
        pack_id = pack_of(sequence, message_id)
        keys = log_key(sequence), payload_key(message_id), pack_key(pack_id)
        entry, stored, pack = await self._database.get_many(keys, durable=True)
        packed: dict[int, bytes] = {}
        if stored is None and pack is not None:
            try:
                packed = decode_pack(pack_id, pack)
            except CorruptRecord as error:
                log.error("message %d is replaced, of damaged ones: %s", message_id, error)
                stored = pack
            else:
                stored = encode_inline(packed[message_id]) if message_id in packed else None
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
        if wanted.headers_etag not in ("", current.headers):
            raise Aborted(f"the headers of message {message_id} changed since", etag=str(current))
        messages[at] = _changed(messages[at], wanted)
        with encoding(f"log entry {sequence}"):
            encoded = await asyncio.to_thread(encode_log_entry, messages)
        if len(messages) > 1 and len(encoded) > max(ENTRY_BYTES_MAX, len(entry)):
            raise InvalidArgument(
                "headers",
                f"the log entry that the message shares with others would have {len(encoded)} "
                f"bytes, at most {ENTRY_BYTES_MAX} are allowed",
            )
        payloads = {} if record is None else {message_id: record}
        packs = {}
        if payloads and message_id in packed:
            packs[pack_id], records = rest_of_pack(pack_id, packed, payloads)
            payloads |= records
        change = Change({sequence: encoded}, payloads, [message_id], packs)
        size = messages[at].payload_bytes
        await self._changes.make(
            change, events=lambda: self.on_edited(message_id, wanted.queue_id, size)
        )
        return str(etag_of(record or stored, messages[at].headers))

    async def _is_repeat(
        self, wanted: Replacement, record: bytes | None, stored: bytes, message: MessageMetadata
    ) -> bool:
        """Whether applying the replacement to the message of `wanted.etag` gives this message."""
        message_id = message.message_id
        seen, current = Etag.parse(wanted.etag), etag_of(stored, message.headers)
        if wanted.headers is None:
            if seen.headers != current.headers:
                return False
        elif _headers(message, wanted) != message.headers:
            return False
        if wanted.payload is None:
            return seen.payload == current.payload
        if record == stored:
            return True
        if message.payload_bytes != len(wanted.payload):
            return False
        try:
            payload = decode_payload(stored)  # each upload has a name of its own
            if not isinstance(payload, PayloadUri):
                return False
            read = self._reader.blob_reads.read
            return await read(payload, message.payload_bytes) == wanted.payload
        except (CorruptRecord, DamagedObject) as error:
            log.error("message %d is damaged, so its edit is refused: %s", message_id, error)
            return False


def _changed(message: MessageMetadata, wanted: Replacement) -> MessageMetadata:
    """Raises InvalidArgument where a payload would get the key of the one before."""
    if wanted.payload is not None and wanted.headers is None and KEY_HEADER in message.headers:
        raise InvalidArgument(
            "headers",
            f"the stored payload is encrypted, with the key {message.headers[KEY_HEADER]!r}: "
            f"replace the headers, too, with {KEY_HEADER} where the new one is encrypted",
        )
    headers = _headers(message, wanted)
    if wanted.payload is not None:
        message = message._replace(payload_bytes=len(wanted.payload))
    return message._replace(headers=dict(sorted(headers.items())))


def _headers(message: MessageMetadata, wanted: Replacement) -> Mapping[str, str]:
    """Those that the message is to have."""
    if wanted.headers is None:
        return message.headers
    if wanted.payload is not None:
        return wanted.headers
    headers = {key: value for key, value in wanted.headers.items() if key != KEY_HEADER}
    if KEY_HEADER in message.headers:
        headers[KEY_HEADER] = message.headers[KEY_HEADER]
    return headers


def _not_found(message_id: int) -> NotFound:
    return NotFound("message", str(message_id))
