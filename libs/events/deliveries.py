"""Deliveries of events to a handler, repeated until it acknowledges them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from libs.events.retrying import Outage
from libs.events.tasks import cut_error
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.events.envelope import Event, decode_event

log = logging.getLogger(__name__)

Handler = Callable[[Event], Awaitable[None]]
"""Gets one event at a time; acknowledges it through the backend when it is done."""

KEEP_S = 5.0

END_AGAIN_S = 1.0
"""How long a cancelled task has to end before it is cancelled again."""

NOT_ACKNOWLEDGED = "no subscriber acknowledged it"

D = TypeVar("D")


def read_event(place: str, encoded: bytes) -> Event | str:
    """An event from its JSON; of what is not one, the error as it is stored, which is logged."""
    try:
        return decode_event(encoded)
    except InvalidArgument as error:
        why = cut_error(str(error))
        log.error("an entry of %s is not an event: %s", place, why)
        return why


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
    try:
        task.result()
    except (Exception, asyncio.CancelledError) as error:  # of a library of the handler's
        log.error("the handler failed for %s (%s)", event.id, event.type, exc_info=error)
        return False
    return True


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended: a client library may take one cancellation for a timeout.

    What it raised is logged.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=END_AGAIN_S)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("deliveries ended by a fault", exc_info=error)


class GroupEvents(ABC, Generic[D]):
    """Delivers the events of a group by a server that leaves counts and delays to its clients.

    The first attempt runs in the order of the events; later ones run beside the events behind. The
    server keeps the event all the while: a crash loses only the count. D is a delivery of an event.
    """

    def __init__(
        self,
        place: str,
        max_retries: int,
        retry_delay_ms: int,
        translated: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._place = place
        self._max_retries = max_retries
        self._delay_s = retry_delay_ms / 1000
        self._translated = translated
        self._held: dict[str, list[D]] = {}
        self._retrying: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def _deliver_all(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        """Like `deliver`, by `_deliver_one`."""

    @abstractmethod
    async def _accept(self, delivery: D) -> None:
        """Remove an event from the group."""

    @abstractmethod
    async def _bury(self, delivery: D, error: str) -> None:
        """Make it a dead letter, then accept it."""

    def _is_open(self, delivery: D) -> bool:
        """Whether it is still this consumer's."""
        return True

    async def deliver(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        try:
            await self._deliver_all(types, handler, note_up)
        finally:
            # The server delivers again what is retried here.
            for task in self._retrying:
                task.cancel()
            if self._retrying:
                await asyncio.wait(self._retrying)
            self._held.clear()

    async def stop(self) -> None:
        """Nothing to do where what was not accepted goes back with the connection."""

    async def acknowledge(self, event_id: str) -> None:
        for delivery in self._held.pop(event_id, ()):
            await self._accept(delivery)

    async def _deliver_one(
        self, delivery: D, encoded: bytes, types: frozenset[str], handler: Handler
    ) -> None:
        """Deliver once; what is not acknowledged then is delivered again in the background."""
        event = read_event(self._place, encoded)
        if isinstance(event, str):
            await self._bury(delivery, event)
        elif types and event.type not in types:
            await self._accept(delivery)
        else:
            self._held.setdefault(event.id, []).append(delivery)
            await run_handler(handler, event)
            if self._is_done(event, delivery):
                self._drop(event, delivery)
            else:
                task = asyncio.create_task(self._retry(event, delivery, handler))
                self._retrying.add(task)
                task.add_done_callback(self._retried)

    async def _retry(self, event: Event, delivery: D, handler: Handler) -> None:
        for _ in range(self._max_retries):
            await asyncio.sleep(self._delay_s)
            if not self._is_done(event, delivery):
                await run_handler(handler, event)
            if self._is_done(event, delivery):
                break
        outage = Outage(log, self._place)
        while not self._is_done(event, delivery):
            try:
                with self._translated():
                    await self._bury(delivery, NOT_ACKNOWLEDGED)
                break
            except SlateMQError as error:  # the server may not deliver it again by itself
                await outage.wait(error)
        self._drop(event, delivery)

    def _is_done(self, event: Event, delivery: D) -> bool:
        held = self._held.get(event.id, ())
        return all(one is not delivery for one in held) or not self._is_open(delivery)

    def _drop(self, event: Event, delivery: D) -> None:
        """Hold it no more; other copies of the event, which was published twice, stay."""
        others = [one for one in self._held.pop(event.id, ()) if one is not delivery]
        if others:
            self._held[event.id] = others

    def _retried(self, task: asyncio.Task[None]) -> None:
        self._retrying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an event was not delivered; it will come again", exc_info=error)
