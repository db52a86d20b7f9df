"""What a shard reports of its changes: nothing, as in direct mode. See `RecordedEvents`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from libs.storage.layout.primitives import RowChange
from services.broker.core.commands import Purge

if TYPE_CHECKING:
    from services.broker.core.queue import Queue


class ShardEvents:
    """Called by commands, once what they change is certain; all of it goes into one commit.

    Times are ms by the broker's clock.
    """

    def created(self, queue: Queue, now_ms: int) -> None:
        pass

    def updated(self, queue: Queue, now_ms: int) -> None:
        pass

    def deleted(self, queue: Queue, now_ms: int) -> None:
        pass

    def paused(self, queue: Queue, now_ms: int) -> None:
        """A queue was paused, or resumed."""

    def purged(self, queue: Queue, kinds: Collection[Purge], count: int, now_ms: int) -> None:
        """Lists of a queue were emptied, of `count` messages. See also `collect`."""

    def cancelled(self, queue: Queue, message_id: int, now_ms: int) -> None:
        """A message was removed before it was claimed."""

    def rescheduled(self, queue: Queue, message_id: int, visible_at_ms: int, now_ms: int) -> None:
        """A message that waits has another time."""

    def redriven(
        self,
        queue: Queue,
        target_id: str,
        message_ids: Iterable[int],
        now_ms: int,
        request_id: str = "",
    ) -> None:
        """Dead letters of a queue have gone into a target."""

    def collect(self, queues: Iterable[Queue]) -> None:
        """Looks for new dead letters of these queues, before their list is written or emptied."""

    def take_rows(self) -> Sequence[RowChange]:
        """The rows of what happened since the last commit."""
        return ()
