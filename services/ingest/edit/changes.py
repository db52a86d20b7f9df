"""Changes of stored messages: written with the publisher's commits, applied once durable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from libs.storage.errors import StorageError
from libs.storage.layout.keys import log_key, payload_keys
from libs.storage.records.payload_packs import pack_key
from services.ingest.read.reading import Reader
from services.ingest.read.tailing import MetadataLog
from services.ingest.write.publishing import Publisher

__all__ = ["Change", "Changes", "Record"]


Record = tuple[bytes, bytes | None]
"""A key and its value; None removes it."""


class Change(NamedTuple):
    """What is to be written together; None removes.

    Attributes:
        entries: Log entries by sequence.
        payloads: Payload records by message ID.
        message_ids: Whose content changes, or goes: of no other message anything is forgotten.
        packs: Payload packs by the ID of their first message.
    """

    entries: Mapping[int, bytes | None]
    payloads: Mapping[int, bytes | None]
    message_ids: Sequence[int]
    packs: Mapping[int, bytes | None] = MappingProxyType({})


class Changes:
    """Writes changes. The caller holds the turns of the entries (services.ingest.edit.turns)."""

    def __init__(self, publisher: Publisher, log: MetadataLog, reader: Reader) -> None:
        self._publisher = publisher
        self._log = log
        self._reader = reader

    async def make(
        self,
        change: Change,
        also: Sequence[Record] = (),
        events: Callable[[], Sequence[Record]] = tuple,
    ) -> None:
        """Write a change, and other records with it; durable on return.

        It joins the commit that gathers now: what the caller saw holds if it has not waited since.
        `events` makes the rows of its events, after admission. Raises ResourceExhausted, and the
        errors of the store.
        """
        records = [(log_key(sequence), value) for sequence, value in change.entries.items()]
        payloads = change.payloads
        records += zip(payload_keys(payloads), payloads.values(), strict=True)
        records += [(pack_key(first_id), value) for first_id, value in change.packs.items()]
        records += also
        self._publisher.admit(sum(len(value) for _, value in records if value is not None))
        records += events()
        self._publisher.put(records, partial(self._done, change), partial(self._failed, change))
        self._log.rewriting(change.entries)
        self._reader.changing(change.message_ids)
        await self._publisher.commits.durable()

    def _done(self, change: Change) -> None:
        self._log.rewritten(change.entries)
        self._reader.changed(change.message_ids, change.entries)

    def _failed(self, change: Change, error: StorageError) -> None:
        self._log.not_rewritten(change.entries, error)
        self._reader.not_changed(change.message_ids, error)
