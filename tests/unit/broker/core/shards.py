"""A shard with its database in a dict, for tests that tell one story each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from libs.storage.records.queues import AvailableMessage
from services.broker.core.lease_table import LeaseGrace
from services.broker.core.leases import Lease, LeaseOwner
from services.broker.core.queue import Choice, NeedsLane, Queue, Selector
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Assignment, Finish, Nack, Needs, Range, Shard
from services.broker.shard.loading import Loader, last_clock_ms, load_shard
from tests.unit.broker.core.applied import assign_all
from tests.unit.broker.core.stores import DictStore

T = TypeVar("T")
START_MS = 1_767_225_600_000


class Each(Selector):
    """Decides about each message by a function."""

    def __init__(self, decide: Callable[[AvailableMessage], Choice]) -> None:
        self._decide = decide

    def choose(self, item: AvailableMessage) -> Choice:
        return self._decide(item)


class Rig:
    """`now_ms` is moved by the test."""

    def __init__(self) -> None:
        self.store = DictStore()
        self.shard = Shard()
        self.now_ms = START_MS
        self.sizes: list[int] = []
        self.loader = Loader(self.store, self.shard)
        self._position = 0

    def create(self, queue_id: str = "orders", max_attempts: int = 5) -> Queue:
        settings = QueueSettings("true", max_attempts=max_attempts)
        return self.shard.create_queue(queue_id, settings)

    def queue(self, queue_id: str = "orders") -> Queue:
        return self.shard.queues[queue_id]

    async def run(self, command: Callable[[], T]) -> T:
        while True:
            try:
                return command()
            except (NeedsLane, Needs) as need:
                await self.loader.answer(need)

    async def route(
        self,
        ids: Sequence[int],
        *,
        visible_at_ms: int = 0,
        priority: int = 0,
        deadline_ms: int = 0,
        queue_id: str = "orders",
    ) -> None:
        count = len(ids)
        assignment = Assignment(
            queue_id, ids, [priority] * count, [deadline_ms] * count, [visible_at_ms] * count
        )
        piece = Range(0, self._position, self._position + 1, [assignment])
        self._position += 1
        assert await self.run(lambda: assign_all(self.shard, [piece], self.now_ms)) == [True]

    async def claim(
        self,
        limit: int,
        lease_ms: int = 30_000,
        skip: Sequence[int] = (),
        queue_id: str = "orders",
    ) -> list[Lease]:
        def command() -> list[Lease]:
            left = limit

            def choose(item: AvailableMessage) -> Choice:
                nonlocal left
                if item.message_id in skip:
                    return Choice.SKIP
                left -= 1
                return Choice.TAKE if left >= 0 else Choice.STOP

            queue = self.queue(queue_id)
            return self.shard.leases.claim(
                queue, Each(choose), lease_ms, "worker", self.now_ms
            ).leases()

        return await self.run(command)

    def release(self, leases: Sequence[Lease]) -> None:
        self.shard.leases.release([lease.token for lease in leases])

    async def nack(self, *items: Nack) -> list[Finish]:
        return await self.run(lambda: self.shard.leases.nack(items, self.now_ms))

    async def expire(self, limit: int = 10) -> list[LeaseOwner]:
        due = self.shard.leases.deadlines.ended(self.now_ms, limit)
        return await self.run(lambda: self.shard.leases.expire(due, self.now_ms))

    async def ids(self, limit: int) -> list[int]:
        return [lease.message_id for lease in await self.claim(limit)]

    async def all_ids(self, count: int) -> list[int]:
        """As `ids`; a claim gives what is in memory rather than wait for more, so by several."""
        found: list[int] = []
        while len(found) < count and (more := await self.ids(count - len(found))):
            found += more
        return found

    def commit(self) -> int:
        """Makes everything durable; gives the bytes that this wrote."""
        rows = self.shard.drain(self.now_ms)
        if not rows:
            return 0
        self.store.write(rows, self.now_ms)
        self.store.make_durable()
        self.shard.durable()
        return sum(len(key) + len(value or b"") for key, value in rows)

    async def restart(self, away_ms: int = 0) -> None:
        """As after SIGKILL: what was not committed is gone."""
        self.now_ms += away_ms
        self.store = self.store.crash(0)
        last_ms = await last_clock_ms(self.store)
        self.shard = await load_shard(self.store, last_ms)
        grace = LeaseGrace(self.shard.queues.values(), last_ms, self.now_ms)
        while not grace.is_done:
            grace.step()
        self.loader = Loader(self.store, self.shard)
        self._position = self.shard.cursors.get(0, 0)
