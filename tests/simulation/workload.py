"""Clients of a simulated world: they publish, consume, fail, and come back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, Final

from slatemq import Backoff, connect
from slatemq.client import Client
from slatemq.errors import AlreadyExists, SlateMQError, Unavailable
from tests.simulation.cluster import Cluster
from tests.simulation.judge import Judge

COLORS: Final = ("red", "green", "blue")
LEASE_S: Final = 3.0

BACKOFF: Final = Backoff.exponential(0.5, max=5, jitter=0.5)
"""By default an attempt may come ten minutes after the one before: no world is watched so long."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Workload:
    """The clients of one run; each has a machine of its own."""

    def __init__(self, cluster: Cluster, judge: Judge, seed: str) -> None:
        self._cluster = cluster
        self._judge = judge
        self._chance = random.Random(f"{seed}/workload")
        self._number = 0
        self.stopping = False
        self.publish_tasks: list[asyncio.Task[None]] = []
        self.consume_tasks: list[asyncio.Task[None]] = []

    async def create_queues(self) -> None:
        queues = {"all": (None, None)} | {color: ("color", color) for color in COLORS}
        async with await self._connected() as client:
            for name, (header, value) in queues.items():
                filter_text = "true" if header is None else f"headers['{header}'] == '{value}'"
                while True:
                    try:
                        await client.create_queue(
                            name,
                            filter=filter_text,
                            lease=LEASE_S,
                            max_attempts=1000,
                            backoff=BACKOFF,
                        )
                    except AlreadyExists:
                        pass
                    except Unavailable as error:
                        self._cluster.tell(f"creating {name}: {error}")
                        await asyncio.sleep(0.1)
                        continue
                    break
                self._judge.filters[name] = (header, value)

    def begin(self, producers: int, consumers: int, messages: int) -> None:
        for number in range(producers):
            machine = self._cluster.machine(f"producer-{number}")
            self.publish_tasks.append(machine.run(self._produce(number, messages)))
        queues = list(self._judge.filters)
        for number in range(consumers):
            machine = self._cluster.machine(f"consumer-{number}")
            queue = queues[number % len(queues)]
            self.consume_tasks.append(machine.run(self._consume(queue, f"consumer-{number}")))

    async def _produce(self, number: int, messages: int) -> None:
        chance = random.Random(self._chance.random())
        async with await self._connected() as client:
            for count in range(messages):
                await asyncio.sleep(chance.expovariate(20))
                await self._publish(client, f"{number}/{count}".encode(), chance)

    async def _publish(self, client: Client, key: bytes, chance: random.Random) -> None:
        headers = {"color": chance.choice((*COLORS, "black"))}
        visible_at_ms = now_ms() + chance.randrange(5000) if chance.random() < 0.2 else 0
        self._judge.publishing(key, headers, visible_at_ms, now_ms())
        try:
            done = await client.publish(
                key, headers, visible_at=visible_at_ms or None, dedupe_key=key.decode()
            )
        except SlateMQError as error:
            self._cluster.tell(f"publishing {key!r}: {error}")
            return
        self._judge.published(key, done.message_id)

    async def _consume(self, queue: str, name: str) -> None:
        chance = random.Random(self._chance.random())
        async with await self._connected() as client:
            while not self.stopping:
                try:
                    messages = await client.claim(
                        queue, chance.randint(1, 8), wait=1.0, consumer_id=name
                    )
                except SlateMQError as error:
                    self._cluster.tell(f"{name} claims: {error}")
                    await asyncio.sleep(0.2)
                    continue
                for message in messages:
                    self._judge.delivered_to(
                        queue,
                        message.payload,
                        message.headers,
                        message.message_id,
                        message.lease_token,
                        message.attempts_count,
                        message.lease_deadline_ms,
                        now_ms(),
                    )
                for message in messages:
                    await self._finish(client, queue, message, chance)

    async def _finish(
        self, client: Client, queue: str, message: Any, chance: random.Random
    ) -> None:
        key, token, dice = message.payload, message.lease_token, chance.random()
        if dice < 0.05:
            return  # A consumer that forgets it: its lease ends by itself.
        try:
            if dice < 0.15:
                self._judge.ending(queue, key, token, is_ack=False)
                await client.nack([token], "a bad day", delay=chance.random())
                return
            if dice < 0.25:
                [deadline] = await client.extend([token], LEASE_S + 1)
                if isinstance(deadline, int):
                    self._judge.extended(queue, key, token, deadline)
                await asyncio.sleep(chance.random())
            self._judge.ending(queue, key, token, is_ack=True)
            [problem] = await client.ack([token])
            if problem is None:
                self._judge.acked_by(queue, key)
        except SlateMQError as error:
            self._cluster.tell(f"finishing {key!r}: {error}")

    async def _connected(self) -> Client:
        while True:
            client = connect(self._cluster.addresses, call_timeout=20)
            try:
                await client._peers.reach()
            except SlateMQError:
                await client.close()
                await asyncio.sleep(0.2)
                continue
            return client


def failed(tasks: Sequence[asyncio.Task[None]]) -> BaseException | None:
    """What ended a client before its time."""
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is not None:
            return task.exception()
    return None
