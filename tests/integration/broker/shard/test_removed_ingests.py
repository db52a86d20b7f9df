"""A broker does without an ingest shard that was removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import Root, open_root
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.records.replay_records import ReplayRange
from services.broker.core.lists.replays import Ranges, Replays
from services.broker.core.settings import QueueSettings
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


async def test_replays_of_many_queues_forget_its_log_in_one_go(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues_count = 200
    of_both = (ReplayRange(0, 0, 0, 10), ReplayRange(1, MESSAGE - 5, MESSAGE - 5, MESSAGE))
    async with running(root) as rig:
        # Given queues that replay its log alone, and others that replay another one too
        replays = rig.owner.shard.replays
        for number in range(queues_count):
            ranges = of_both[number % 2 :]
            rig.owner.shard.create_queue(f"q{number}", QueueSettings("true"), ranges)
        await RemovedShards(root.objects).add("ingest/1", now_ms=0)
        replaced: list[Mapping[str, Ranges]] = []

        def noting(changed: Replays, name: str, value: Mapping[str, Ranges]) -> None:
            object.__setattr__(changed, name, value)
            if name == "by_queue":
                replaced.append(value)

        monkeypatch.setattr(Replays, "__setattr__", noting)

        # When it is removed
        await rig.broker.removed_ingests.look()

        # Then the mapping, which readers keep, was copied once for each kind of change
        assert len(replaced) <= 2
        await rig.owner.durable()
        assert replays.by_queue == {
            f"q{number}": of_both[:1] for number in range(0, queues_count, 2)
        }

    monkeypatch.undo()
    async with running(root) as rig:
        assert rig.owner.shard.replays.logs == {0}
        assert len(rig.owner.shard.replays.by_queue) == queues_count // 2
