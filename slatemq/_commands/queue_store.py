"""What a view needs of a queue, and a queue in memory, which needs no server.

As in a test of a program that takes a view::

    refs, queue = RefSet[str](), MemoryQueue()
    for number, item in enumerate(["a", "b"]):
        refs.add(number, item)
        queue.push(number)
    await program_under_test(QueueView(queue, refs))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from slatemq._commands.ref_set import RefSet, RefToken

__all__ = ["MemoryQueue", "QueueStore", "QueueView"]

T = TypeVar("T")


class QueueStore(Protocol):
    """A queue of IDs, whose items are in a RefSet."""

    async def pop(self) -> Hashable | None:
        """Takes the ID at the front, if there is one, without waiting for one."""

    async def len(self) -> int:
        """How many there are."""


class QueueView(Generic[T]):
    """The items of a queue, one by one, without waiting.

    Attributes:
        store: Gives the order.
        refs: Has the items.
    """

    def __init__(self, store: QueueStore, refs: RefSet[T]) -> None:
        """A view of this queue, whose items are in `refs`."""
        self.store = store
        self.refs = refs

    async def len(self) -> int:
        """How many items can be taken now. Raises what the store raises."""
        return await self.store.len()

    async def try_next(self) -> RefToken[T] | None:
        """The token of the next item; None when there is none. Raises what the store raises.

        Items that are not in the set any more are passed over.
        """
        while (item_id := await self.store.pop()) is not None:
            token = self.refs.upgrade(item_id)
            if token is not None:
                return token
        return None


class MemoryQueue:
    """A queue in memory."""

    def __init__(self, item_ids: Iterable[Hashable] = ()) -> None:
        """With these IDs in it, the first one at the front."""
        self._item_ids: deque[Hashable] = deque(item_ids)

    def push(self, item_id: Hashable) -> None:
        """Puts an ID at the end."""
        self._item_ids.append(item_id)

    async def pop(self) -> Hashable | None:
        """Takes the ID at the front."""
        return self._item_ids.popleft() if self._item_ids else None

    async def len(self) -> int:
        """How many there are."""
        return len(self._item_ids)
