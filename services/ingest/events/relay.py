"""The relay of one ingest: its messages and its edits. Loaded where events are on."""

from __future__ import annotations

from collections.abc import Sequence

from libs.events.settings import QueueSettings
from libs.serving.events.outbox import Happening, OutboxEvents, current_request
from libs.serving.events.relay import ProcessRelay
from libs.serving.telemetry import Telemetry
from services.ingest.config import IngestConfig
from services.ingest.edit.changes import Record
from services.ingest.edit.purge_rules import Unannounced
from services.ingest.events.published_events import PublishedEvents
from services.ingest.events.shard_events import ShardEvents
from services.ingest.shard import Shard
from slatemq.events.catalogue import MessageEdited

__all__ = ["IngestRelay", "hold_for"]


def hold_for(shard: Shard, source: PublishedEvents, hold_ms: int) -> None:
    """Keep messages from being purged for so long after their receipt while they have no event."""
    shard.purger.unannounced = lambda now_ms: Unannounced(source.position, now_ms - hold_ms)
    shard.purger.on_lost = source.lose


class IngestRelay(ProcessRelay):
    """Publishes the events of a shard from `start` until `stop`."""

    def __init__(
        self,
        config: IngestConfig,
        settings: QueueSettings,
        telemetry: Telemetry,
        *,
        beside_tasks: bool = False,
    ) -> None:
        super().__init__(settings, telemetry, beside_tasks=beside_tasks)
        self._config = config
        self._backend_name = settings.backend

    async def start(self, shard: Shard) -> None:
        """Begin where the cursor stands. Raises the errors of libs.storage."""
        config = self._config
        name = f"ingest-{config.shard}"
        published = await PublishedEvents.open(
            shard, config.shard, name, self._backend_name, from_end=not self.keeps
        )
        if self.keeps:
            hold_for(shard, published, config.events_hold_s * 1000)
        edited = await open_edited(shard, name, from_end=not self.keeps)
        self.begin(ShardEvents(published, edited), shard.clock.now_ms)


async def open_edited(shard: Shard, name: str, *, from_end: bool) -> OutboxEvents:
    """The events of edits, which are recorded from now on. Raises the errors of libs.storage."""
    publisher = shard.publisher
    events = await OutboxEvents.open(
        name,
        shard.database,
        publisher.commits.durable,
        lambda keys: publisher.put([(key, None) for key in keys], _nothing),
        from_end=from_end,
    )

    def record(message_id: int, queue_id: str, payload_bytes: int) -> Sequence[Record]:
        data = MessageEdited(message_id=message_id, queue=queue_id, size=payload_bytes)
        edit = Happening(shard.clock.now_ms(), data)
        events.outbox.record([edit], current_request(), after=shard.log.end.last_message_id)
        return events.outbox.take_rows()

    shard.replacer.on_edited = record
    return events


def _nothing() -> None:
    """No caller waits for rows to be deleted."""
