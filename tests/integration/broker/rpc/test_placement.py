"""New queues go to broker shards that have little to do, or to the one that is named."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import slatemq
from services.broker.shard import load
from services.broker.shard.load import MESSAGES, SAMPLES, ShardLoad
from slatemq.errors import AlreadyExists, InvalidArgument, NotFound
from slatemq.v1 import queue_pb2
from tests.integration.broker.rig import Rig, running

SHARDS = 4
QUEUES = 100


@pytest.fixture(autouse=True)
def no_processor_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All brokers are in this process, and would share it."""
    monkeypatch.setattr(load, "SAMPLE_S", 1e9)


@asynccontextmanager
async def brokers(folder: Path) -> AsyncIterator[tuple[Sequence[Rig], slatemq.Client]]:
    async with AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(running(folder, shard=shard)) for shard in range(SHARDS)
        ]
        client = await stack.enter_async_context(slatemq.connect(rigs[0].running.address))
        yield rigs, client


async def load_of(rig: Rig) -> float:
    return (await rig.queues.GetShardLoad(queue_pb2.GetShardLoadRequest())).load


def counted(rigs: Sequence[Rig]) -> list[int]:
    return [len(rig.owner.shard.queues) for rig in rigs]


def give_messages(rig: Rig, share: float) -> None:
    """Let the broker take its shard for one with this share of the messages that it takes well."""
    rig.broker.placement.load._messages_count = int(MESSAGES * share)
    rig.broker.placement.load._counted_at = float("inf")


@pytest.mark.parametrize("at_once", [1, 25])
async def test_a_hundred_queues_are_spread_over_four_shards(tmp_path: Path, at_once: int) -> None:
    async with brokers(tmp_path) as (rigs, client):
        for first in range(0, QUEUES, at_once):
            numbers = range(first, first + at_once)
            made = await asyncio.gather(*(client.create_queue(f"q-{n}") for n in numbers))
            assert all(one.queue_id for one in made)

        assert sum(counted(rigs)) == QUEUES
        # By chance alone, a shard would get under ten once in a thousand runs, and over forty too;
        # of two, the less loaded: never.
        assert all(QUEUES // 10 <= count <= 4 * QUEUES // 10 for count in counted(rigs))


async def test_a_loaded_shard_gets_no_queue_while_others_have_less_to_do(tmp_path: Path) -> None:
    async with brokers(tmp_path) as (rigs, client):
        give_messages(rigs[1], share=0.5)

        shards = [(await client.create_queue(f"q-{n}")).broker_shard for n in range(20)]

        assert 1 not in shards
        assert len(set(shards)) > 1


async def test_messages_of_a_shard_count_as_its_load(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.create()
        before = await load_of(rig)
        rig.broker.placement.load._counted_at = float("-inf")

        await rig.assign(range(1, 1001))

        assert await load_of(rig) == pytest.approx(before + 1000 / MESSAGES)


async def test_a_shard_that_is_down_is_passed_over(tmp_path: Path) -> None:
    async with brokers(tmp_path) as (rigs, client):
        rigs[2].signals.first.set()
        async with asyncio.timeout(60):
            while rigs[2].running.gate._closed is None:
                await asyncio.sleep(0.01)

        shards = Counter([(await client.create_queue(f"q-{n}")).broker_shard for n in range(20)])

        assert 2 not in shards
        assert len(shards) == SHARDS - 1


async def test_a_queue_goes_where_it_is_put(tmp_path: Path) -> None:
    async with brokers(tmp_path) as (rigs, client):
        give_messages(rigs[3], share=1)

        assert (await client.create_queue("first", shard=3)).broker_shard == 3
        assert (await client.create_queue("second", with_queue="first")).broker_shard == 3


async def test_a_place_that_does_not_exist_or_contradicts_is_refused(tmp_path: Path) -> None:
    async with brokers(tmp_path) as (_, client):
        with pytest.raises(NotFound, match="broker shard '9' does not exist"):
            await client.create_queue("q", shard=9)
        with pytest.raises(NotFound, match="queue 'absent' does not exist"):
            await client.create_queue("q", with_queue="absent")
        with pytest.raises(InvalidArgument, match="contradicts"):
            await client.create_queue("q", with_queue="first", shard=1)


async def test_a_name_in_use_on_another_shard_is_refused(tmp_path: Path) -> None:
    async with brokers(tmp_path) as (_, client):
        await client.create_queue("q", shard=1)

        with pytest.raises(AlreadyExists) as refused:
            await client.create_queue("q", shard=2)

        assert refused.value.metadata["broker_shard"] == "1"


def test_the_processor_counts_in_whole_tenths_of_the_last_half_minute() -> None:
    # Given a process that uses a quarter of a core
    now_s, used_s = 0.0, 0.0
    load = ShardLoad({}, clock=lambda: now_s, processor=lambda: used_s)
    assert load.load() == 0
    for _ in range(2 * SAMPLES):
        now_s, used_s = now_s + 5, used_s + 1.25
        load.sample()
    assert load.processor_share == 0.25
    assert load.load() == 0.2

    # When it is idle for half a minute
    for _ in range(SAMPLES):
        now_s += 5
        load.sample()

    # Then it is not loaded any more
    assert load.load() == 0
