"""Where logs and brokers stand, by their snapshots.

How far each broker is in each log, what replays, and up to where the logs were in the snapshots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from libs.storage.database.roots import Root
from libs.storage.errors import CorruptRecord
from libs.storage.layout.ids import MAX_SEQUENCE, message_id
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.layout.own_keys import (
    LOG_BOUNDS_KEY,
    parse_routing_cursor_key,
    replay_range,
    routing_cursor_range,
)
from libs.storage.records.log_bounds import decode_log_bounds
from libs.storage.records.metadata import last_message_id
from libs.storage.records.replay_records import decode_replay
from libs.storage.records.states import decode_routing_cursor
from services.janitor.jobs.removable import judged_positions
from services.janitor.snapshots import SnapshotName, opened


async def read_judged(root: Root, names: Sequence[SnapshotName]) -> dict[int, int]:
    """By ingest shard, up to where all brokers have judged its log; reads a few rows of each.

    `names` are the snapshots of all shards.
    """
    ingests = [name.shard for name in names if name.service == "ingest"]
    brokers = [name for name in names if name.service == "broker"]
    stands = await asyncio.gather(*(_read(root, name) for name in brokers))
    replays = [replay for _, some in stands for replay in some]
    return judged_positions(ingests, [cursors for cursors, _ in stands], replays)


async def read_last_ids(root: Root, names: Sequence[SnapshotName]) -> dict[int, int]:
    """By ingest shard, the last message that its snapshot can have."""
    ingests = [name for name in names if name.service == "ingest"]
    last_ids = await asyncio.gather(*(_last_id(root, name) for name in ingests))
    return {name.shard: last_id for name, last_id in zip(ingests, last_ids, strict=True)}


async def _last_id(root: Root, name: SnapshotName) -> int:
    async with opened(root, name) as reader:
        result = await reader.get(LOG_BOUNDS_KEY)
        last_id = 0 if result is None else decode_log_bounds(result).last_message_id
        span = log_range(message_id(name.shard, 1), message_id(name.shard, MAX_SEQUENCE))
        async for rows in reader.scan(*span, limit=1, descending=True):
            key, value = rows[0]
            try:
                last_id = max(last_id, last_message_id(value))
            except CorruptRecord:
                last_id = max(last_id, parse_log_key(key))
        return last_id


async def _read(
    root: Root, name: SnapshotName
) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
    async with opened(root, name) as reader:
        cursors = {
            parse_routing_cursor_key(key): decode_routing_cursor(value)
            async for rows in reader.scan(*routing_cursor_range())
            for key, value in rows
        }
        replays = [
            (one.ingest_shard, one.cursor, one.end)
            async for rows in reader.scan(*replay_range())
            for _, value in rows
            for one in decode_replay(value)
        ]
        return cursors, replays
