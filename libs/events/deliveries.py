"""Deliveries of events to a handler, repeated until it acknowledges them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from slatemq.events.envelope import Event

log = logging.getLogger(__name__)

Handler = Callable[[Event], Awaitable[None]]
"""Gets one event at a time; acknowledges it through the backend when it is done."""

KEEP_S = 5.0

END_AGAIN_S = 1.0
"""How long a cancelled task has to end before it is cancelled again."""


async def run_handler(
    handler: Handler, event: Event, keep: Callable[[], Awaitable[None]] | None = None
) -> bool:
    """Call the handler; returns whether it returned, and logs what it raised.

    `keep` is called every few seconds while the handler runs: it shows the backend that the event
    is still being worked on.
    """
    task = asyncio.ensure_future(handler(event))
    try:
        while True:
            done, _ = await asyncio.wait([task], timeout=KEEP_S)
            if done:
                break
            if keep is not None:
                await keep()
    except BaseException:
        task.cancel()
        await asyncio.wait([task])
        raise
    error = task.exception()
    if error is None:
        return True
    if not isinstance(error, Exception):
        raise error
    log.error("the handler failed for %s (%s)", event.id, event.type, exc_info=error)
    return False


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended: a client library may take one cancellation for a timeout.

    What it raised is logged.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=END_AGAIN_S)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("deliveries ended by a fault", exc_info=error)


class Redeliveries:
    """Delivers events of a server that leaves counts and delays to its clients.

    The first attempt runs in the order of the events; later ones run beside the events behind. The
    server keeps the event all the while: a crash loses only the count.
    """

    def __init__(self, handler: Handler, max_retries: int, retry_delay_ms: int) -> None:
        self._handler = handler
        self._max_retries = max_retries
        self._delay_s = retry_delay_ms / 1000
        self._retrying: set[asyncio.Task[None]] = set()

    async def deliver(
        self,
        event: Event,
        acknowledged: Callable[[], bool],
        bury: Callable[[], Awaitable[None]],
    ) -> None:
        """Deliver once; where that is not acknowledged, again in the background, then `bury`."""
        await run_handler(self._handler, event)
        if not acknowledged():
            task = asyncio.create_task(self._retry(event, acknowledged, bury))
            self._retrying.add(task)
            task.add_done_callback(self._done)

    async def stop(self) -> None:
        """Stop what runs in the background; the server delivers those events again."""
        for task in self._retrying:
            task.cancel()
        if self._retrying:
            await asyncio.wait(self._retrying)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._retrying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an event was not delivered; it will come again", exc_info=error)

    async def _retry(
        self,
        event: Event,
        acknowledged: Callable[[], bool],
        bury: Callable[[], Awaitable[None]],
    ) -> None:
        for _ in range(self._max_retries):
            await asyncio.sleep(self._delay_s)
            if not acknowledged():
                await run_handler(self._handler, event)
            if acknowledged():
                return
        await bury()
