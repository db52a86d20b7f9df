"""Queues made at any moment, with any start, whoever stops meanwhile: each message once in each."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from services.router.pieces import PieceLimits
from slatemq.v1 import queue_pb2
from tests.forms import seeds
from tests.integration.broker.rig import Rig
from tests.integration.router.replay_rig import World, create, drained, replayed, world

pytestmark = pytest.mark.slow  # Brokers and routers start and stop some dozen times.

STEPS = 120
LETTERS = "abc"


@dataclass
class Made:
    """A queue as it was created: its letter, and the start of its replay of each log."""

    dead_letter: str
    replay: queue_pb2.Replay
    published: int
    """How many entries there were before it was created."""


@dataclass
class History:
    """What was done, drawn from a seed."""

    there: World
    chance: random.Random
    entries: list[tuple[int, list[int]]] = field(default_factory=list)
    """Every entry published: when, by the clock of the logs, and its messages."""
    dead_letters: dict[int, str] = field(default_factory=dict)
    queues: dict[str, Made] = field(default_factory=dict)
    now_ms: int = 1_000

    async def publish(self) -> None:
        self.now_ms += self.chance.randrange(3)
        batch = [self.chance.choice(LETTERS) for _ in range(self.chance.randint(1, 4))]
        log = self.chance.choice(self.there.logs)
        ids = await log.publish([{"k": k} for k in batch], received_at_ms=self.now_ms)
        self.entries.append((self.now_ms, ids))
        self.dead_letters.update(zip(ids, batch, strict=True))

    async def create(self, rig: Rig) -> None:
        queue_id, dead_letter = f"q{len(self.queues)}", self.chance.choice(LETTERS)
        since_ms = self.chance.choice([None, 0, self.chance.randrange(900, self.now_ms + 3)])
        published = len(self.entries)
        made = await create(
            rig, queue_id, since_ms=since_ms, source=f'headers["k"] == "{dead_letter}"'
        )
        self.queues[queue_id] = Made(dead_letter, made.replay, published)
        for item in made.replay.ranges:
            behind = self._entries_after(item.ingest_shard, item.start_sequence)
            since = [at_ms for at_ms, _ in behind]
            assert not since or min(since) >= (since_ms or 0)

    def expected(self, made: Made) -> tuple[set[int], set[int]]:
        """What a queue must have got, and what it may have: the rest was routed after it came."""
        later = [ids for _, ids in self.entries[made.published :]]
        must = {i for ids in later for i in ids}
        for item in made.replay.ranges:
            must |= {
                i
                for _, ids in self._entries_after(item.ingest_shard, item.start_sequence)
                for i in ids
            }
        may = {i for _, ids in self.entries for i in ids}
        return (
            {i for i in must if self.dead_letters[i] == made.dead_letter},
            {i for i in may if self.dead_letters[i] == made.dead_letter},
        )

    def _entries_after(self, log: int, sequence: int) -> list[tuple[int, list[int]]]:
        return [
            (at_ms, ids) for at_ms, ids in self.entries if ids[0] >> 48 == log and ids[0] > sequence
        ]


@pytest.mark.parametrize("seed", seeds(6))
async def test_every_queue_gets_what_one_that_was_there_from_the_start_got(seed: int) -> None:
    chance = random.Random(seed)
    async with world(2) as there:
        history = History(there, chance)
        broker, routers = AsyncExitStack(), [AsyncExitStack() for _ in range(2)]
        rig = await broker.enter_async_context(there.broker())
        for dead_letter in LETTERS:
            await rig.create(f"always-{dead_letter}", filter=f'headers["k"] == "{dead_letter}"')
        limits = PieceLimits(messages_max=chance.randint(1, 9), step_max=2, hold_ms=5)

        for _ in range(STEPS):
            match chance.randrange(24):
                case 0:
                    await broker.aclose()
                    rig = await broker.enter_async_context(there.broker())
                case 1 | 2:
                    stack = chance.choice(routers)
                    await stack.aclose()
                    if chance.random() < 0.7:
                        await stack.enter_async_context(there.router(limits))
                case 3 | 4:
                    await history.create(rig)
                case 5 | 6 | 7:
                    await asyncio.sleep(chance.random() / 100)
                case _:
                    await history.publish()
        async with there.router(limits):
            await there.routed(rig)
            for queue_id in history.queues:
                await replayed(rig, queue_id)
        for stack in routers:
            await stack.aclose()

        always = {
            dead_letter: Counter(await drained(rig, f"always-{dead_letter}"))
            for dead_letter in LETTERS
        }
        assert sum(always.values(), Counter[int]()) == Counter(history.dead_letters.keys())
        assert len(history.queues) > 3
        for queue_id, made in history.queues.items():
            got = Counter(await drained(rig, queue_id))
            must, may = history.expected(made)
            assert set(got.values()) <= {1}, queue_id
            assert must <= set(got) <= may, queue_id
            starts = [item.start_sequence for item in made.replay.ranges]
            if starts == [0] * len(there.logs):
                assert got == always[made.dead_letter], queue_id
        await broker.aclose()
