"""Queues that have moved: for a while two shards have them, and one of the two counts.

The shard that a queue leaves has it, out of service, until it has arrived on the other one and all
ingests know of that: for long, where an ingest is down. It may have moved on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from libs.storage.database.roots import Root
from libs.storage.database.snapshots import SnapshotReader
from libs.storage.layout.keys import config_key
from libs.storage.layout.own_keys import move_key, move_range, parse_move_key
from libs.storage.records.configs import decode_config, partition_in
from libs.storage.records.move_records import MoveRecord, decode_move
from services.janitor.snapshots import SnapshotName, opened


async def moved_queues(
    root: Root, name: SnapshotName, reader: SnapshotReader, names: Iterable[SnapshotName]
) -> frozenset[str]:
    """The queues of a snapshot that leave its shard, and have arrived by another of `names`."""
    leaving = {
        parse_move_key(key): move
        async for rows in reader.scan(*move_range())
        for key, value in rows
        if (move := decode_move(value)).is_departure
    }
    arrived: set[str] = set()
    if leaving:
        for other in names:
            if other.service == "broker" and other != name:
                async with opened(root, other) as there:
                    arrived |= await _arrived(reader, there, leaving)
    return frozenset(arrived)


async def _arrived(
    here: SnapshotReader, there: SnapshotReader, leaving: Mapping[str, MoveRecord]
) -> set[str]:
    found: set[str] = set()
    for queue, move in leaving.items():
        configs = [await one.get(config_key(queue)) for one in (here, there)]
        indexes = [partition_in(decode_config(one)).index for one in configs if one is not None]
        if len(indexes) == 2 and indexes[0] == indexes[1]:
            again = await there.get(move_key(queue))
            # Where it has come later, it is by a later claim of its name.
            if again is None or decode_move(again).number > move.number:
                found.add(queue)
    return found
