"""A broker does without an ingest shard that was removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import Root, open_root
from libs.storage.objects.removed_shards import RemovedShards
from services.broker.delivery.message_cache import GONE, Ingests
from slatemq.errors import NotFound, Unavailable
from slatemq.v1.assignment_pb2 import GetRoutingStateRequest
from slatemq.v1.ingest_pb2 import ReplaceMessageRequest
from tests.integration.broker.rig import Rig, running

MESSAGE = (1 << 48) + 5


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root(tmp_path.as_uri())


async def logs_of(rig: Rig) -> list[int]:
    state = await rig.assignments.GetRoutingState(GetRoutingStateRequest())
    return [cursor.ingest_shard for cursor in state.cursors]


async def test_its_messages_are_gone_and_nothing_waits_for_it(root: Root) -> None:
    directory = TopologyDirectory(root.objects)
    peer = Peer("ingest", 1, "127.0.0.1:1")
    await directory.announce(peer)
    channels = Channels(directory)
    try:
        ingests = Ingests(channels)
        # Given an entry that is gone: by mistake, perhaps
        await directory.remove(peer.path)
        await directory.read()
        with pytest.raises(Unavailable):
            await ingests.fetch(1, [MESSAGE], 100)
        with pytest.raises(Unavailable):
            await ingests.check(1)

        # When the shard was removed
        await RemovedShards(root.objects).add("ingest/1", now_ms=0)

        assert (await ingests.fetch(1, [MESSAGE], 100)).gone == {MESSAGE: GONE}
        assert (await ingests.read(1, [MESSAGE])).missing_ids == [MESSAGE]
        await ingests.check(1)
        await ingests.raise_purge_epoch(1)
        with pytest.raises(NotFound):
            await ingests.replace(ReplaceMessageRequest(message_id=MESSAGE))
    finally:
        await channels.close()
        await directory.close()


async def test_its_log_is_forgotten_durably_and_those_of_others_stay(root: Root) -> None:
    async with running(root) as rig:
        await rig.create()
        await rig.assign([1])
        assert await logs_of(rig) == [0]
        await rig.broker.removed_ingests.look()
        assert await logs_of(rig) == [0]  # Its entry is missing, and nothing says that it is gone.

        await RemovedShards(root.objects).add("ingest/0", now_ms=0)
        await rig.broker.removed_ingests.look()
        await rig.owner.durable()
        assert await logs_of(rig) == []

    async with running(root) as rig:
        assert await logs_of(rig) == []
        assert len(await rig.claim()) == 1
