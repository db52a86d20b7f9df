"""One stream: appending entries together, and one consumer of a group that shares them."""

from __future__ import annotations

import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any, Final, NamedTuple

from redis import asyncio as aioredis
from redis import exceptions

from libs.events.redis.connection import (
    BLOCK_MS,
    FORGET_CONSUMER_MS,
    HOLD_MS,
    KEEP_S,
    READ_COUNT,
    RECLAIM_S,
)
from libs.events.redis.transactions import Command, Transactions

OWNED_COUNT = 1_000
"""Entries whose owner or idle time one command changes."""

APPEND = """
for at = 1, #ARGV, {step} do
    redis.call('XADD', KEYS[1], '*', {entry})
end
"""
"""Appends entries in order and answers once: redis-py takes 40 µs for each answer of a pipeline."""

FORGET = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
"""
"""Removes a consumer that has nothing: what it has would go with it, also what it got just now."""

SET_IDLE = """
local owned = {}
for at = 4, #ARGV do
    if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[at], ARGV[at], 1, ARGV[2]) == 1 then
        owned[#owned + 1] = ARGV[at]
    end
end
if #owned == 0 then return owned end
for _, option in ipairs({'IDLE', ARGV[3], 'JUSTID'}) do owned[#owned + 1] = option end
return redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(owned))
"""
"""Sets how long entries of a consumer were idle, and returns them: XCLAIM alone would take back
what other consumers have taken over meanwhile."""

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
    """An entry as delivered to this consumer.

    Attributes:
        deliveries: How often it was delivered at least, this time included. Another consumer that
            read it first, and others with it, may have died before it came to this one.
    """

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
        self._forget_script = self._client.register_script(FORGET)
        self._set_idle_script = self._client.register_script(SET_IDLE)
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
        answer = await self._of_group(
            self._client.xreadgroup(
                self._group, self._consumer, {self._key: b">"}, count=count, block=max(1, block_ms)
            )
        )
        entries = answer[0][1] if isinstance(answer, list) and answer else _entries(answer)
        return [Delivery(entry_id, fields or {}, 1) for entry_id, fields in entries]

    async def own(self, known: Collection[bytes]) -> AsyncGenerator[list[Delivery], None]:
        """Pages of what this consumer has read beside `known` and not finished, in order.

        These are the entries of reads whose answers were lost, which count as their delivery.
        """
        async for rows in self._pages(self._consumer, READ_COUNT):
            counts = _counts(row for row in rows if row["message_id"] not in known)
            if counts:
                kept = await self._renew(counts)
                yield [
                    Delivery(entry_id, fields, max(1, count - 1))
                    for entry_id, count in counts.items()
                    if entry_id in kept
                    for _, fields in await self._client.xrange(self._key, entry_id, entry_id)
                ]

    async def reclaim(self, count: int = READ_COUNT) -> list[Delivery]:
        """The entries of dead consumers; `count`: how many entries to look at."""
        return await self._claim(await self._abandoned(count), HOLD_MS)

    async def reclaim_one(self) -> list[Delivery]:
        """An entry of a dead consumer.

        One alone: a claim counts as a delivery, and this consumer may die before the next.
        """
        for row in await self._abandoned(READ_COUNT):
            if found := await self._claim([row], HOLD_MS):
                return found
        return []

    async def claim_again(self, entry_id: bytes) -> list[Delivery]:
        """An entry that this consumer has, as its next delivery; none if it has it no more."""
        if not await self._renew([entry_id]):  # from now on no other takes it
            return []
        rows = await self._pending(0, self._consumer, 1, entry_id.decode())
        return await self._claim([row for row in rows if row["message_id"] == entry_id], 0)

    async def _abandoned(self, count: int) -> list[Any]:
        """Entries of dead consumers, also some that were removed from the stream meanwhile.

        Looks every few seconds, and immediately when the last look found some.
        """
        is_due = time.monotonic() - self._reclaimed_at >= RECLAIM_S
        if not (is_due or self._is_more_left):
            return []
        rows = await self._idle_of_others(count)
        self._is_more_left = bool(rows)
        if is_due:
            for row in await self._consumers():
                if row["pending"] == 0 and row["idle"] > FORGET_CONSUMER_MS:
                    await self._forget(row["name"])
            self._reclaimed_at = time.monotonic()
        return rows

    async def _idle_of_others(self, count: int) -> list[Any]:
        """The first entries of others that count as dead.

        This consumer has idle ones, too, after an outage, and keeps them.
        """
        async with aclosing(self._pages(None, count, HOLD_MS)) as pages:
            async for page in pages:
                if rows := [row for row in page if row["consumer"] != self._consumer.encode()]:
                    return rows
        return []

    async def take_over(self) -> None:
        """Take the entries of all other consumers, which are gone: `reclaim` returns them next."""
        for row in await self._consumers():
            if row["name"] != self._consumer.encode():
                await self._abandon(row["name"])

    @property
    def is_keep_due(self) -> bool:
        """Whether `keep` would do something."""
        return time.monotonic() - self._kept_at >= KEEP_S

    async def keep(self, entry_ids: Collection[bytes]) -> set[bytes]:
        """Show that this consumer still has these entries; cheap when called often.

        Returns those that it has: others may have taken some while it stood still.
        """
        if not entry_ids or not self.is_keep_due:
            return {*entry_ids}
        kept = await self._renew(entry_ids)
        self._kept_at = time.monotonic()
        return kept

    async def acknowledge(self, entry_id: bytes) -> None:
        """Finish an entry, and leave it in the stream."""
        await self._client.xack(self._key, self._group, entry_id)

    def finish_commands(self, *entry_ids: bytes, remove: bool) -> list[Command]:
        """Acknowledge entries, and remove them from the stream."""
        commands: list[Command] = [("XACK", self._key, self._group, *entry_ids)]
        if remove:
            commands.append(("XDEL", self._key, *entry_ids))
        return commands

    async def leave(self) -> None:
        """Let others take this consumer's entries immediately; remove it if it has none."""
        await self._forget(self._consumer)
        await self._abandon(self._consumer)

    async def _forget(self, consumer: str | bytes) -> None:
        await self._of_group(self._forget_script(keys=[self._key], args=[self._group, consumer]))

    async def _abandon(self, consumer: str | bytes) -> None:
        """Let others take the entries of a consumer immediately."""
        async for rows in self._pages(consumer, OWNED_COUNT):
            await self._set_idle(consumer, [row["message_id"] for row in rows], HOLD_MS)

    async def _renew(self, entry_ids: Collection[bytes]) -> set[bytes]:
        """Let no others take these entries for a while; returns those that are this consumer's."""
        wanted, kept = [*entry_ids], set[bytes]()
        for first in range(0, len(wanted), OWNED_COUNT):
            page = wanted[first : first + OWNED_COUNT]
            kept.update(await self._set_idle(self._consumer, page, 0))
        return kept

    async def _set_idle(
        self, consumer: str | bytes, entry_ids: Sequence[bytes], idle_ms: int
    ) -> list[bytes]:
        """Let entries of a consumer be idle for so long; returns them; counts as no delivery."""
        arguments = [self._group, consumer, idle_ms, *entry_ids]
        return list(await self._of_group(self._set_idle_script(keys=[self._key], args=arguments)))

    async def _claim(self, rows: list[Any], idle_ms: int) -> list[Delivery]:
        if not rows:
            return []
        counts = _counts(rows)
        claimed = await self._of_group(
            self._client.xclaim(self._key, self._group, self._consumer, idle_ms, list(counts))
        )
        return [Delivery(i, fields, counts[i]) for i, fields in claimed if fields]

    async def _pages(
        self, consumer: str | bytes | None, count: int, idle_ms: int = 0
    ) -> AsyncGenerator[list[Any], None]:
        """What a consumer has, or all have, in order, `count` entries at a time."""
        after = "-"
        while rows := await self._pending(idle_ms, consumer, count, after):
            after = "(" + rows[-1]["message_id"].decode()
            yield rows

    async def _pending(
        self, idle_ms: int, consumer: str | bytes | None, count: int, first: str = "-"
    ) -> list[Any]:
        command = self._client.xpending_range(
            self._key, self._group, first, "+", count, consumername=consumer, idle=idle_ms or None
        )
        return list(await self._of_group(command))

    async def _consumers(self) -> list[Any]:
        return list(await self._of_group(self._client.xinfo_consumers(self._key, self._group)))

    async def _of_group(self, command: Awaitable[Any]) -> Any:
        """The answer; an empty one where the server came back without its data.

        Then the group is created again, and gets every entry that is left.
        """
        try:
            return await command
        except exceptions.ResponseError as error:
            if not any(missing in str(error) for missing in ("NOGROUP", "no such key")):
                raise
            await self.create("0")
            return []


def _counts(rows: Iterable[Any]) -> dict[bytes, int]:
    """How often pending entries were delivered, by their IDs."""
    return {row["message_id"]: int(row["times_delivered"]) for row in rows}


def _entries(answer: Any) -> list[Any]:
    """The entries of an answer in RESP3: a mapping of lists of lists."""
    if not answer:
        return []
    return [entry for batch in next(iter(answer.values())) for entry in batch]
