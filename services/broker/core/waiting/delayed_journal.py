"""The journal of delayed messages, read by the watchers of a queue.

A commit that routes delayed messages to a queue writes one more row, under an order above all
others of the queue. So rows are in the order of routing, and a reader that has read up to an order
has missed nothing. A queue without delayed messages has no rows, and pays nothing.

The orders have the epoch of the queue's lanes: a purge makes the rows garbage too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from libs.storage.layout.buckets import order_of, split_order
from libs.storage.layout.own_keys import delayed_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.delayed_records import DelayedMessage, encode_delayed

ROW_MAX: Final = 1000
"""Messages in one row at most: a row is read whole."""


class DelayedJournal:
    """What one queue has to write, and how far it has written."""

    __slots__ = ("_coming", "durable_order", "first_order", "last_order")

    def __init__(self, durable_order: int = 0) -> None:
        self.durable_order = durable_order
        """Rows of higher orders may not be durable: they must not be reported yet."""
        self.first_order = 0
        """No row has a lower one, as far as is known."""
        self.last_order = 0
        """The highest one written, durable or not; 0 until it is known after a start."""
        self._coming: list[DelayedMessage] = []

    def first_in(self, epoch: int) -> int:
        """No row of this epoch has a lower order."""
        first = order_of(epoch, 0, 0)
        return max(first, self.first_order) if _is_of(self.first_order, epoch) else first

    def last_in(self, epoch: int) -> int:
        """No row of this epoch has a higher order, once `last_order` is known."""
        return self.last_order if _is_of(self.last_order, epoch) else 0

    def durable_in(self, epoch: int) -> int:
        """The rows of this epoch up to this order are durable."""
        return self.durable_order if _is_of(self.durable_order, epoch) else 0

    def begin(self, epoch: int) -> None:
        """Notes that nothing was written in this epoch, so that nothing has to be read."""
        self.found(max(order_of(epoch, 0, 0), 1))

    def found(self, last_order: int) -> None:
        """Notes the last order written before the start."""
        self.last_order = max(self.last_order, last_order)

    def add(self, message: DelayedMessage) -> None:
        self._coming.append(message)

    @property
    def has_new(self) -> bool:
        return bool(self._coming)

    def drain(self, queue_id: str, next_order: Callable[[], int]) -> Iterator[RowChange]:
        coming, self._coming = self._coming, []
        for start in range(0, len(coming), ROW_MAX):
            self.last_order = next_order()
            part = coming[start : start + ROW_MAX]
            yield delayed_key(queue_id, self.last_order), encode_delayed(part)


def _is_of(order: int, epoch: int) -> bool:
    return split_order(order).epoch == epoch
