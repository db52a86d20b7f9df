"""What a copied instance must not continue as it was: numbers that were given out since.

So it is with one that has lost the last of its commits.

The instance that was copied went on, and another one goes on from the copy. What one of them gives
out, the other must not give out again:

    message ID       the copied ingest gave out more, which clients may still name:
                     the IDs of some time are left out
    event ID         by the stream of a shard and a number: each shard begins a stream of its own
    push's number    an ingest's copy is newer than a broker's, and has pushes that the broker's
                     copy has not made, so it would pass over the next ones that it makes: it is
                     set back to those that the broker knows
    lease token, name of an object: 56 and 128 random bits

A push that the ingest's copy has and the broker's has not belongs to commands that were executed
after the broker's snapshot. In the copy their messages are as before them: they are delivered
again, and what they push then is pushed twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from libs.storage.database.slate import Batch, Database
from libs.storage.layout.ids import (
    FIRST_SEQUENCE,
    MAX_SEQUENCE,
    SeqBlock,
    decode_seq_block,
    encode_seq_block,
)
from libs.storage.layout.own_keys import (
    CLOCK_KEY,
    EVENT_COUNTER_KEY,
    ID_BLOCK_KEY,
    outbox_counter_range,
    outbox_progress_key,
    outbox_progress_range,
    parse_outbox_counter_key,
    parse_outbox_progress_key,
)
from libs.storage.records.event_records import decode_event_counter, encode_event_counter
from libs.storage.records.execution_records import decode_outbox_counter
from libs.storage.records.states import decode_outbox_progress, encode_outbox_progress

MESSAGES_A_S: Final = 100_000
"""More messages per second than an ingest accepts for long. This many IDs are left out for each
second since the backup."""

LEFT_OUT_MIN: Final = 1 << 32
"""IDs that are left out at least; there are 2^48."""

PushNumbers = Mapping[tuple[int, int], int]
"""The number of the last push that a broker has made for an ingest, by their shards."""


async def last_pushes(broker: Database, shard: int) -> dict[tuple[int, int], int]:
    """The last number, as it is sent, of the pushes of a broker for each ingest."""
    found = {}
    async for rows in broker.scan(*outbox_counter_range()):
        for key, value in rows:
            counter = decode_outbox_counter(value)
            ingest_shard = parse_outbox_counter_key(key)
            found[shard, ingest_shard] = counter.last_number + counter.offset
    return found


async def renumber_ingest(ingest: Database, shard: int, pushes: PushNumbers, age_s: float) -> None:
    """Renumber an ingest of a backup that is `age_s` old; durable on return."""
    batch = Batch()
    value = await ingest.get(ID_BLOCK_KEY)
    end = FIRST_SEQUENCE if value is None else decode_seq_block(value).end
    left_out = max(LEFT_OUT_MIN, int(age_s * MESSAGES_A_S))
    # Half of what is left, where that is less: each copy finds some.
    left_out = min(left_out, (MAX_SEQUENCE - end) // 2)
    batch.put(ID_BLOCK_KEY, encode_seq_block(SeqBlock(end, max(left_out, 1))))
    async for rows in ingest.scan(*outbox_progress_range()):
        for key, value in rows:
            broker_shard = parse_outbox_progress_key(key)
            # A broker without a counter has made none by its copy, and begins with number 1.
            stored, made = decode_outbox_progress(value), pushes.get((broker_shard, shard), 0)
            if made < stored:
                batch.put(outbox_progress_key(broker_shard), encode_outbox_progress(made))
    await _commit(ingest, batch)


async def renumber_broker(broker: Database) -> None:
    """Renumber a broker; durable on return."""
    await _commit(broker, Batch())


async def _commit(database: Database, batch: Batch) -> None:
    value = await database.get(EVENT_COUNTER_KEY)
    if value is not None:
        counter = decode_event_counter(value)._replace(stream=secrets.randbits(64))
        batch.put(EVENT_COUNTER_KEY, encode_event_counter(counter))
    # Every commit has it: a process whose clock is behind the last one waits.
    value = await database.get(CLOCK_KEY)
    if value is not None:
        batch.put(CLOCK_KEY, value)
    if len(batch):
        await database.commit(batch)


async def renumber(
    databases: Sequence[str],
    opened: Callable[[str], AbstractAsyncContextManager[Database]],
    age_s: float,
    done: Callable[[str, Database], Awaitable[None]],
) -> None:
    """Open each of an instance's databases once, the brokers first, and renumber it.

    What is in them is `age_s` old. `done` is called with each before it is closed.
    """
    pushes: dict[tuple[int, int], int] = {}
    for name in sorted(databases, key=lambda one: not one.startswith("broker/")):
        service, _, shard = name.partition("/")
        async with opened(name) as database:
            if service == "broker":
                pushes |= await last_pushes(database, int(shard))
                await renumber_broker(database)
            else:
                await renumber_ingest(database, int(shard), pushes, age_s)
            await done(name, database)
