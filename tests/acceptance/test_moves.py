"""Moving a queue between broker shards while messages flow through it and services are killed."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

import slatemq
from slatemq.errors import FailedPrecondition, NotFound, Unavailable
from tests.forms import proof
from tests.integration.janitor.instances import WAIT_S, Instance, instance

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]

BROKERS = 3
MOVES = 10
BATCH = 20
KEYS = 10
LEASE_S = 3


class Workload:
    """A queue that gets messages until its moves are over, and is worked through meanwhile."""

    def __init__(self, made: Instance, luck: random.Random, queue: slatemq.Queue) -> None:
        self.published: dict[int, str] = {}  # the keys of the messages, by their IDs
        self.attempts: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.is_moved = asyncio.Event()
        self.is_over = asyncio.Event()
        self._made = made
        self._at = dict(enumerate(queue.broker_shards))
        self._is_partitioned = queue.partitions_count > 0
        self._luck = luck

    async def publish(self) -> None:
        while not self.is_moved.is_set():
            keys = [str(self._luck.randrange(KEYS)) for _ in range(BATCH)]
            messages = [slatemq.OutgoingMessage(b"x", {"queue": "q", "key": key}) for key in keys]
            ids = map(int, await self._made.client.publish_many(messages))
            self.published |= dict(zip(ids, keys, strict=True))
            await asyncio.sleep(0.05)

    async def consume(self) -> None:
        while not self.is_over.is_set():
            try:
                messages = await self._made.client.claim("q", 2 * BATCH, wait=1, lease=LEASE_S)
            except Unavailable:
                continue
            for message in messages:
                lease = (message.lease_deadline_ms, message.attempts_count)
                self.attempts[message.message_id].append(lease)
            # Some fail, and some are acked too late: their queue has moved.
            failed = [one for one in messages if self._luck.random() < 0.05]
            for one in failed:
                with suppress(FailedPrecondition, NotFound):
                    await one.nack(delay=0)
            acked = [one.lease_token for one in messages if one not in failed]
            await self._made.client.ack(acked)

    async def move(self) -> None:
        at = self._at
        for _ in range(MOVES):
            index = self._luck.choice(list(at))
            target = self._luck.choice([one for one in range(BROKERS) if one not in at.values()])
            while at[index] != target:
                try:
                    at[index] = await self._made.client.move_queue(
                        "q", target, partition=index if self._is_partitioned else None
                    )
                except Unavailable:
                    continue
                except FailedPrecondition as error:
                    if error.reason != "MOVE_CANCELLED":
                        raise
            await asyncio.sleep(self._luck.uniform(0, 0.5))
        self.is_moved.set()

    async def kill(self, kills_count: int) -> None:
        services = [self._made.ingest, self._made.router, *self._made.brokers * 2]
        for _ in range(kills_count):
            await asyncio.sleep(self._luck.uniform(0.1, 1.0))
            victim = self._luck.choice(services)
            await victim.kill()
            await asyncio.sleep(self._luck.uniform(0, 0.5))
            await victim.start()


@pytest.mark.parametrize(("partitions", "header"), [proof(None, ""), proof(2, ""), (2, "key")])
@pytest.mark.parametrize("kills_count", [8, proof(40)])
async def test_a_queue_moved_ten_times_under_load_and_kills_has_each_message_once(
    tmp_path: Path, kills_count: int, partitions: int | None, header: str
) -> None:
    luck = random.Random()
    seed = luck.randrange(2**32)
    luck.seed(seed)
    async with instance(tmp_path, BROKERS, (), WAIT_S) as made:
        queue = await made.client.create_queue(
            "q",
            shard=None if partitions else 0,
            partitions=partitions,
            ordering_header=header,
            max_attempts=1_000,
        )
        run = Workload(made, luck, queue)
        consuming = [asyncio.create_task(run.consume()) for _ in range(2)]
        async with asyncio.timeout(500):
            await asyncio.gather(run.publish(), run.move(), run.kill(kills_count))
            await made.routed()
            while (await made.client.get_queue("q")).counts.done_count < len(run.published):
                for task in consuming:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.2)
            run.is_over.set()
            await asyncio.gather(*consuming)

        entries = [entry async for entry in made.client.list_entries("q", "done")]
        assert sorted(entry.message_id for entry in entries) == sorted(run.published), seed
        if header:
            # Each key has one partition, wherever that was
            places = {(run.published[one.message_id], _partition(one.handle)) for one in entries}
            assert len(places) == KEYS, seed
        counts = (await made.client.get_queue("q")).counts
        assert (counts.available_count, counts.in_flight_count, counts.failed_count) == (0, 0, 0)
        assert run.attempts.keys() >= run.published.keys(), seed
        for message_id, leases in run.attempts.items():
            # An answer may wait for a payload while what it has leased moves, and is leased again.
            attempts = [attempt for _, attempt in sorted(leases)]
            assert attempts == sorted(attempts), (seed, message_id)
        assert [one.queue_id async for one in made.client.list_queues()] == ["q"]


def _partition(handle: str) -> str:
    """Which partition an entry is in."""
    return handle.rsplit("/", 1)[1].partition(":")[0]
