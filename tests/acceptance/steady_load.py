"""A client that publishes and consumes until it is stopped, and knows what was answered."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

import slatemq
from slatemq.errors import DeadlineExceeded, NotFound, Unavailable

LARGE_BYTES = 70_000
WAIT_S = 120.0

DOWN = (Unavailable, DeadlineExceeded)


class SteadyLoad:
    """Publishes to queues in turn, by their names as a header; consumes from all of them.

    Attributes:
        published: Payloads by message ID, of publishes that were answered.
        unanswered: Payloads of publishes that failed: they may be stored.
        consumed: Payloads by message ID, of messages whose ack was sent.
        acked: Message IDs whose ack was answered.
        again: Message IDs that were delivered after their ack was answered: never, if all is well.
    """

    def __init__(
        self,
        client: slatemq.Client,
        queues: Sequence[str],
        keep: int = 0,
        lease: float | None = None,
    ) -> None:
        """Of `keep` messages in a row, one is acked, and the others stay claimed; 0: all acked.

        `lease` is that of a claim, in seconds; None for the queue's.
        """
        self._client = client
        self._queues = queues
        self._keep = keep
        self._lease = lease
        self._tasks: list[asyncio.Task[None]] = []
        self._finishing = False
        self.published: dict[int, bytes] = {}
        self.unanswered: list[bytes] = []
        self.consumed: dict[int, bytes] = {}
        self.acked: set[int] = set()
        self.again: set[int] = set()

    def start(self) -> None:
        works = (self._publish(), *(self._consume(queue_id) for queue_id in self._queues))
        self._tasks = [asyncio.create_task(work) for work in works]

    async def finish(self) -> None:
        """Publish no more, ack everything that was published, and stop."""
        self._finishing = True
        async with asyncio.timeout(WAIT_S):
            await self._tasks[0]
            while not self.published.keys() <= self.acked:
                self._raise_ended()
                await asyncio.sleep(0.02)
        await self.stop()

    def check_nothing_lost(self) -> None:
        """Once it has finished: raises AssertionError unless all that was answered came, as it was
        published, nothing came after its ack, and every call was answered.
        """
        assert self.published.items() <= self.consumed.items()
        assert {*self.consumed.values()} == {*self.published.values()}
        assert self.again == set()
        assert self.unanswered == []  # Calls are repeated while a service is down.

    async def stop(self) -> None:
        """Stop at once."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def publish(self, queue_id: str, size_bytes: int = 100) -> int:
        payload = os.urandom(size_bytes)
        message_id = int(await self._client.publish(payload, {"queue": queue_id}))
        self.published[message_id] = payload
        return message_id

    async def progress(self, published: int = 20, acked: int = 20) -> None:
        """Wait until this many more are published and acked; raises what has ended a part of it."""
        more, less = len(self.published) + published, len(self.acked) + acked
        async with asyncio.timeout(WAIT_S):
            while len(self.published) < more or len(self.acked) < less:
                self._raise_ended()
                await asyncio.sleep(0.02)

    def _raise_ended(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _publish(self) -> None:
        number = 0
        while not self._finishing:
            number += 1
            size_bytes = LARGE_BYTES if number % 10 == 0 else 100
            payload = os.urandom(size_bytes)
            headers = {"queue": self._queues[number % len(self._queues)]}
            try:
                message_id = int(await self._client.publish(payload, headers))
            except DOWN:
                self.unanswered.append(payload)
                continue
            self.published[message_id] = payload

    async def _consume(self, queue_id: str) -> None:
        taken = 0
        while True:
            try:
                messages = await self._client.claim(queue_id, 10, lease=self._lease, wait=1)
            except DOWN:
                continue
            for message in messages:
                taken += 1
                if self._keep and taken % self._keep:
                    continue
                await self._ack(message)

    async def _ack(self, message: slatemq.Received) -> None:
        if message.message_id in self.acked:
            self.again.add(message.message_id)
        self.consumed[message.message_id] = message.payload
        try:
            await message.ack()
        except NotFound:
            return  # The lease has ended meanwhile: it comes again.
        except DOWN:
            return
        self.acked.add(message.message_id)
