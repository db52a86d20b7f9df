"""Changes of stored messages: written with the publisher's commits, applied once durable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from libs.storage.errors import StorageError
from libs.storage.layout.keys import log_key, payload_keys
from libs.storage.layout.primitives import RowChange
from libs.storage.records.payload_packs import pack_key
from services.ingest.read.reading import Reader
from services.ingest.read.tailing import MetadataLog
from services.ingest.write.publishing import Publisher

T = TypeVar("T")


class Turns:
    """Locks of the entries of one log: one change of an entry at a time.

    The messages of a commit share an entry. So changes of them take turns: each reads the entry,
    and the next begins when the changed entry is durable.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def of(self, sequences: Iterable[int]) -> AsyncIterator[None]:
        held: list[asyncio.Lock] = []
        try:
            # In one order for all: no two wait for each other.
            for sequence in sorted(sequences):
                lock = self._locks.setdefault(sequence, asyncio.Lock())
                await lock.acquire()
                held.append(lock)
            yield
        finally:
            for lock in held:
                lock.release()

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end, even if cancelled: the next turn must find it durable."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have gone


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
    """Writes changes. The caller holds the turns of the entries."""

    def __init__(self, publisher: Publisher, log: MetadataLog, reader: Reader) -> None:
        self._publisher = publisher
        self._log = log
        self._reader = reader

    async def make(
        self,
        change: Change,
        also: Sequence[RowChange] = (),
        events: Callable[[], Sequence[RowChange]] = tuple,
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
        self._log.rewriting.begin(change.entries)
        self._reader.changing.begin(change.message_ids)
        await self._publisher.commits.durable()

    def _done(self, change: Change) -> None:
        self._log.rewritten(change.entries)
        self._reader.changed(change.message_ids, change.entries)

    def _failed(self, change: Change, error: StorageError) -> None:
        self._log.rewriting.fail(change.entries, error)
        self._reader.changing.fail(change.message_ids, error)
