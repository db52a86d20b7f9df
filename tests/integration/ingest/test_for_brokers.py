"""BatchGetMessages: the same messages whatever is asked for, and what a broker makes of them."""

from pathlib import Path

import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from services.broker.delivery.message_cache import FETCH_BYTES, GONE, CachedMessage, Ingests
from slatemq.v1 import ingest_pb2
from slatemq.v1.message_pb2 import Message
from tests.integration.ingest.server import Ingest, message, serving
from tests.stored_messages import StoredMessages


async def never_given_out(root: str) -> int:
    """An ID that a process has skipped: its successor goes on in a new block."""
    async with serving(root) as ingest:
        (message_id,) = await ingest.send(b"before")
    return message_id + 1


async def published(ingest: Ingest) -> list[int]:
    """Messages of which some neighbours are alike, and some are not."""
    ids = await ingest.send(*(b"%d" % n for n in range(30)), kind="a")
    ids += await ingest.send(b"", b"x" * 70_000, b"y", kind="b", more="ü")
    ids += await ingest.publish(
        *(ingest_pb2.PublishRun(payloads=[b"%d" % n], created_at_ms=n // 2) for n in range(7))
    )
    return ids + await ingest.publish(message(b"last"))


def messages_in(held: dict[int, CachedMessage]) -> list[Message]:
    messages = []
    for message_id, (payload, common) in held.items():
        messages.append(Message.FromString(common))
        messages[-1].message_id, messages[-1].payload = message_id, payload
    return messages


@pytest.mark.parametrize("fresh", [True, False])
async def test_fresh_and_stored_messages_are_the_same(tmp_path: Path, fresh: bool) -> None:
    root = (tmp_path / "data").as_uri()
    never = await never_given_out(root)
    async with serving(root) as ingest:
        ids = await published(ingest)
        expected = await ingest.read(*ids, with_etags=True)
        if fresh:
            await check_reads(ingest, ids, never, expected)
    if not fresh:
        async with serving(root) as ingest:
            await check_reads(ingest, ids, never, expected)


async def check_reads(ingest: Ingest, ids: list[int], never: int, expected: StoredMessages) -> None:
    by_id = {one.message_id: one for one in expected.messages}
    etags = dict(zip(by_id, expected.etags, strict=True))
    for bound in (0, 20, 80_000):
        for some in (ids, ids[::-1], ids[::3], [ids[0], never, *ids[5:9]]):
            plain = await ingest.read(*some, max_bytes=bound)
            tagged = await ingest.read(*some, max_bytes=bound, with_etags=True)
            assert plain.messages == tagged.messages
            assert not plain.etags
            read = [one.message_id for one in plain.messages]
            assert tagged.etags == [etags[one] for one in read]
            assert plain.messages == [by_id[one] for one in read]
            assert read == [one for one in some if one in by_id][: len(read)]
            assert plain.missing_ids == tagged.missing_ids
            assert plain.missing_ids == [never] * (never in some and len(read) > 1)
    request = ingest_pb2.BatchGetMessagesRequest(message_ids=ids)
    assert len((await ingest.stub.BatchGetMessages(request)).runs) == 7


async def test_a_broker_keeps_the_messages_that_an_ingest_returns(tmp_path: Path) -> None:
    root = (tmp_path / "data").as_uri()
    never = await never_given_out(root)
    async with serving(root) as ingest:
        ids = await published(ingest)
        expected = await ingest.read(*ids, with_etags=True)
        channels = Channels(TopologyDirectory(open_root(root).objects))
        client = Ingests(channels)
        held, size_bytes, gone, _ = await client.fetch(0, [*ids, never], FETCH_BYTES)
        objects = await client.read(0, [*ids, never], etags=True)
        plain = await client.read(0, ids[:3])
        await channels.close()

    assert messages_in(held) == expected.messages == objects.messages
    assert size_bytes == sum(len(payload) + len(common) for payload, common in held.values())
    assert gone == {never: GONE}
    assert (objects.etags, objects.missing_ids) == (expected.etags, [never])
    assert (plain.messages, plain.etags) == (expected.messages[:3], [])
