"""The relay of one process: source, backend, what is measured. Loaded where events are on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from opentelemetry.metrics import CallbackOptions, Observation

from libs.access.audit import Act
from libs.events.backends import open_backend
from libs.events.deliveries import end_task
from libs.events.measures import BACKEND
from libs.events.relay import EventSource, Relay
from libs.events.settings import QueueSettings
from libs.events.watch import LOOK_S, BackendWatch, QueueHealth
from libs.serving.events.outbox import Happening
from libs.serving.process.exits import ExitCause, FatalError
from libs.serving.telemetry import Telemetry
from libs.storage.errors import StorageError
from slatemq.errors import InvalidArgument
from slatemq.events.catalogue import AccessAct
from slatemq.v1.events_pb2 import GetEventsStatusResponse

log = logging.getLogger(__name__)


class CountedSource(EventSource, Protocol):
    @property
    def lost_count(self) -> int:
        """Events that can no longer be made."""
        ...

    @property
    def position(self) -> int:
        """The last change whose event is published."""
        ...

    @property
    def end(self) -> int:
        """The last change."""
        ...

    @property
    def lag(self) -> int: ...

    def save(self) -> None:
        """Bring the position into the commit that gathers."""
        ...


class ProcessRelay:
    """Publishes the events of a process from `begin` until `stop`.

    Attributes:
        keeps: Whether no event is given up: not in `fire-and-forget`.
    """

    def __init__(
        self,
        settings: QueueSettings,
        telemetry: Telemetry,
        *,
        task_refusal: Callable[[], str] | None = None,
    ) -> None:
        """Load the backend's client, which takes a while; raises FatalError where it is missing.

        `task_refusal`: what the backend refuses of tasks; the backend's state is that of the tasks
        then, and known without this one.
        """
        try:
            self._backend = open_backend(settings.backend, telemetry.meter)
        except ImportError as error:
            name = settings.backend
            raise FatalError.usage(
                f"queue.backend: the client of {name} is not installed: see "
                f"docs/how-to/backend-{name}.md ({error})"
            ) from error
        self.keeps = settings.consistency != "fire-and-forget"
        self._settings = settings
        self._watch = BackendWatch(
            self._backend, settings.backend, telemetry.meter, has_gauges=task_refusal is None
        )
        self._is_measured = telemetry.enabled and task_refusal is None
        self._task_refusal = task_refusal or str
        self._attributes = {BACKEND: settings.backend}
        self._begun: _Begun | None = None

        def gauge(name: str, measure: Callable[[_Begun], int], description: str) -> None:
            telemetry.meter.create_observable_gauge(
                name, callbacks=[partial(self._observe, measure)], description=description
            )

        gauge(
            "slatemq.queue.lag", lambda begun: begun.source.lag, "Events that are not published yet"
        )
        gauge(
            "slatemq.queue.lag_ms",
            lambda begun: begun.lag_ms,
            "ms since the change of the first of these",
        )
        gauge(
            "slatemq.queue.refused",
            lambda _: int(bool(self.refusal or self._task_refusal())),
            "1 while the backend refuses a setting, events or tasks",
        )
        telemetry.meter.create_observable_counter(
            "slatemq.queue.lost",
            callbacks=[partial(self._observe, lambda begun: begun.lost_count)],
            description="Events that were lost: messages purged before, or given up",
        )

    def begin(self, source: CountedSource, now_ms: Callable[[], int]) -> None:
        """Begin to publish the source's events; `now_ms` is the clock of its changes."""
        relay = Relay(self._settings, self._backend, source, (StorageError,))
        self._begun = _Begun(source, relay, now_ms)
        if self._is_measured:
            self._begun.looking = asyncio.create_task(self._look())

    def publish_act(self, act: Act) -> None:
        """Make an event of what a caller did."""
        if self._begun is None:
            return
        data = AccessAct(
            principal=act.principal,
            proof=act.proof,
            act=act.act,
            subjects=list(act.subjects),
            details=list(act.details),
            peer=act.peer,
            outcome=act.outcome,
            held_back=act.held_back,
        )
        try:
            self.record(Happening(self._begun.now_ms(), data), act.request_id)
        except StorageError as error:
            log.error("no event of an act: %s", error, extra={"act": act.act})

    def record(self, happening: Happening, request_id: str) -> None:
        """Store an event of this process. Raises StorageError."""
        raise NotImplementedError

    async def wait_fatal(self) -> ExitCause:
        """Return once a setting has proven wrong; raises what else ended it."""
        try:
            await asyncio.shield(self._running.task)
        except InvalidArgument as error:
            return ExitCause.usage(error.message)
        return ExitCause.failed("the relay of events ended")

    async def stop(self) -> None:
        """Stop publishing, and put the position into the last commit."""
        if self._begun is None:
            return
        for task in (self._begun.looking, self._begun.task):
            if task is not None and not task.done():
                await end_task(task)
        self._begun.source.save()

    @property
    def note(self) -> str:
        """What an operator should know; empty: nothing."""
        refusals = {
            "no events are published": self.refusal,
            "tasks are refused": self._task_refusal(),
        }
        return "; ".join(f"{what}: {why}" for what, why in refusals.items() if why)

    @property
    def refusal(self) -> str:
        """What the backend refuses of events, or of the settings; empty: nothing."""
        setting = self._begun.relay.counts.refusal if self._begun is not None else ""
        return f"{self._settings.backend} refuses {setting}" if setting else self._backend.refusal

    async def health(self) -> QueueHealth:
        if self._begun is None or not self._begun.relay.is_open:
            return QueueHealth(self._settings.backend, False)
        health = await self._watch.health()
        return replace(health, connected=health.connected and not self.refusal)

    async def status(self) -> GetEventsStatusResponse:
        begun = self._running
        answering = await begun.relay.answers()
        counts, source = begun.relay.counts, begun.source
        refusal = self.refusal or self._task_refusal()
        return GetEventsStatusResponse(
            enabled=True,
            backend=self._settings.backend,
            consistency=self._settings.consistency,
            answering=answering and not refusal,
            cursor=source.position,
            durable_sequence=source.end,
            lag_count=source.lag,
            lag_ms=begun.lag_ms,
            published_count=counts.published,
            failed_count=counts.failed,
            dropped_count=counts.dropped,
            lost_count=source.lost_count,
            last_error=refusal or counts.error,
        )

    @property
    def _running(self) -> _Begun:
        assert self._begun is not None, "not started"
        return self._begun

    async def _look(self) -> None:
        """Poll the backend for its gauges."""
        while True:
            await self.health()
            await asyncio.sleep(LOOK_S)

    def _observe(self, measure: Callable[[_Begun], int], _: CallbackOptions) -> list[Observation]:
        if self._begun is None:
            return []
        return [Observation(measure(self._begun), self._attributes)]


class _Begun:
    def __init__(self, source: CountedSource, relay: Relay, now_ms: Callable[[], int]) -> None:
        self.source = source
        self.relay = relay
        self.task = asyncio.create_task(relay.run())
        self.looking: asyncio.Task[None] | None = None
        self.now_ms = now_ms
        self._lost_before = source.lost_count

    @property
    def lost_count(self) -> int:
        """Events that were lost since the start; the source counts them from its first one on."""
        return self.source.lost_count - self._lost_before + self.relay.counts.dropped

    @property
    def lag_ms(self) -> int:
        """The age of the change whose event is being published."""
        since_ms = self.relay.counts.waiting_since_ms
        return max(0, self.now_ms() - since_ms) if since_ms else 0
