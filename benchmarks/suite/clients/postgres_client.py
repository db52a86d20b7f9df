"""PostgreSQL the way pgmq does it: a table per queue, batches, SKIP LOCKED, a visibility time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import asyncpg

from benchmarks.suite.clients.contract import Delivery

WAIT_S = 1.0
CONNECTIONS_MAX = 8
"""A connection does one thing at a time: pipelining takes several."""
POLL_S = 0.005
LEASE = "30 seconds"


class Client:
    """A few connections. A fan-out inserts into every table of the topic, in one transaction."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._topics: dict[str, list[str]] = {}

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self._url, min_size=1, max_size=CONNECTIONS_MAX)

    async def close(self) -> None:
        await self._pool.close()

    async def prepare(self, queues: Sequence[str]) -> None:
        await self._pool.execute(
            "CREATE TABLE IF NOT EXISTS topics (topic text, queue text, PRIMARY KEY (topic, queue))"
        )
        for queue in queues:
            await self._pool.execute(
                f"""CREATE TABLE "{queue}" (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
                    attempts int NOT NULL DEFAULT 0,
                    visible_at timestamptz NOT NULL DEFAULT now(), payload bytea NOT NULL);
                CREATE INDEX ON "{queue}" (visible_at)"""
            )
            await self._pool.execute("INSERT INTO topics VALUES ($1, $2)", queues[0], queue)

    async def publish(self, queue: str, payloads: Sequence[bytes]) -> None:
        targets = self._topics.get(queue)
        if targets is None:
            rows = await self._pool.fetch("SELECT queue FROM topics WHERE topic = $1", queue)
            targets = self._topics[queue] = [row["queue"] for row in rows]
        async with self._pool.acquire() as connection, connection.transaction():
            for target in targets:
                await connection.execute(
                    f'INSERT INTO "{target}" (payload) SELECT unnest($1::bytea[])', list(payloads)
                )

    async def consume(self, queue: str, count: int) -> Sequence[Delivery]:
        ends_at = asyncio.get_running_loop().time() + WAIT_S
        while True:
            rows = await self._pool.fetch(
                f"""WITH next AS (SELECT id FROM "{queue}" WHERE visible_at <= clock_timestamp()
                        ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
                    UPDATE "{queue}" q SET visible_at = clock_timestamp() + interval '{LEASE}',
                        attempts = attempts + 1
                    FROM next WHERE q.id = next.id RETURNING q.id, q.payload""",
                count,
            )
            if rows or asyncio.get_running_loop().time() > ends_at:
                return [(row["payload"], row["id"]) for row in rows]
            await asyncio.sleep(POLL_S)

    async def ack(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        await self._pool.execute(
            f'DELETE FROM "{queue}" WHERE id = ANY($1::bigint[])', [one for _, one in deliveries]
        )
