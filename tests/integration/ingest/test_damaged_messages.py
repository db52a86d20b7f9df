"""Stored messages whose bytes are damaged: ingest names them, the broker fails them and goes on."""

from pathlib import Path
from typing import Any

import pytest

import slatemq
from examples.events.replicate import Replicator
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.layout.keys import log_key, payload_key
from libs.storage.records.payloads import encode_uri
from services.broker.delivery.message_cache import DAMAGED, FETCH_BYTES, GONE, Ingests
from services.ingest.config import IngestConfig
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import DataLoss
from slatemq.events import encode_event, make_event
from slatemq.events.catalogue import MessagePublished
from slatemq.v1.ingest_pb2 import GetMessageMetadataRequest, ReplaceMessageRequest
from tests.integration.broker.entry_calls import FAILED, listed
from tests.integration.broker.rig import Ingest as StandIn
from tests.integration.broker.rig import running
from tests.integration.ingest.server import Server, message, serving


async def damage(url: str, records: dict[bytes, bytes]) -> None:
    database = await open_root(url).database("ingest/0", Kind.INGEST)
    batch = Batch()
    for key, value in records.items():
        batch.put(key, value)
    await database.commit(batch)
    await database.close()


@pytest.mark.parametrize("with_etags", [False, True])
async def test_ingest_names_the_damaged_ones_and_gives_the_others(
    tmp_path: Path, with_etags: bool
) -> None:
    root = (tmp_path / "data").as_uri()
    # Given payloads, an entry, and a payload's place that are not what they should be
    async with serving(root) as ingest:
        # Too large to be stored with others
        first = await ingest.send(*[b"%d" % n * 5000 for n in range(8)])
        second = await ingest.send(b"a", b"b")
        third = await ingest.send(b"c", b"d")
    await damage(
        root,
        {
            payload_key(first[1]): b"damaged",
            payload_key(first[2]): encode_uri("file:///etc/passwd"),
            payload_key(first[7]): b"",
            log_key(second[0]): b"\x02\x00damaged",
        },
    )
    bad, never = [first[1], first[2], first[7], *second], third[-1] + 1
    ids = [*first, *second, *third, never]
    async with serving(root) as ingest:
        # IDs go on in a new block, so that this one was passed over
        assert min(await ingest.send(b"e")) > never
        response = await ingest.read(*ids, with_etags=with_etags)
        assert response.damaged_ids == bad
        assert response.missing_ids == [*bad, never]
        good = [one for one in [*first, *third] if one not in bad]
        assert [one.message_id for one in response.messages] == good
        # And what brokers use tells the one from the other
        directory = TopologyDirectory(open_root(root).objects)
        channels = Channels(directory)
        held, _, gone, _ = await Ingests(channels).fetch(0, ids, FETCH_BYTES)
        assert sorted(held) == good
        assert gone == {**dict.fromkeys(bad, DAMAGED), never: GONE}
        await channels.close()
        assert await ingest.publish(message(b"goes on"))


async def test_a_message_whose_log_entry_is_damaged_is_not_called_missing(tmp_path: Path) -> None:
    root = (tmp_path / "data").as_uri()
    async with serving(root) as ingest:
        (one,) = await ingest.send(b"a")
        await ingest.send(b"b")  # the last entry is read at the start
    await damage(root, {log_key(one): b"\x02\x00damaged"})

    async with serving(root) as ingest:
        with pytest.raises(DataLoss), raising_slatemq_errors():
            await ingest.stub.GetMessageMetadata(GetMessageMetadataRequest(message_id=one))
        with pytest.raises(DataLoss), raising_slatemq_errors():
            await ingest.stub.ReplaceMessage(ReplaceMessageRequest(message_id=one, payload=b"b"))
        # And a broker that asks does not call the ingest down
        channels = Channels(TopologyDirectory(open_root(root).objects))
        with pytest.raises(DataLoss):
            await Ingests(channels).metadata(one)
        await channels.close()


async def test_the_client_names_the_damaged_ones_and_reads_the_others_without_them(
    tmp_path: Path,
) -> None:
    root = (tmp_path / "data").as_uri()
    async with serving(root) as ingest:
        ids = await ingest.send(*[b"%d" % n * 5000 for n in range(4)])
    await damage(root, {payload_key(ids[1]): b"damaged", payload_key(ids[3]): b""})
    server = Server(IngestConfig(root=root), Telemetry())
    await server.start()
    try:
        async with slatemq.connect(server.address) as client:
            with pytest.raises(DataLoss, match=f"message {ids[1]} and 1 more") as caught:
                await client.read_messages(ids)
            assert caught.value.metadata == {"message_ids": f"{ids[1]},{ids[3]}"}
            assert list(await client.read_messages([ids[0], ids[2]])) == [ids[0], ids[2]]
    finally:
        await server.stop()


class Delivery:
    """Of an event that a message was published."""

    def __init__(self, message_id: int) -> None:
        published = MessagePublished(message_id=message_id, headers={}, size=5000)
        event = make_event(published, source="ingest-0", request_id="", at_ms=1_771_761_600_000)
        self.payload = encode_event(event)
        self.error = ""

    async def fail(self, error: str) -> None:
        self.error = error


async def test_a_replication_copies_the_others_and_fails_the_events_of_damaged_ones(
    tmp_path: Path,
) -> None:
    root = (tmp_path / "data").as_uri()
    async with serving(root) as ingest:
        ids = await ingest.send(*[b"%d" % n * 5000 for n in range(4)])
    await damage(root, {payload_key(ids[1]): b"damaged"})
    source, target = (Server(IngestConfig(root=one), Telemetry()) for one in (root, "memory:///"))
    await source.start()
    await target.start()
    try:
        async with slatemq.connect(source.address) as one, slatemq.connect(target.address) as other:
            deliveries: list[Any] = [Delivery(message_id) for message_id in ids]
            await Replicator(one, other, "here").copy(deliveries)
            after = await other.publish(b"after")
            copies = await other.read_messages(range(after - 3, after))
    finally:
        await target.stop()
        await source.stop()

    assert [copy.payload[:1] for copy in copies.values()] == [b"0", b"2", b"3"]
    assert ["damaged" in one.error for one in deliveries] == [False, True, False, False]


async def test_a_damaged_message_at_the_head_of_a_queue_fails_with_that_reason() -> None:
    ingest = StandIn()
    ingest.damaged, ingest.gone = {1, 4}, {2}
    async with running(ingest=ingest) as rig:
        await rig.create()
        await rig.assign([1, 2, 3, 4, 5])

        claimed = [*await rig.claim(max_messages=5), *await rig.claim(max_messages=5)]

        assert [one.message.message_id for one in claimed] == [3, 5]
        assert await rig.counts() == {"in_flight": 2, "failed": 3}
        assert {one.message_id: one.reason for one in await listed(rig, FAILED)} == {
            1: "payload damaged",
            2: "payload gone",
            4: "payload damaged",
        }
