"""The events of one ingest, of its log, of edits and of acts, and their relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from libs.events.relay import EventBatch
from libs.events.settings import QueueSettings
from libs.serving.events.outbox import Happening, OutboxEvents, current_request
from libs.serving.events.relay import ProcessRelay
from libs.serving.telemetry import Telemetry
from libs.storage.layout.primitives import RowChange
from services.ingest.config import IngestConfig
from services.ingest.edit.purge_rules import Unannounced
from services.ingest.events.published_events import PublishedEvents
from services.ingest.shard import Shard
from slatemq._cancelling import end_all
from slatemq.events.catalogue import MessageEdited

T = TypeVar("T")


class ShardEvents:
    """The events of the log and those of edits, in the order of the commits: one EventSource.

    The row of an edit, as of an act, says where the log ended then. So its event follows those of
    all messages up to there, the edited one among them, and comes before those behind.
    """

    def __init__(self, published: PublishedEvents, edited: OutboxEvents) -> None:
        self._published = published
        self._edited = edited
        self._current: PublishedEvents | OutboxEvents = published

    @property
    def lost_count(self) -> int:
        return self._published.lost_count

    @property
    def position(self) -> int:
        return self._published.position

    @property
    def end(self) -> int:
        return self._published.end

    @property
    def lag(self) -> int:
        return self._published.lag + self._edited.lag

    def save(self) -> None:
        self._published.save()
        self._edited.save()

    def done(self, position: int) -> None:
        self._current.done(position)

    def skip_to_end(self) -> int:
        return self._published.skip_to_end() + self._edited.skip_to_end()

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        async with (
            aclosing(self._published.batches()) as published,
            aclosing(self._edited.batches_after()) as edited,
        ):
            messages, edits = _Lookahead(published), _Lookahead(edited)
            try:
                while True:
                    await asyncio.wait(
                        {messages.begin(), edits.begin()}, return_when=asyncio.FIRST_COMPLETED
                    )
                    if self._edited.waits:
                        # It may come before messages that are here already.
                        await asyncio.wait({edits.begin()})
                    edit = edits.peek()
                    if edit is not None and edit.after <= self._published.position:
                        self._current = self._edited
                        yield edits.take().batch
                        continue
                    await asyncio.wait({messages.begin()})
                    batch = messages.take()
                    if edit is not None and edit.after < batch.position:
                        batch, behind = _split(batch, edit.after)
                        messages.requeue(behind)
                    self._current = self._published
                    yield batch
            finally:
                await messages.close()
                await edits.close()


class _Lookahead(Generic[T]):
    """The next one of a stream, which is not asked for before the last one is done."""

    def __init__(self, stream: AsyncGenerator[T, None]) -> None:
        self._stream = stream
        self._task: asyncio.Future[T] | None = None

    def begin(self) -> asyncio.Future[Any]:
        """The task that has it, or will."""
        if self._task is None:
            self._task = asyncio.ensure_future(anext(self._stream))
        return self._task

    def peek(self) -> T | None:
        """The next one, where it is here. Raises as the stream does."""
        return self._task.result() if self._task is not None and self._task.done() else None

    def take(self) -> T:
        assert self._task is not None, "begun"
        found = self._task.result()
        self._task = None
        return found

    def requeue(self, one: T) -> None:
        """Give this one next."""
        self._task = asyncio.get_running_loop().create_future()
        self._task.set_result(one)

    async def close(self) -> None:
        if self._task is not None:
            await end_all([self._task])


def _split(batch: EventBatch, after: int) -> tuple[EventBatch, EventBatch]:
    """The events of the messages up to `after`, and the others."""
    before = [event for event in batch.events if event.data["message_id"] <= after]
    behind = batch.events[len(before) :]
    return batch._replace(events=before, position=after), batch._replace(events=behind)


def hold_for(shard: Shard, source: PublishedEvents, hold_ms: int) -> None:
    """Keep messages from being purged for so long after their receipt while they have no event."""
    shard.purger.unannounced = lambda now_ms: Unannounced(source.position, now_ms - hold_ms)
    shard.purger.on_lost = source.lose


class IngestRelay(ProcessRelay):
    def __init__(
        self,
        config: IngestConfig,
        settings: QueueSettings,
        telemetry: Telemetry,
        *,
        task_refusal: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(settings, telemetry, task_refusal=task_refusal)
        self._config = config
        self._backend_name = settings.backend
        self._shard: Shard
        self._edited: OutboxEvents

    async def start(self, shard: Shard) -> None:
        """Begin where the cursor stands. Raises the errors of libs.storage."""
        config = self._config
        name = f"ingest-{config.shard}"
        published = await PublishedEvents.open(
            shard, config.shard, name, self._backend_name, from_end=not self.keeps
        )
        if self.keeps:
            hold_for(shard, published, config.events_hold_s * 1000)
        self._shard = shard
        self._edited = await open_edited(shard, name, from_end=not self.keeps)
        self.begin(ShardEvents(published, self._edited), shard.clock.now_ms)

    def record(self, happening: Happening, request_id: str) -> None:
        self._shard.publisher.put(rows_of(self._edited, self._shard, happening, request_id))


async def open_edited(shard: Shard, name: str, *, from_end: bool) -> OutboxEvents:
    """The events of edits, which are recorded from now on. Raises the errors of libs.storage."""
    publisher = shard.publisher
    events = await OutboxEvents.open(
        name,
        shard.database,
        publisher.commits.durable,
        publisher.put,
        from_end=from_end,
    )

    def record(message_id: int, queue_id: str, payload_bytes: int) -> Sequence[RowChange]:
        data = MessageEdited(message_id=message_id, queue=queue_id, size=payload_bytes)
        return rows_of(events, shard, Happening(shard.clock.now_ms(), data), current_request())

    shard.replacer.on_edited = record
    return events


def rows_of(
    events: OutboxEvents, shard: Shard, happening: Happening, request_id: str
) -> Sequence[RowChange]:
    """The rows of an event that comes behind those of all messages up to now."""
    events.outbox.record([happening], request_id, after=shard.log.end.last_message_id)
    return events.outbox.take_rows()
