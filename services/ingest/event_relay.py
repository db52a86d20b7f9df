"""The relay of one ingest: its log, the backend, what is measured. Loaded where events are on."""

from __future__ import annotations

import asyncio
from typing import Final

from opentelemetry.metrics import CallbackOptions, Observation

from libs.events.backends import open_backend
from libs.events.deliveries import end_task
from libs.events.measured import LOOK_S, MeasuredBackend, QueueHealth
from libs.events.relay import Relay
from libs.events.settings import QueueSettings
from libs.serving.exits import ExitCause, FatalError
from libs.serving.telemetry import Telemetry
from libs.storage.errors import StorageError
from services.ingest.config import IngestConfig
from services.ingest.published_events import PublishedEvents
from services.ingest.purge_rules import Unannounced
from services.ingest.shard import Shard
from slatemq.errors import InvalidArgument
from slatemq.v1.events_pb2 import GetEventsStatusResponse

__all__ = ["IngestRelay", "hold_for"]

_BACKEND: Final = "slatemq.queue.backend"


def hold_for(shard: Shard, source: PublishedEvents, hold_ms: int) -> None:
    """Keep messages from being purged for so long after their receipt while they have no event."""
    shard.purger.unannounced = lambda now_ms: Unannounced(source.position, now_ms - hold_ms)
    shard.purger.on_lost = source.lose


class IngestRelay:
    """Publishes the events of a shard from `start` until `stop`."""

    def __init__(self, config: IngestConfig, settings: QueueSettings, telemetry: Telemetry) -> None:
        """Load the backend's client, which takes a while; raises FatalError where it is missing."""
        try:
            inner = open_backend(settings.backend)
        except ImportError as error:
            cause = ExitCause.usage(f"queue.backend: {settings.backend} cannot be used: {error}")
            raise FatalError(cause) from error
        self._config = config
        self._settings = settings
        self._backend = MeasuredBackend(inner, settings.backend, telemetry.meter)
        self._is_measured = telemetry.enabled
        self._attributes = {_BACKEND: settings.backend}
        self._begun: _Begun | None = None
        meter = telemetry.meter
        meter.create_observable_gauge(
            "slatemq.queue.lag",
            callbacks=[self._observe_lag],
            description="Messages whose events are not published yet",
        )
        meter.create_observable_gauge(
            "slatemq.queue.lag_ms",
            callbacks=[self._observe_age],
            description="ms since the receipt of the first of these",
        )
        meter.create_observable_gauge(
            "slatemq.queue.lost",
            callbacks=[self._observe_lost],
            description="Messages without an event: purged before, or given up (fire-and-forget)",
        )

    async def start(self, shard: Shard) -> None:
        """Begin where the cursor stands. Raises the errors of libs.storage."""
        config, keeps = self._config, self._settings.consistency != "fire-and-forget"
        name = f"ingest-{config.shard}"
        source = await PublishedEvents.open(
            shard, config.shard, name, self._settings.backend, from_end=not keeps
        )
        if keeps:
            hold_for(shard, source, config.events_hold_s * 1000)
        relay = Relay(self._settings, self._backend, source, (StorageError,))
        self._begun = _Begun(shard, source, relay)
        if self._is_measured:
            self._begun.looking = asyncio.create_task(self._look())

    async def wait_fatal(self) -> ExitCause:
        """Return once it is certain that a setting is wrong; raises what else ended it."""
        try:
            await asyncio.shield(self._running.task)
        except InvalidArgument as error:
            return ExitCause.usage(error.message)
        return ExitCause.failed("the relay of events ended")

    async def stop(self) -> None:
        """End it, and put its cursor into the shard's last commit."""
        if self._begun is None:
            return
        for task in (self._begun.looking, self._begun.task):
            if task is not None and not task.done():
                await end_task(task)
        self._begun.source.save()

    async def health(self) -> QueueHealth:
        """For `GET /health`."""
        if self._begun is None or not self._begun.relay.is_open:
            return QueueHealth(self._settings.backend, False, 0, 0)
        return await self._backend.health()

    async def status(self) -> GetEventsStatusResponse:
        """Where it stands; asks the backend."""
        begun = self._running
        answering = await begun.relay.answers()
        counts = begun.relay.counts
        return GetEventsStatusResponse(
            enabled=True,
            backend=self._settings.backend,
            consistency=self._settings.consistency,
            answering=answering,
            cursor=begun.source.position,
            durable_sequence=begun.shard.log.end.last_message_id,
            lag_count=begun.source.lag,
            lag_ms=begun.lag_ms,
            published_count=counts.published,
            failed_count=counts.failed,
            dropped_count=counts.dropped,
            lost_count=begun.source.lost_count,
            last_error=counts.error,
        )

    @property
    def _running(self) -> _Begun:
        assert self._begun is not None, "not started"
        return self._begun

    async def _look(self) -> None:
        """Look at the backend now and then, for its gauges."""
        while True:
            await self.health()
            await asyncio.sleep(LOOK_S)

    def _observe_lag(self, _: CallbackOptions) -> list[Observation]:
        return [] if self._begun is None else [self._observation(self._begun.source.lag)]

    def _observe_age(self, _: CallbackOptions) -> list[Observation]:
        return [] if self._begun is None else [self._observation(self._begun.lag_ms)]

    def _observe_lost(self, _: CallbackOptions) -> list[Observation]:
        if self._begun is None:
            return []
        lost = self._begun.source.lost_count + self._begun.relay.counts.dropped
        return [self._observation(lost)]

    def _observation(self, value: int) -> Observation:
        return Observation(value, self._attributes)


class _Begun:
    """What there is from the start on."""

    def __init__(self, shard: Shard, source: PublishedEvents, relay: Relay) -> None:
        """Begin to publish."""
        self.shard = shard
        self.source = source
        self.relay = relay
        self.task = asyncio.create_task(relay.run())
        self.looking: asyncio.Task[None] | None = None

    @property
    def lag_ms(self) -> int:
        """How long ago the first message was received whose event is being published."""
        since_ms = self.relay.counts.waiting_since_ms
        return max(0, self.shard.clock.now_ms() - since_ms) if since_ms else 0
