"""The events of a janitor's runs, and their relay. Loaded where event queues are on.

A run's object is written with `events: owed` when the run is made, so what it says of begin and end
is owed from that moment on, whichever process is killed, until the object says that
it is published. Event IDs are derived from the run's. Memory holds the IDs of the runs that wait.

An act of a caller has an object of its own until its event is published, below `janitor/acts/`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Final

from libs.events.relay import EventBatch
from libs.events.settings import QueueSettings
from libs.serving.events.outbox import Happening
from libs.serving.events.relay import ProcessRelay
from libs.serving.telemetry import Telemetry
from libs.storage.errors import ObjectNotFound, StorageError
from libs.storage.objects.small_objects import Objects
from services.janitor.runs.history import EVENTS_OWED, EVENTS_PUBLISHED, Run, RunEvents, RunStore
from slatemq.errors import InvalidArgument
from slatemq.events.catalogue import EventData, JanitorRunFinished, JanitorRunStarted, make_event
from slatemq.events.envelope import (
    Event,
    decode_event,
    derive_event_id,
    encode_event,
    parse_timestamp,
)

log = logging.getLogger(__name__)

_ACTS: Final = "janitor/acts"

_REMOVED: Final = ("_removed", "_purged")
"""How the counts end whose sum is what a run has removed."""


class ActStore:
    """The acts of callers of one janitor whose events are owed: an object each."""

    def __init__(self, objects: Objects, number: int) -> None:
        self._objects = objects
        self._prefix = f"{_ACTS}/{number}-"

    async def put(self, event: Event) -> None:
        """Raises StoreUnavailable."""
        await self._objects.put(self._path(event.id), encode_event(event))

    async def delete(self, event_id: str) -> None:
        """Raises StoreUnavailable."""
        await self._objects.delete(self._path(event_id))

    async def owed(self) -> list[Event]:
        """The events of this janitor, the oldest first. Raises StoreUnavailable."""
        found: list[Event] = []
        for path in sorted(await self._objects.list(_ACTS)):
            if not path.startswith(self._prefix):
                continue
            try:
                found.append(decode_event(await self._objects.get(path)))
            except InvalidArgument as error:
                log.error("no event of an act: %s", error, extra={"path": path})
        return found

    def _path(self, event_id: str) -> str:
        return f"{self._prefix}{event_id}.json"


class OwedEvents(RunEvents):
    """What a relay publishes of one janitor, as libs.events.relay.EventSource.

    Attributes:
        position: How many looks at runs were published, or found nothing owed.
        lost_count: Always 0, except for runs that the history has forgotten.
    """

    lost_count: Final = 0

    def __init__(
        self, store: RunStore, acts: ActStore, number: int, source: str, *, keeps: bool
    ) -> None:
        """Without `keeps`, as in `fire-and-forget`, runs get no mark."""
        self._act_store = acts
        self.mark = EVENTS_OWED if keeps else ""
        self.position = 0
        self._store = store
        self._number = number
        self._source = source
        self._waiting: deque[str] = deque()
        self._woken = asyncio.Event()
        self._begun: set[str] = set()
        self._unmarked: dict[str, None] = {}
        self._acts: dict[str, Event] = {}
        self._published_acts: list[str] = []
        self._is_read = not keeps

    @property
    def lag(self) -> int:
        """How many looks at runs wait."""
        return len(self._waiting)

    @property
    def end(self) -> int:
        return self.position + self.lag

    def changed(self, run: Run) -> None:
        self._waiting.append(run.run_id)
        self._woken.set()

    def acted(self, event: Event) -> None:
        """Queue the event of an act, which is stored where runs get a mark."""
        self._acts[event.id] = event
        self._waiting.append(event.id)
        self._woken.set()

    def save(self) -> None:
        """Does nothing: `batches` marks what is published."""

    # --- For the relay --------------------------------------------------------

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        """Raises StoreUnavailable."""
        if not self._is_read:
            await self._read_owed()
            self._is_read = True
        while True:
            await self._mark_published()
            self._woken.clear()
            if not self._waiting:
                await self._woken.wait()
            act = self._acts.get(self._waiting[0])
            if act is not None:
                at_ms = parse_timestamp("timestamp", act.timestamp)
                yield EventBatch([act], self.position + 1, at_ms)
                continue
            run = await self._first()
            if run is None:
                yield EventBatch([], self.position + 1, 0)
                continue
            yield EventBatch(self._events_of(run), self.position + 1, run.created_at_ms)
            if run.ended:
                self._begun.discard(run.run_id)
                self._unmarked[run.run_id] = None
            elif run.started_at_ms:
                self._begun.add(run.run_id)

    def done(self, position: int) -> None:
        self.position = position
        published = self._waiting.popleft()
        if self._acts.pop(published, None) is not None and self.mark:
            self._published_acts.append(published)

    def skip_to_end(self) -> int:
        count = len(self._waiting)
        self._waiting.clear()
        self._acts.clear()
        return count

    # --- Runs -----------------------------------------------------------------

    async def _read_owed(self) -> None:
        """Queue what earlier processes left, the oldest first, before what came since the start."""
        owed: list[str] = []
        for stored in reversed(await self._store.read(await self._store.ids())):
            run = stored.run
            is_ours = run.janitor == self._number and run.events == EVENTS_OWED
            if is_ours and (run.started_at_ms or run.ended):
                owed.append(run.run_id)
        for act in await self._act_store.owed():
            if act.id not in self._acts:
                self._acts[act.id] = act
                owed.append(act.id)
        self._waiting.extendleft(reversed([one for one in owed if one not in self._waiting]))

    async def _first(self) -> Run | None:
        try:
            return (await self._store.get(self._waiting[0])).run
        except (ObjectNotFound, ValueError) as error:
            log.error("no events of a run: %s", error, extra={"run": self._waiting[0]})
            return None

    async def _mark_published(self) -> None:
        while self._published_acts:
            await self._act_store.delete(self._published_acts[-1])
            self._published_acts.pop()
        while self._unmarked:
            run_id = next(iter(self._unmarked))
            try:
                stored = await self._store.get(run_id)
            except (ObjectNotFound, ValueError) as error:
                log.error("a run is not marked as published: %s", error, extra={"run": run_id})
                del self._unmarked[run_id]
                continue
            published = replace(stored.run, events=EVENTS_PUBLISHED)
            # Where another process has just written it: once more.
            if stored.run.events != EVENTS_OWED or await self._store.save(stored, published):
                del self._unmarked[run_id]

    def _events_of(self, run: Run) -> list[Event]:
        if run.events == EVENTS_PUBLISHED:
            return []
        found: list[Event] = []
        if run.started_at_ms and run.run_id not in self._begun:
            begun = JanitorRunStarted(run_id=run.run_id, job=run.ask.job, dry_run=run.ask.dry_run)
            found.append(self._event(run, begun, run.started_at_ms))
        if run.ended:
            removed = sum(n for name, n in run.counts.items() if name.endswith(_REMOVED))
            finished = JanitorRunFinished(
                run_id=run.run_id,
                job=run.ask.job,
                state=run.state,
                removed=0 if run.ask.dry_run else removed,
                error=run.error,
            )
            found.append(self._event(run, finished, run.ended_at_ms))
        return found

    def _event(self, run: Run, data: EventData, at_ms: int) -> Event:
        event_id = derive_event_id(at_ms, run.run_id, data.event_type)
        return make_event(
            data, source=self._source, request_id=run.request_id, at_ms=at_ms, event_id=event_id
        )


class JanitorRelay(ProcessRelay):
    """Publishes the events of a janitor, of its runs and of acts, from `begin` until `stop`."""

    def __init__(
        self,
        settings: QueueSettings,
        telemetry: Telemetry,
        store: RunStore,
        objects: Objects,
        number: int,
    ) -> None:
        super().__init__(settings, telemetry)
        self._name = f"janitor-{number}"
        self._acts = ActStore(objects, number)
        self._storing: set[asyncio.Task[None]] = set()
        self.events = OwedEvents(store, self._acts, number, self._name, keeps=self.keeps)

    def record(self, happening: Happening, request_id: str) -> None:
        event = make_event(
            happening.data, source=self._name, request_id=request_id, at_ms=happening.at_ms
        )
        storing = asyncio.create_task(self._store(event))
        self._storing.add(storing)
        storing.add_done_callback(self._storing.discard)

    async def stop(self) -> None:
        await asyncio.gather(*self._storing)
        await super().stop()

    async def _store(self, event: Event) -> None:
        try:
            if self.keeps:
                await self._acts.put(event)
        except StorageError as error:
            log.error("no event of an act: %s", error, extra=event.data)
            return
        self.events.acted(event)
