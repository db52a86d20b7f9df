"""The done, failed and archived lists of a queue: what each commit finished is a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from libs.storage.layout.primitives import RowChange
from libs.storage.records.states import OrderRange
from services.broker.core.waiting.orders import Orders

LIST_ROW_MAX = 1000
"""Messages in one row at most: reading or changing a row takes two milliseconds."""

M = TypeVar("M")


@dataclass(eq=False)
class FinishedList(Generic[M]):
    """One of the lists, in order of time. Only what the next commit writes is in memory."""

    _key_of: Callable[[int], bytes]
    """The key of the row of an order."""
    _encode: Callable[[Sequence[M]], bytes]
    _orders: Orders
    _touch: Callable[[], None]
    """Called at each change."""
    count: int
    oldest_order: int
    """The order of the first row; 0: nothing is stored. What lies before is garbage."""
    garbage: OrderRange
    """Rows that a purge has left to be removed."""
    _new: list[M] = field(default_factory=list, init=False)
    _seen: int = field(default=0, init=False)

    @property
    def has_new(self) -> bool:
        """Whether the next commit writes rows."""
        return bool(self._new)

    @property
    def stored_count(self) -> int:
        """How many messages are in rows, durable or on their way."""
        return self.count - len(self._new)

    def add(self, messages: Iterable[M]) -> None:
        before = len(self._new)
        self._new += messages
        self.count += len(self._new) - before
        self._touch()

    def take_unseen(self) -> Sequence[M]:
        """What was added since the last commit and the last call of this."""
        unseen, self._seen = self._new[self._seen :], len(self._new)
        return unseen

    def drain(self, now_ms: int) -> Iterator[RowChange]:
        """The rows of what was added since the last commit."""
        if not self._new:
            return
        order = self._orders.next(now_ms)
        self.oldest_order = self.oldest_order or order
        for start in range(0, len(self._new), LIST_ROW_MAX):
            yield self._key_of(order), self._encode(self._new[start : start + LIST_ROW_MAX])
            order = self._orders.next(now_ms)
        self._new, self._seen = [], 0

    def rewrite(self, order: int, left: Sequence[M], removed: int) -> RowChange:
        """Removes messages of a stored row; returns the row with what is left of it."""
        self.count -= removed
        if not self.stored_count:
            self.oldest_order = 0
        elif not left and order == self.oldest_order:
            self.oldest_order = order + 1
        self._touch()
        return self._key_of(order), self._encode(left) if left else None

    def purge(self) -> int:
        """Empties the list; returns how many messages. Its rows are left to the sweeper."""
        count, self.count, self._new, self._seen = self.count, 0, [], 0
        if self.oldest_order:
            first = self.garbage.first or self.oldest_order
            self.garbage = OrderRange(first, self._orders.last)
            self.oldest_order = 0
        self._touch()
        return count

    def note_swept(self, last_order: int) -> None:
        """Notes that the garbage is gone up to an order."""
        last = self.garbage.last
        self.garbage = OrderRange() if last_order >= last else OrderRange(last_order + 1, last)
        self._touch()
