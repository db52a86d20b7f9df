"""The payloads of messages, read by ID from snapshots of the ingests, where the rows are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, TypeAlias

from libs.storage.database.blobs import Blobs
from libs.storage.database.snapshots import SnapshotReader
from libs.storage.errors import DamagedObject, ObjectNotFound, StoreUnavailable
from libs.storage.layout.ids import runs, shard_of
from libs.storage.layout.keys import payload_key
from libs.storage.records.payload_packs import (
    PACK_MESSAGES,
    decode_pack,
    pack_range,
    parse_pack_key,
)
from libs.storage.records.payloads import PayloadUri, decode_payload
from services.janitor.jobs.owners import Owners
from services.janitor.snapshots import SnapshotName
from slatemq._grouping import groups_of

READS_AT_ONCE: Final = 64
READ_BYTES: Final = 16 << 20
"""Payloads that are read together, unless one alone is larger."""

SILENCE_S: Final = 60.0
"""A store that gives no byte of a payload for this long is down."""

Unreadable: TypeAlias = ObjectNotFound | DamagedObject
"""Why the object that a payload record names cannot be read; it may be restored."""


class Contents:
    """Reads payloads from the snapshots of ingests; `close` it at the end.

    A message whose ingest has no snapshot here counts as gone, like one that is not stored.
    """

    def __init__(self, owners: Owners, names: Sequence[SnapshotName]) -> None:
        self._owners = owners
        self._blobs = Blobs(owners.root)
        self._names: Mapping[int, SnapshotName] = {
            name.shard: name for name in names if name.service == "ingest"
        }
        self._readers: dict[int, SnapshotReader] = {}

    def payloads(
        self, sizes: Sequence[tuple[int, int]]
    ) -> Iterator[list[bytes | Unreadable | None]]:
        """Payloads in the order of `sizes`, some at a time; None for one that is gone.

        `sizes` are message IDs, each with the bytes that its payload is said to have. In place of
        a payload whose object cannot be read comes the reason.
        """
        for some in groups_of(sizes, lambda one: one[1], READ_BYTES, READS_AT_ONCE):
            message_ids = [message_id for message_id, _ in some]
            found = self._owners.run(self._read(message_ids))
            yield [found.get(message_id) for message_id in message_ids]

    def uris(self, message_ids: Sequence[int]) -> list[str]:
        """The URIs of the payloads that are objects."""
        found: list[str] = []
        for start in range(0, len(message_ids), READS_AT_ONCE):
            some = message_ids[start : start + READS_AT_ONCE]
            records = self._owners.run(self._records(some))
            found += [record.uri for record in records.values() if isinstance(record, PayloadUri)]
        return found

    def close(self) -> None:
        for reader in self._readers.values():
            self._owners.run(reader.close())

    async def _read(self, message_ids: Sequence[int]) -> dict[int, bytes | Unreadable]:
        async def payload(record: bytes | PayloadUri) -> bytes | Unreadable:
            if not isinstance(record, PayloadUri):
                return record
            try:
                return await self._blobs.get_slowly(record.uri, SILENCE_S)
            except (ObjectNotFound, DamagedObject) as error:
                return error
            except TimeoutError:
                why = f"reading {record.uri}: nothing came for {SILENCE_S:g} s"
                raise StoreUnavailable(why) from None

        records = await self._records(message_ids)
        found = await asyncio.gather(*(payload(record) for record in records.values()))
        packed = await self._packed([one for one in message_ids if one not in records])
        return {**dict(zip(records, found, strict=True)), **packed}

    async def _records(self, message_ids: Sequence[int]) -> dict[int, bytes | PayloadUri]:
        """The payloads that have records of their own, which all large ones have."""

        async def record(message_id: int) -> bytes | None:
            reader = await self._reader(shard_of(message_id))
            return None if reader is None else await reader.get(payload_key(message_id))

        for shard in {shard_of(one) for one in message_ids}:
            await self._reader(shard)  # once, not once for each that waits for it
        values = await asyncio.gather(*(record(one) for one in message_ids))
        return {
            one: decode_payload(value)
            for one, value in zip(message_ids, values, strict=True)
            if value is not None
        }

    async def _packed(self, message_ids: Sequence[int]) -> dict[int, bytes]:
        """The payloads in packs; a pack is read once for neighbouring messages."""

        async def read(some: list[int]) -> dict[int, bytes]:
            reader = await self._reader(shard_of(some[0]))
            return {} if reader is None else await _from_packs(reader, some)

        by_shard = groupby(sorted(set(message_ids)), shard_of)
        # Between two that are further apart a pack ends.
        apart = (run for _, some in by_shard for run in runs(some, PACK_MESSAGES - 1))
        found = await asyncio.gather(*map(read, apart))
        return {one: payload for some in found for one, payload in some.items()}

    async def _reader(self, shard: int) -> SnapshotReader | None:
        name = self._names.get(shard)
        if name is None:
            return None
        if shard not in self._readers:
            opened = await self._owners.root.open_snapshot(name.database, name.snapshot_id)
            self._readers[shard] = opened
        return self._readers[shard]


async def _from_packs(reader: SnapshotReader, message_ids: Sequence[int]) -> dict[int, bytes]:
    """The payloads of these messages, ascending, that are in packs.

    A pack ends before the next one begins: the last one up to a message has it, or none has.
    """
    found: dict[int, bytes] = {}
    left = list(message_ids)
    while left:
        span = pack_range(max(left[-1] - PACK_MESSAGES + 1, 0), left[-1])
        first_id = left[-1]
        async for ((key, value),) in reader.scan(*span, limit=1, descending=True):
            first_id = parse_pack_key(key)
            payloads = decode_pack(first_id, value)
            found.update((one, payloads[one]) for one in left if one in payloads)
        left = [one for one in left if one < first_id]
    return found
