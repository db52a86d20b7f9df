"""Deliveries of events to a handler, repeated until it acknowledges them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Set
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


def group_of(name: str, types: Set[str]) -> str:
    """What a system calls the group of subscribers with these types, which has this name.

    Each set of types has a group of its own: most systems would give an event to any subscriber of
    a group, also to one that did not ask for it. No types, which means all, leave the name.
    """
    if not types:
        return name
    digest = hashlib.sha256("\n".join(sorted(types)).encode()).hexdigest()
    return f"{name}-{digest[:12]}"


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


class Held(Generic[D]):
    """A delivery of an event that is not acknowledged; `turn` is held while it ends."""

    __slots__ = ("delivery", "turn")

    def __init__(self, delivery: D) -> None:
        self.delivery = delivery
        self.turn = asyncio.Lock()


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
        self._held: dict[str, list[Held[D]]] = {}
        self._retrying: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def _deliver_all(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        """Like `deliver`, by `_deliver_one`."""

    @abstractmethod
    async def _accept(self, delivery: D) -> None:
        """Remove an event from the group; where it raises, it can be called again."""

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
        for held in [*self._held.get(event_id, ())]:
            async with held.turn:
                if self._holds(event_id, held):  # else it has ended meanwhile
                    await self._end(event_id, held)

    async def _end(self, event_id: str, held: Held[D]) -> None:
        try:
            await self._accept(held.delivery)
        except Exception:
            if not self._is_open(held.delivery):  # it comes again
                self._drop(event_id, held)
            raise
        self._drop(event_id, held)

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
            held = Held(delivery)
            self._held.setdefault(event.id, []).append(held)
            await run_handler(handler, event)
            if not held.turn.locked() and self._is_done(event, held):
                self._drop(event.id, held)
            else:
                task = asyncio.create_task(self._retry(event, held, handler))
                self._retrying.add(task)
                task.add_done_callback(self._retried)

    async def _retry(self, event: Event, held: Held[D], handler: Handler) -> None:
        """What becomes of an event that was not acknowledged as its handler returned."""
        for _ in range(self._max_retries):
            await asyncio.sleep(self._delay_s)
            if not await self._has_ended(event, held):
                await run_handler(handler, event)
            if await self._has_ended(event, held):
                break
        await self._end_by(event, held, lambda: self._bury(held.delivery, NOT_ACKNOWLEDGED))

    async def _end_by(
        self, event: Event, held: Held[D], ending: Callable[[], Awaitable[None]]
    ) -> None:
        """End a delivery, unless it has ended; repeated while the server refuses that."""
        outage = Outage(log, self._place)
        while True:
            try:
                async with held.turn:
                    if not self._is_done(event, held):
                        with self._translated():
                            await ending()
                break
            except SlateMQError as error:  # the server may not deliver it again by itself
                await outage.wait(error)
        self._drop(event.id, held)

    async def _has_ended(self, event: Event, held: Held[D]) -> bool:
        """Like `_is_done`, after an acknowledgement that is on its way."""
        async with held.turn:
            return self._is_done(event, held)

    def _is_done(self, event: Event, held: Held[D]) -> bool:
        return not self._holds(event.id, held) or not self._is_open(held.delivery)

    def _holds(self, event_id: str, held: Held[D]) -> bool:
        return held in self._held.get(event_id, ())

    def _drop(self, event_id: str, held: Held[D]) -> None:
        """Hold it no more; other copies of the event, which was published twice, stay."""
        others = [one for one in self._held.pop(event_id, ()) if one is not held]
        if others:
            self._held[event_id] = others

    def _retried(self, task: asyncio.Task[None]) -> None:
        self._retrying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an event was not delivered; it will come again", exc_info=error)
