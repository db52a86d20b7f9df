"""Deliveries of a queue of RabbitMQ, until its channel is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import ChannelClosed


class Deliveries:
    """The messages of a queue, in order, at most the channel's prefetch at a time."""

    def __init__(self, channel: AbstractChannel) -> None:
        self.channel = channel
        self._arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._lost = asyncio.Event()
        channel.close_callbacks.add(self._on_close)

    async def start(self, queue: AbstractQueue) -> None:
        underlay = await self.channel.get_underlay_channel()
        # When the queue is deleted, the channel stays open, and no message comes any more.
        underlay.on_consumer_cancel_callbacks.add(self._on_close)
        await queue.consume(self._arrive)

    async def next(self, wait_s: float | None = None) -> AbstractIncomingMessage | None:
        """The next message, or None when none comes in time. Raises ChannelClosed when lost."""
        if self.is_lost:
            raise ChannelClosed("the channel was lost")
        if not self._arrived.empty():
            return self._arrived.get_nowait()
        getting = asyncio.ensure_future(self._arrived.get())
        losing = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait(
                [getting, losing], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            losing.cancel()
            if not getting.done():
                getting.cancel()
        if getting.done() and not getting.cancelled():
            return getting.result()
        if self.is_lost:
            raise ChannelClosed("the channel was lost")
        return None

    @property
    def arrived_count(self) -> int:
        """Messages that have arrived and that `next` has not returned."""
        return self._arrived.qsize()

    @property
    def is_lost(self) -> bool:
        """Whether what was delivered is no longer this consumer's."""
        return self._lost.is_set() or self.channel.is_closed

    async def _arrive(self, message: AbstractIncomingMessage) -> None:
        self._arrived.put_nowait(message)

    def _on_close(self, *_: Any) -> None:
        self._lost.set()
