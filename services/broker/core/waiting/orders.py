"""Where the orders of a queue's buckets come from."""

from __future__ import annotations

from collections.abc import Collection

from libs.storage.layout.buckets import MAX_EPOCH, order_of, split_order


def in_epoch(epoch: int, order: int) -> int:
    """The order of the same time in another epoch."""
    parts = split_order(order)
    return order_of(epoch, parts.ms, parts.n)


class Orders:
    """The hybrid clock of one queue, from which buckets get their orders."""

    __slots__ = ("epoch", "last")

    def __init__(self, epoch: int, last: int) -> None:
        self.epoch = epoch
        self.last = last

    def next(self, now_ms: int) -> int:
        """An order above every other: the time, or a little more if several fall together."""
        return self.next_of(self.epoch, now_ms)

    def next_of(self, epoch: int, now_ms: int) -> int:
        """Like `next`, in an epoch that may be another one."""
        own = self.epoch
        self.last = order = max(self.last + 1, order_of(own, now_ms, 0))
        return order if epoch == own else in_epoch(epoch, order)


def free_epoch(last: int, taken: Collection[int]) -> int | None:
    """The first epoch after `last`, in a circle, that is not taken; None if all are."""
    epochs = ((last + step) % (MAX_EPOCH + 1) for step in range(1, MAX_EPOCH + 1))
    return next((epoch for epoch in epochs if epoch not in taken), None)
