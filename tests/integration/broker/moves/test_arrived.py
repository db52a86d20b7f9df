"""What is left of queues that have arrived elsewhere goes, at little cost while an ingest is down.

Each raise of a purge epoch refuses all that a janitor has decided, and each reading of the topology
holds up others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from libs.serving.peers.topology import Peer, Topology, TopologyDirectory
from libs.storage.database.roots import open_root
from slatemq.errors import Unavailable
from tests.integration.broker.moves.movers import begin_move
from tests.integration.broker.rig import Ingest, Rig, running
from tests.integration.waiting import eventually

ROUNDS = 4
"""Each waits for twice as long as the one before: so many take a fraction of a second."""


class OneDown(Ingest):
    """Of whose ingests number 0 is down, where calls hang at first."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0
        self.hangs, self.up = asyncio.Event(), asyncio.Event()

    async def raise_purge_epoch(self, shard: int) -> None:
        if shard == 0 and not self.up.is_set():
            self.tries += 1
            await self.hangs.wait()
            raise Unavailable("ingest 0 is down")
        await super().raise_purge_epoch(shard)


@asynccontextmanager
async def source_and_target(folder: Path, ingest: OneDown) -> AsyncIterator[tuple[Rig, Rig]]:
    directory = TopologyDirectory(open_root(folder.as_uri()).objects)
    for shard in (0, 1):
        await directory.announce(Peer("ingest", shard, "127.0.0.1:1"))
    async with running(folder, shard=1) as target, running(folder, ingest=ingest) as source:
        yield source, target


def counted_reads(rig: Rig) -> list[Topology]:
    """The readings of the topology for queues that have arrived elsewhere."""
    epochs, reads = rig.broker.arrived._epochs, list[Topology]()
    directory = epochs._directory

    class Counted:
        async def read(self, **options: Any) -> Topology:
            topology = await directory.read(**options)
            reads.append(topology)
            return topology

    epochs._directory = Counted()  # type: ignore[assignment]
    return reads


async def test_an_ingest_that_is_up_is_raised_once_for_all_while_another_is_down(
    tmp_path: Path,
) -> None:
    ingest, queue_ids = OneDown(), ("a", "b", "c")
    async with source_and_target(tmp_path, ingest) as (source, target):
        departures, reads = source.owner.shard.moves.departures, counted_reads(source)
        # Given three queues that have arrived, two of them while the first was being dealt with
        for queue_id in queue_ids:
            await source.create(queue_id)
            await begin_move(source, target, queue_id)
            await eventually(lambda one=queue_id: departures[one].has_arrived)  # type: ignore[misc]
            await eventually(lambda: ingest.tries)

        # When it is tried again and again
        ingest.hangs.set()
        await eventually(lambda: ingest.tries >= ROUNDS)

        # Then the other is raised for the first, and once for the rest, and a reading serves all
        assert ingest.raised == [1, 1]
        assert len(reads) <= ingest.tries + 1
        assert set(departures) == set(queue_ids)

        # And once it is up, all are done with
        ingest.up.set()
        await eventually(lambda: not departures)
        assert ingest.raised == [1, 1, 0]
