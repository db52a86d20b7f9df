"""What tasks in lists and in streams share: their ends, their delays, when to read."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from redis import asyncio as aioredis

from libs.events.deliveries import end_task
from libs.events.redis.connection import BLOCK_MS, KEEP_S, READ_COUNT, translated
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.gathered import Gathered
from libs.events.redis.streams import PAGE
from libs.events.redis.transactions import Command, Transactions
from libs.events.retrying import Outage
from libs.events.settings import RedisSettings
from libs.events.tasks import (
    FailedTask,
    Moving,
    TaskDeliveries,
    UnreadableTask,
    WriteTask,
    decode_task,
    encode_task,
    read_task,
)
from slatemq.errors import SlateMQError
from slatemq.models import now_ms

log = logging.getLogger(__name__)

D = TypeVar("D")

SOLE_READ_COUNT: Final = 64
"""Tasks that a sole consumer reads at a time, fewer if they are large."""

READ_BYTES: Final = 2 << 20
"""The most that one read should bring; a task with a body of 512 KiB takes about 700 KB."""

PROMOTE = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 100)
for _, task in ipairs(due) do
    redis.call('ZREM', KEYS[1], task)
    {append}
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return first[2]
"""
"""Moves delayed tasks that are due to the others; returns when the next one is due."""


async def pages(
    read: Callable[[int, int], Awaitable[Sequence[bytes]]],
) -> AsyncGenerator[bytes, None]:
    """What `read` returns from one place to another, which it includes."""
    for first in itertools.count(0, PAGE):
        page = await read(first, first + PAGE - 1)
        for one in page:
            yield one
        if len(page) < PAGE:
            return


class TaskReading(NamedTuple):
    """How one consumer reads tasks; see `open_backend`."""

    is_sole_consumer: bool = False
    gather_s: float = 0.0

    @property
    def count_max(self) -> int:
        """Tasks of one read: consumers that share tasks read few, so that each gets some."""
        return SOLE_READ_COUNT if self.is_sole_consumer else READ_COUNT


class DelayedTasks(ABC, Generic[D]):
    """Tasks in some structure of Redis, of which failed ones wait in a sorted set of their own.

    D is a delivery of a task, by which it is finished.
    """

    APPEND_SCRIPT: ClassVar[str]
    """Appends `task` to the structure KEYS[2], in Lua."""

    def __init__(
        self,
        client: aioredis.Redis,
        settings: RedisSettings,
        dead: DeadLetters,
        reading: TaskReading,
    ) -> None:
        self._client: Any = client
        self._settings = settings
        self._key = f"{settings.stream_prefix}:tasks"
        self._delayed = f"{self._key}:delayed"
        self._dead = dead
        self._transactions = Transactions(client)
        self._reading = reading
        self._read_count = reading.count_max
        self._read_again_at = 0.0
        self._has_lost_answer = False
        self._read: deque[D] = deque()
        self._held = TaskDeliveries[D]()
        self._enqueues = Gathered(self._append_all)
        self._completions = Gathered(self._finish_all)
        self._promote = self._client.register_script(PROMOTE.format(append=self.APPEND_SCRIPT))
        self._promote_at_ms = 0
        self._keeping: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Prepare Redis; from now on this consumer keeps what it has."""
        await self._prepare()
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Let other consumers take the tasks of this one immediately."""
        if self._keeping is not None:
            await end_task(self._keeping)
        await self._leave()

    @abstractmethod
    async def _prepare(self) -> None:
        """Create what is missing in Redis."""

    @abstractmethod
    async def _leave(self) -> None:
        """What `stop` does."""

    @abstractmethod
    def _append_command(self, encoded: bytes) -> Command:
        """Appends a task."""

    @abstractmethod
    async def _append_all(self, encoded: Sequence[bytes]) -> None:
        """Append tasks, in order, by one command."""

    @abstractmethod
    async def _show_alive(self) -> None:
        """Now and then show that this consumer is alive, and has what it has."""

    @abstractmethod
    async def _take_over(self) -> None:
        """Now and then, or once, take the tasks of dead consumers."""

    @abstractmethod
    async def _read_some(self) -> None:
        """Read tasks that wait, or wait for one up to a second."""

    @abstractmethod
    async def _recover(self) -> None:
        """Make those the next ones that a read has brought whose answer was lost."""

    @abstractmethod
    def _encoded(self, delivery: D) -> bytes:
        """The task as JSON."""

    @abstractmethod
    def _finish_commands(self, deliveries: Sequence[D]) -> Sequence[Command]:
        """Remove deliveries."""

    def _is_held(self, task_id: str, delivery: D) -> bool:
        """Whether this consumer holds this very delivery."""
        return False

    @abstractmethod
    def _all(self) -> AsyncGenerator[bytes, None]:
        """Tasks that are waiting or delivered, as JSON."""

    @abstractmethod
    async def _count(self) -> int:
        """Tasks that are waiting or delivered."""

    async def enqueue(self, task: WriteTask) -> None:
        encoded = encode_task(task)
        await self._enqueues.execute(encoded, len(encoded))

    async def dequeue(self) -> WriteTask | None:
        await self._show_alive()
        await self._take_over()
        if not self._read:
            await self._read_next()
        if not self._read:
            return None
        # Removed once it is settled: it must come next if the server goes down here.
        delivery = self._read[0]
        encoded = self._encoded(delivery)
        task = read_task(encoded)
        if isinstance(task, str):
            await self._end(delivery, self._dead.unreadable_command(encoded, task))
            self._read.popleft()
            return None
        self._read.popleft()
        if not self._is_held(task.task_id, delivery):
            self._held.add(task.task_id, delivery)
        return task

    async def _read_next(self) -> None:
        try:
            if self._has_lost_answer:
                await self._recover()
                self._has_lost_answer = False
            if not self._read:
                await self._read_some()
        except BaseException:  # Redis may have executed the read of a cancelled caller, too.
            self._has_lost_answer = True
            raise

    async def _keep(self) -> None:
        """Show that this consumer is alive also while it works, and dequeues nothing."""
        outage = Outage(log, "Redis")
        while True:
            try:
                if self._read or any(True for _ in self._held):
                    with translated():
                        await self._show_alive()
            except SlateMQError as error:
                await outage.wait(error)
            except Exception as error:  # a fault must not end it unseen
                log.exception("the tasks of %s are not kept", self._key)
                await outage.wait(error)
            else:
                outage.end()
                await asyncio.sleep(KEEP_S)

    async def complete(self, task_id: str) -> bool:
        delivery = self._held.first(task_id)
        if delivery is None:
            return False
        await self._completions.execute(delivery)
        self._held.drop(task_id)
        return True

    async def _finish_all(self, deliveries: Sequence[D]) -> None:
        await self._transactions.execute(self._key, self._finish_commands(deliveries))

    async def _end(self, delivery: D, command: Command) -> None:
        """Put a task where it goes next, and remove its delivery."""
        commands = [command, *self._finish_commands([delivery])]
        await self._transactions.execute(self._key, commands)

    async def fail(self, task_id: str, error: str) -> bool:
        delivery = self._held.first(task_id)
        if delivery is None:
            return False
        task = decode_task(self._encoded(delivery))
        if task.has_retries_left:
            due_ms = now_ms() + self._settings.retry_delay_ms
            self._promote_at_ms = min(self._promote_at_ms, due_ms)
            await self._end(
                delivery, ("ZADD", self._delayed, due_ms, encode_task(task.after_failure()))
            )
        else:
            await self._end(delivery, self._dead.task_command(task, error))
        self._held.drop(task_id)
        return True

    async def _until_next_read(self) -> None:
        await asyncio.sleep(max(0.0, self._read_again_at - time.monotonic()))

    def _note_read(self, sizes: Sequence[int], *, is_all: bool) -> None:
        """Decide when to read again, and how much; `is_all`: nothing more waited."""
        if not sizes:
            return
        self._read_again_at = time.monotonic() + self._reading.gather_s if is_all else 0.0
        fitting = READ_BYTES * len(sizes) // max(sum(sizes), 1)
        self._read_count = max(READ_COUNT, min(fitting, self._reading.count_max))

    async def _promoted(self) -> int:
        """Move what is due; returns how long to wait for a task then, in ms, at least 1."""
        if now_ms() >= self._promote_at_ms:
            due_at = await self._promote(keys=[self._delayed, self._key], args=[now_ms()])
            # Tasks that other consumers delay meanwhile are seen within a second.
            next_ms = now_ms() + BLOCK_MS
            self._promote_at_ms = next_ms if due_at is None else min(next_ms, int(float(due_at)))
        return max(1, min(BLOCK_MS, self._promote_at_ms - now_ms()))

    async def retry_all(self, moving: Moving) -> int:
        count = 0
        async for dead_letters in self._dead.failed():
            commands: list[Command] = []
            for entry_id, task in dead_letters:  # one after the other, so that each makes room
                commands.append(self._append_command(encode_task(task.renewed())))
                commands.append(("XDEL", self._dead.key, entry_id))
            with moving([task.task_id for _, task in dead_letters]):
                await self._transactions.execute(self._key, commands)
            count += len(dead_letters)
        return count

    async def failed(self, limit: int) -> list[FailedTask | UnreadableTask]:
        return await self._dead.tasks(limit)

    async def pending(self) -> AsyncGenerator[bytes, None]:
        async for task in pages(partial(self._client.zrange, self._delayed)):
            yield task
        async for task in self._all():
            yield task

    async def counts(self) -> tuple[int, int]:
        """Tasks that are waiting, delayed or delivered, and dead letters."""
        delayed = int(await self._client.zcard(self._delayed))
        return await self._count() + delayed, await self._dead.count()
