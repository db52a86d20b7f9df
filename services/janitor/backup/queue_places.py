"""Where each queue is, by what the brokers' databases have; and claims of the names that say so.

For databases that stand at different times, as in a copy of an instance, or in one that has lost
the last of its commits: then the claims that are there may be older, or newer.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

from libs.storage.database.slate import Database
from libs.storage.layout.keys import config_range, parse_config_key
from libs.storage.layout.own_keys import move_range, parse_move_key
from libs.storage.objects.queue_names import NameClaim, QueueNames
from libs.storage.records.configs import decode_config, partition_in
from libs.storage.records.move_records import MoveRecord, MoveStage, decode_move

log = logging.getLogger(__name__)


class _Moving(NamedTuple):
    """A side of a move that has all of the queue. Of several, the greatest one keeps it.

    That is one of the newest move: the shard that a queue left by an older one may not know yet
    that it has arrived, and gone on since. Of both sides of a move it is the source.
    """

    number: int
    is_source: bool
    shard: int


@dataclass
class QueuePlaces:
    """Where the queues of an instance are, whose databases have these names."""

    databases: Iterable[str]
    _shards: dict[str, dict[int, list[int]]] = field(default_factory=dict, init=False)
    """Of each queue, by the indexes of its partitions; a shard alone, where all is well."""
    _counts: dict[str, int] = field(default_factory=dict, init=False)
    """How many partitions each queue has, those that were not there, too."""
    _moves: dict[str, int] = field(default_factory=dict, init=False)
    """By queue, the number of the newest move that was under way."""
    _moving: dict[str, dict[int, _Moving]] = field(default_factory=dict, init=False)
    """Of each queue, by the indexes of its partitions, the side of its newest move that has it."""

    @property
    def queues_count(self) -> int:
        return len(self._counts)

    async def find(self, name: str, database: Database) -> None:
        """Read the queues of a database; an ingest has none."""
        service, _, number = name.partition("/")
        if service != "broker":
            return
        shard = int(number)
        departures = await self._find_moves(database, shard)
        async for rows in database.scan(*config_range()):
            for key, value in rows:
                queue_id = parse_config_key(key)
                move = departures.get(queue_id)
                if move is not None and move.stage is MoveStage.ARRIVED:
                    continue  # It is on another shard, or has gone on, or is deleted there.
                index = self._partition(queue_id, value)
                if move is not None:
                    self._note_side(queue_id, index, _Moving(move.number, True, shard))
                    continue
                self._shards.setdefault(queue_id, {}).setdefault(index, []).append(shard)

    async def _find_moves(self, broker: Database, shard: int) -> dict[str, MoveRecord]:
        """Notes the moves that were under way; returns those from the shard, by their queues."""
        departures = {}
        async for rows in broker.scan(*move_range()):
            for key, value in rows:
                queue_id, move = parse_move_key(key), decode_move(value)
                self._moves[queue_id] = max(self._moves.get(queue_id, 0), move.number)
                if move.is_departure:
                    departures[queue_id] = move
                elif move.stage is MoveStage.COPIED:
                    index = self._partition(queue_id, move.config)
                    self._note_side(queue_id, index, _Moving(move.number, False, shard))
        return departures

    def _partition(self, queue_id: str, config: bytes) -> int:
        partition = partition_in(decode_config(config))
        self._counts[queue_id] = max(self._counts.get(queue_id, 1), partition.count)
        return partition.index

    def _note_side(self, queue_id: str, index: int, side: _Moving) -> None:
        sides = self._moving.setdefault(queue_id, {})
        sides[index] = max(sides.get(index, side), side)

    async def claim(self, names: QueueNames) -> AsyncIterator[int]:
        """Claim each queue's name for the shards that have it; yields how many are done."""
        # A queue that has arrived is its new shard's; one that has not stays where it was, or, if
        # that shard had forgotten it, is where all of it was copied to.
        for queue_id, sides in self._moving.items():
            for index, side in sides.items():
                self._shards.setdefault(queue_id, {}).setdefault(index, [side.shard])
        for done, queue_id in enumerate(self._shards, 1):
            after = await names.get(queue_id)
            shards = self._claimed(queue_id, after)
            if queue_id in self._moves or shards != after.broker_shards:
                # By a claim that is newer than that which a move follows, its end is decided.
                number = max(after.number, self._moves.get(queue_id, 0))
                await names.claim(queue_id, shards, after._replace(number=number))
            yield done

    def _claimed(self, queue_id: str, claim: NameClaim) -> tuple[int, ...]:
        """The shards of a claim: it has a place for each partition, also for those not there.

        Their creation or deletion broke off, and goes on where the claim says.
        """
        brokers = sorted(int(one[7:]) for one in self.databases if one.startswith("broker/"))
        by_index = self._shards[queue_id]
        places = {
            index: self._chosen(queue_id, shards, claim.place_of(index).shard)
            for index, shards in by_index.items()
        }
        for index in range(max(self._counts[queue_id], *by_index)):
            if index not in places:
                others = (one for one in chain(brokers, count()) if one not in places.values())
                places[index] = next(others)
        return tuple(places[index] for index in sorted(places))

    def _chosen(self, queue_id: str, shards: list[int], claimed: int | None) -> int:
        """Of the shards that have a queue, the one that was claimed, else the first."""
        chosen = claimed if claimed in shards else shards[0]
        for other in shards:
            if other != chosen:
                # Deleted on one shard and created on the other, and one of them lacks its part.
                log.warning(
                    "the queue %s is on broker %d and on broker %d: delete it on one of them",
                    *(queue_id, other, chosen),
                )
        assert chosen is not None
        return chosen
