"""The events of a broker shard's changes, and their relay. Loaded where events are on.

With the backend `slatemq`, queues whose filters name the headers of its events or tasks have no
events: each would make another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from libs.events.settings import QueueSettings
from libs.events.slatemq.headers import BACKEND_HEADERS
from libs.serving.events.outbox import EventOutbox, Happening, OutboxEvents, current_request
from libs.serving.events.relay import ProcessRelay
from libs.serving.telemetry import Telemetry
from libs.storage.database.slate import Database
from libs.storage.layout.primitives import RowChange
from services.broker.core.changes import ShardEvents
from services.broker.core.commands import Purge
from services.broker.core.queue import Queue
from services.broker.shard.owner import ShardOwner
from slatemq.events.catalogue import (
    EventData,
    MessageCancelled,
    MessageDeadLettered,
    MessageRedriven,
    MessageRescheduled,
    QueueCreated,
    QueueDeleted,
    QueuePaused,
    QueuePurged,
    QueueResumed,
    QueueUpdated,
)
from slatemq.events.envelope import format_timestamp


class RecordedEvents(ShardEvents):
    """Makes rows of events. Those of one queue are in the order of its commands."""

    def __init__(self, outbox: EventOutbox, own_headers: Collection[str]) -> None:
        """Record in this outbox; see above for `own_headers`."""
        self._outbox = outbox
        self._own_headers = own_headers

    def created(self, queue: Queue, now_ms: int) -> None:
        self._record_settings(QueueCreated, queue, now_ms)

    def updated(self, queue: Queue, now_ms: int) -> None:
        self._record_settings(QueueUpdated, queue, now_ms)

    def deleted(self, queue: Queue, now_ms: int) -> None:
        if _speaks_for_queue(queue):
            self._record(queue, QueueDeleted(queue=queue.queue_id), now_ms)

    def paused(self, queue: Queue, now_ms: int) -> None:
        if _speaks_for_queue(queue):
            kind = QueuePaused if queue.settings.paused else QueueResumed
            self._record(queue, kind(queue=queue.queue_id), now_ms)

    def purged(self, queue: Queue, kinds: Collection[Purge], count: int, now_ms: int) -> None:
        if not count:
            return
        states = [state for kind in Purge if kind in kinds for state in kind.value]
        data = QueuePurged(queue=queue.queue_id, states=states, messages=count)
        self._record(queue, data, now_ms)

    def cancelled(self, queue: Queue, message_id: int, now_ms: int) -> None:
        data = MessageCancelled(message_id=message_id, queue=queue.queue_id)
        self._record(queue, data, now_ms)

    def rescheduled(self, queue: Queue, message_id: int, visible_at_ms: int, now_ms: int) -> None:
        visible_at = format_timestamp(visible_at_ms or now_ms)
        data = MessageRescheduled(
            message_id=message_id, queue=queue.queue_id, visible_at=visible_at
        )
        self._record(queue, data, now_ms)

    def redriven(
        self,
        queue: Queue,
        target_id: str,
        message_ids: Iterable[int],
        now_ms: int,
        request_id: str = "",
    ) -> None:
        if self._is_own(queue):
            return
        moved = [
            Happening(
                now_ms, MessageRedriven(message_id=one, queue=queue.queue_id, target=target_id)
            )
            for one in message_ids
        ]
        self.collect((queue,))
        self._outbox.record(moved, request_id or current_request())

    def collect(self, queues: Iterable[Queue]) -> None:
        for queue in queues:
            dead_letters = queue.failed.take_unseen() if queue.failed.has_new else ()
            if not dead_letters or self._is_own(queue):
                continue
            queue_id = queue.queue_id
            self._outbox.record(
                [
                    Happening(
                        dead_letter.failed_at_ms,
                        MessageDeadLettered(
                            message_id=dead_letter.message_id,
                            queue=queue_id,
                            attempts=dead_letter.attempts,
                            reason=dead_letter.reason,
                        ),
                    )
                    for dead_letter in dead_letters
                ]
            )

    def take_rows(self) -> Sequence[RowChange]:
        return self._outbox.take_rows()

    def _record_settings(
        self, kind: type[QueueCreated | QueueUpdated], queue: Queue, now_ms: int
    ) -> None:
        if not _speaks_for_queue(queue):
            return
        settings = queue.settings
        data = kind(
            queue=queue.queue_id,
            filter=settings.filter,
            priority=settings.priority,
            max_attempts=settings.max_attempts,
            revision=settings.revision,
        )
        self._record(queue, data, now_ms)

    def _record(self, queue: Queue, data: EventData, now_ms: int) -> None:
        if not self._is_own(queue):
            self.collect((queue,))
            self._outbox.record([Happening(now_ms, data)], current_request())

    def _is_own(self, queue: Queue) -> bool:
        return any(header in queue.settings.filter for header in self._own_headers)


def _speaks_for_queue(queue: Queue) -> bool:
    """Whether changes of the whole queue are this shard's to report: of partitions the first's."""
    partition = queue.settings.partition
    return partition is None or partition.index == 0


class BrokerRelay(ProcessRelay):
    """Publishes the events of a shard from `begin_publishing` until `stop`."""

    def __init__(self, name: str, settings: QueueSettings, telemetry: Telemetry) -> None:
        """`name` is that of the process, in its events."""
        super().__init__(settings, telemetry)
        self._name = name
        self._owner: ShardOwner
        self._events: OutboxEvents
        self._own_headers = BACKEND_HEADERS if settings.backend == "slatemq" else ()

    async def record_changes(self, owner: ShardOwner, database: Database) -> None:
        """Record what the shard does from now on. Raises the errors of libs.storage."""
        events = await OutboxEvents.open(
            self._name, database, owner.durable, owner.write_rows, from_end=not self.keeps
        )
        owner.shard.events = RecordedEvents(events.outbox, self._own_headers)
        self._owner, self._events = owner, events

    def begin_publishing(self) -> None:
        """Publish what waits, and what is recorded."""
        self.begin(self._events, self._owner.clock.now_ms)

    def record(self, happening: Happening, request_id: str) -> None:
        self._events.outbox.record([happening], request_id)
        self._owner.write_rows(self._events.outbox.take_rows())
