"""The relay of one broker: what its commands have changed. Loaded where events are on."""

from __future__ import annotations

from collections.abc import Callable

from libs.events.settings import QueueSettings
from libs.events.slatemq.headers import BACKEND_HEADERS
from libs.serving.events.outbox import OutboxEvents
from libs.serving.events.relay import ProcessRelay
from libs.serving.telemetry import Telemetry
from libs.storage.database.slate import Database
from services.broker.events.recorded_events import RecordedEvents
from services.broker.shard.owner import ShardOwner

__all__ = ["BrokerRelay"]


class BrokerRelay(ProcessRelay):
    """Publishes the events of a shard from `begin_publishing` until `stop`."""

    def __init__(self, name: str, settings: QueueSettings, telemetry: Telemetry) -> None:
        """`name` is that of the process, in its events."""
        super().__init__(settings, telemetry)
        self._name = name
        self._events: OutboxEvents
        self._now_ms: Callable[[], int]
        self._own_headers = BACKEND_HEADERS if settings.backend == "slatemq" else ()

    async def record(self, owner: ShardOwner, database: Database) -> None:
        """Record what the shard does from now on. Raises the errors of libs.storage."""
        events = await OutboxEvents.open(
            self._name, database, owner.durable, owner.delete_rows, from_end=not self.keeps
        )
        owner.shard.events = RecordedEvents(events.outbox, self._own_headers)
        self._events, self._now_ms = events, owner.clock.now_ms

    def begin_publishing(self) -> None:
        """Publish what waits, and what is recorded."""
        self.begin(self._events, self._now_ms)
