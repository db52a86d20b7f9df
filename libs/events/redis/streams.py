"""One stream: appending entries together, and one consumer of a group that shares them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from redis import asyncio as aioredis
from redis import exceptions

from libs.events.redis.connection import (
    BLOCK_MS,
    FORGET_CONSUMER_MS,
    HOLD_MS,
    READ_COUNT,
    RECLAIM_S,
)
from libs.events.redis.transactions import Command, Transactions

KEEP_S = HOLD_MS / 1000 / 3

OWNED_COUNT = 1_000
"""Entries whose owner or idle time one command changes."""

APPEND = """
for at = 1, #ARGV, {step} do
    redis.call('XADD', KEYS[1], '*', {entry})
end
"""
"""Appends entries in order and answers once: redis-py takes 40 µs for each answer of a pipeline."""

PAGE: Final = 16
"""Entries of one look at all that wait, which may have bodies of 512 KiB."""


async def read_stream(
    client: aioredis.Redis, key: str, last: bytes | str = "+"
) -> AsyncIterator[tuple[bytes, Mapping[bytes, bytes]]]:
    """The entries of a stream up to the one with the ID `last`, and their IDs."""
    untyped: Any = client
    after = "-"
    while page := await untyped.xrange(key, min=after, max=last, count=PAGE):
        for entry_id, fields in page:
            yield entry_id, fields
        after = "(" + page[-1][0].decode()


class StreamAppends:
    """Appends entries with the same fields to one stream."""

    def __init__(self, client: aioredis.Redis, key: str, fields: Sequence[str]) -> None:
        self._client: Any = client
        self._key = key
        self._fields = fields
        entry = ", ".join(f"'{name}', ARGV[at + {place}]" for place, name in enumerate(fields))
        script = APPEND.format(step=len(fields), entry=entry)
        self._script = self._client.register_script(script)

    async def append(self, entries: Sequence[Sequence[str | bytes]]) -> None:
        """Append entries, each the values of the fields, in order: all of them or none."""
        if len(entries) == 1:
            await self._client.xadd(self._key, dict(zip(self._fields, entries[0], strict=True)))
        else:
            values = [value for entry in entries for value in entry]
            await self._script(keys=[self._key], args=values)


class Delivery(NamedTuple):
    """An entry as delivered to this consumer; `deliveries` includes this one."""

    entry_id: bytes
    fields: Mapping[bytes, bytes]
    deliveries: int


class Group:
    """One consumer of a consumer group of a stream."""

    def __init__(self, client: aioredis.Redis, key: str, group: str, consumer: str) -> None:
        self._client: Any = client
        self._key = key
        self._group = group
        self._consumer = consumer
        self._transactions = Transactions(client)
        self._reclaimed_at = 0.0
        self._is_more_left = False
        self._kept_at = 0.0

    async def create(self, start: str) -> None:
        """Create the group where it is missing; it gets the entries behind `start`."""
        command = ("XGROUP", "CREATE", self._key, self._group, start, "MKSTREAM")
        try:
            await self._transactions.execute(self._key, [command])
        except exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read(self, block_ms: int = BLOCK_MS, count: int = READ_COUNT) -> list[Delivery]:
        """New entries, at most `count`; waits up to `block_ms` for the first."""
        return await self._read(b">", count, max(1, block_ms))

    async def own(self, after: bytes) -> list[Delivery]:
        """The next entries that this consumer has read and not finished, in their order.

        Those that were removed from the stream have no fields. `deliveries` says 1 for all.
        """
        return await self._read(after, READ_COUNT)

    async def _read(self, after: bytes, count: int, block_ms: int | None = None) -> list[Delivery]:
        try:
            answer = await self._client.xreadgroup(
                self._group, self._consumer, {self._key: after}, count=count, block=block_ms
            )
        except exceptions.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            # The server came back without its data: the group gets every entry that is left.
            await self.create("0")
            return []
        entries = answer[0][1] if isinstance(answer, list) and answer else _entries(answer)
        return [Delivery(entry_id, fields or {}, 1) for entry_id, fields in entries]

    async def reclaim(
        self, own_idle_ms: int | None = None, count: int = READ_COUNT
    ) -> list[Delivery]:
        """The entries of dead consumers; with `own_idle_ms` also idle ones of this consumer.

        Looks for dead consumers every few seconds, and immediately when the last look left some.

        `own_idle_ms`: how long an entry of this consumer must have been idle to come again.
        `count`: how many entries to look at.
        """
        found: list[Delivery] = []
        if own_idle_ms is not None:
            rows = await self._pending(own_idle_ms, self._consumer, count)
            found += await self._claim(rows, own_idle_ms)
        if self._is_more_left or time.monotonic() - self._reclaimed_at >= RECLAIM_S:
            self._reclaimed_at = time.monotonic()
            # Includes entries that were removed from the stream meanwhile: those are not claimed.
            rows = await self._pending(HOLD_MS, None, count)
            self._is_more_left = len(rows) == count
            found += await self._claim(rows, HOLD_MS)
            for row in await self._client.xinfo_consumers(self._key, self._group):
                if row["pending"] == 0 and row["idle"] > FORGET_CONSUMER_MS:
                    await self._client.xgroup_delconsumer(self._key, self._group, row["name"])
        return found

    async def take_over(self) -> None:
        """Take the entries of all other consumers, which are gone: `reclaim` returns them next."""
        for row in await self._client.xinfo_consumers(self._key, self._group):
            if row["name"] == self._consumer.encode():
                continue
            while rows := await self._pending(0, row["name"], OWNED_COUNT):
                await self._own_as_idle(rows)

    @property
    def is_keep_due(self) -> bool:
        """Whether `keep` would do something."""
        return time.monotonic() - self._kept_at >= KEEP_S

    async def keep(self, entry_ids: Collection[bytes]) -> None:
        """Show that this consumer still has these entries; cheap when called often."""
        if entry_ids and self.is_keep_due:
            self._kept_at = time.monotonic()
            await self._client.xclaim(
                self._key, self._group, self._consumer, 0, list(entry_ids), justid=True
            )

    def finish_commands(self, *entry_ids: bytes, remove: bool) -> list[Command]:
        """Acknowledge entries, and remove them from the stream."""
        commands: list[Command] = [("XACK", self._key, self._group, *entry_ids)]
        if remove:
            commands.append(("XDEL", self._key, *entry_ids))
        return commands

    async def leave(self) -> None:
        """Let others take this consumer's entries immediately; remove it if it has none."""
        rows = await self._pending(0, self._consumer, OWNED_COUNT)
        if rows:
            await self._own_as_idle(rows)
        else:
            await self._client.xgroup_delconsumer(self._key, self._group, self._consumer)

    async def _own_as_idle(self, rows: list[Any]) -> None:
        """Own these entries with an idle time of `HOLD_MS`: the next consumer takes them."""
        ids = [row["message_id"] for row in rows]
        await self._client.xclaim(
            self._key, self._group, self._consumer, 0, ids, idle=HOLD_MS, justid=True
        )

    async def _claim(self, rows: list[Any], idle_ms: int) -> list[Delivery]:
        if not rows:
            return []
        counts = {row["message_id"]: int(row["times_delivered"]) for row in rows}
        claimed = await self._client.xclaim(
            self._key, self._group, self._consumer, idle_ms, list(counts)
        )
        return [Delivery(i, fields, counts[i] + 1) for i, fields in claimed if fields]

    async def _pending(self, idle_ms: int, consumer: str | None, count: int) -> list[Any]:
        return list(
            await self._client.xpending_range(
                self._key, self._group, "-", "+", count, consumername=consumer, idle=idle_ms or None
            )
        )


def _entries(answer: Any) -> list[Any]:
    """The entries of an answer in RESP3: a mapping of lists of lists."""
    if not answer:
        return []
    return [entry for batch in next(iter(answer.values())) for entry in batch]
