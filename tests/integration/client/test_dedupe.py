"""Publishing with dedupe keys: each on the shard of its key, never two shards in one request."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

import slatemq
from slatemq import BatchSettings, OutgoingMessage
from slatemq._publish import sending
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import InvalidArgument, Unavailable
from tests.integration.client.peers import RECEIVED_AT_MS, Ingest, Instance

KEYS = [f"key {n}" for n in range(40)]
DOWN = Unavailable("the connection broke", retry_after_ms=1)


@pytest.fixture
async def instance() -> AsyncIterator[Instance]:
    """An instance of two ingest shards, each of which refuses the other one's keys."""
    async with Instance() as running:
        running.ingest.shards = [0, 1]
        await running.serve(ingest=Ingest(shard=1, shards=[0, 1]))
        yield running


@pytest.fixture
async def client(instance: Instance) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(instance.endpoint, batches=BatchSettings(linger_s=0.02)) as made:
        yield made


def keyed(keys: list[str]) -> list[OutgoingMessage]:
    return [OutgoingMessage(key.encode(), dedupe_key=key) for key in keys]


def shards_of(message_ids: list[slatemq.Published]) -> list[int]:
    return [message_id >> 48 for message_id in message_ids]


async def test_each_key_goes_to_its_shard_and_is_stored_once(
    instance: Instance, client: slatemq.Client
) -> None:
    # Given answers that get lost after storing
    instance.ingest.after.extend([DOWN] * 3)

    # When every key is published twice, all at once, among messages without keys
    work = [client.publish(key, dedupe_key=key) for key in KEYS * 2]
    results = await asyncio.gather(*work, *(client.publish(b"plain") for _ in range(20)))

    # Then both have the same ID, on the shard of the key, and one of them is marked as a duplicate
    first, second = results[:40], results[40:80]
    assert first == second
    assert shards_of(first) == [dedupe_shard(key, [0, 1]) for key in KEYS]
    assert all(a.duplicate != b.duplicate for a, b in zip(first, second, strict=True))
    assert not any(one.duplicate for one in results[80:])


async def test_many_keep_their_order_in_the_result(client: slatemq.Client) -> None:
    messages = keyed(KEYS)
    messages[5:5] = [OutgoingMessage(b"plain")] * 3

    publish_many = await client.publish_many(messages, in_flight=2)

    assert len({int(one) for one in publish_many}) == 43
    del publish_many[5:8]
    assert shards_of(publish_many) == [dedupe_shard(key, [0, 1]) for key in KEYS]


async def test_a_message_of_many_that_is_refused_is_named_by_its_place(
    client: slatemq.Client,
) -> None:
    messages = keyed(KEYS)
    messages[30] = OutgoingMessage(b"bad", dedupe_key=KEYS[30])
    with pytest.raises(InvalidArgument) as refused:
        await client.publish_many(messages)
    assert refused.value.field == "messages[30].payload"
    assert 0 <= int(refused.value.metadata["published_count"]) <= 30


async def test_a_batch_of_two_shards_is_refused_before_it_is_sent(
    instance: Instance, client: slatemq.Client
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.publish_batch(keyed(KEYS))
    assert refused.value.reason == "MIXED_SHARDS"
    assert instance.ingest.calls == []

    mine = [key for key in KEYS if dedupe_shard(key, [0, 1]) == 1]
    publish_batch = await client.publish_batch([*keyed(mine), OutgoingMessage(b"plain")])
    assert shards_of(publish_batch) == [1] * (len(mine) + 1)


@pytest.mark.parametrize("how", ["singly", "many", "batch"])
async def test_keys_follow_when_a_shard_is_added(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MOVED_S", 60.0)
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        # Given a client that knows of one shard only
        await client.publish(b"before", dedupe_key="before")

        # When another one is added
        instance.ingest.shards = [0, 1]
        await instance.serve(ingest=Ingest(shard=1, shards=[0, 1]))
        keys = KEYS
        if how == "batch":
            keys = [key for key in KEYS if dedupe_shard(key, [0, 1]) == 1]
        results = await published(client, how, keys)

        # Then nothing is refused
        assert shards_of(results) == [dedupe_shard(key, [0, 1]) for key in keys]


@pytest.mark.parametrize("how", ["singly", "many", "batch"])
async def test_a_shard_whose_drain_was_cancelled_stores_keys_that_it_has_refused(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "MOVED_S", 60.0)
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        refusal = InvalidArgument("runs[0].dedupe_keys[0]", "no", reason="WRONG_SHARD")
        # The first try may go on a stream.
        instance.ingest.before.extend([refusal] * 2)

        results = await published(client, how, ["key"])

        assert shards_of(results) == [0]
        assert instance.ingest.stored == [b"key"]


@dataclass
class Drained(Ingest):
    """Refuses all keys, and goes from the directory with its third refusal."""

    instance: Instance | None = None

    async def _publish(self, request: Any) -> Any:
        assert self.instance is not None
        self.calls.append((0, request.request_id, 1))
        if len(self.calls) == 3:
            ingests = self.instance.directory.response.ingests
            ingests.remove(next(one for one in ingests if one.shard == self.shard))
            self.instance.ingest.shards = [0]
        raise InvalidArgument("runs[0].dedupe_keys[0]", "no", reason="WRONG_SHARD")


async def test_a_batch_with_and_without_keys_waits_for_the_topology(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "MOVED_S", 60.0)
    keys = [key for key in KEYS if dedupe_shard(key, [0, 1]) == 1]
    async with Instance() as instance:
        drained = Drained(shard=1, instance=instance)
        await instance.serve(ingest=drained)
        async with slatemq.connect(instance.endpoint) as client:
            results = await client.publish_batch([*keyed(keys), OutgoingMessage(b"plain")])

    assert shards_of(results) == [0] * (len(keys) + 1)
    assert len(drained.calls) == 3


async def published(client: slatemq.Client, how: str, keys: list[str]) -> list[slatemq.Published]:
    if how == "singly":
        return await asyncio.gather(*(client.publish(key, dedupe_key=key) for key in keys))
    publish = client.publish_many if how == "many" else client.publish_batch
    return await publish(keyed(keys))


async def test_a_refused_message_takes_no_others_of_its_shard_along(
    client: slatemq.Client,
) -> None:
    work = [client.publish(key, dedupe_key=key) for key in KEYS]
    bad = client.publish(b"bad", dedupe_key=KEYS[0])
    results = await asyncio.gather(*work, bad, return_exceptions=True)

    assert isinstance(results[-1], InvalidArgument)
    assert results[-1].field == "message.payload"
    assert all(isinstance(one, slatemq.Published) for one in results[:-1])


async def test_what_is_published_has_a_handle(client: slatemq.Client) -> None:
    publish = await client.publish(b"x", dedupe_key="k")
    again = await client.publish(b"x", dedupe_key="k")

    assert publish.received_at_ms == RECEIVED_AT_MS
    assert publish.handle("q") == f"q/{publish.message_id:x}/p{RECEIVED_AT_MS}"
    # No one knows when the first one came: the broker has to search
    assert again == publish
    assert again.handle("q") == f"q/{publish:x}"


async def test_what_is_no_text_is_no_key(client: slatemq.Client) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.publish(b"x", dedupe_key=7)  # type: ignore[arg-type]
    assert refused.value.field == "dedupe_key"
