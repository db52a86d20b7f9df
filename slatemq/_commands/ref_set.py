"""Items by ID, each for as long as it is referred to: the RefSet of Splinter's abstract queue.

And what a view needs of a queue, with a queue in memory, which needs no server. As in a test of a
program that takes a view::

    refs, queue = RefSet[str](), MemoryQueue()
    for number, item in enumerate(["a", "b"]):
        refs.add(number, item)
        queue.push(number)
    await program_under_test(QueueView(queue, refs))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from slatemq._checks import check_kind, iterable
from slatemq.errors import AlreadyExists, FailedPrecondition

T = TypeVar("T")


class Slot(Generic[T]):
    """An item of a set, and how many references there are to it."""

    def __init__(self, item_id: Hashable, load: Callable[[], T]) -> None:
        """Not referred to yet; `load` returns the item, and is called until it does not raise."""
        self.item_id = item_id
        self.references = 0
        self._load = load
        self._loaded: tuple[T] | None = None

    @property
    def item(self) -> T:
        """The item, the same object each time. Raises what `load` raises."""
        if self._loaded is None:
            self._loaded = (self._load(),)
        return self._loaded[0]


class RefToken(Generic[T]):
    """A reference to an item of a RefSet, which keeps it there; good for one use.

    It is given up when it is used, released, or not held any more.
    """

    __slots__ = ("_finished", "_refs", "_released", "_slot")

    def __init__(self, refs: RefSet[T], slot: Slot[T]) -> None:
        self._released = False
        self._finished = False
        self._refs = refs
        self._slot = slot
        slot.references += 1

    @property
    def item_id(self) -> Hashable:
        """The item's ID."""
        return self._slot.item_id

    @property
    def finished(self) -> bool:
        """Whether it was used."""
        return self._finished

    def check(self) -> None:
        """Raises FailedPrecondition (TOKEN_USED)."""
        if self._released:
            raise used(f"the token of item {self.item_id!r}")

    def settled(self) -> None:
        """What had the token took effect: it is used."""
        self._finished = True
        self.release()

    def release(self) -> None:
        """Gives the reference up; again does nothing. The last one takes the item with it."""
        if not self._released:
            self._released = True
            self._refs._drop(self._slot)

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            self.release()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.item_id!r}>"


class ItemLease(Generic[T]):
    """The use of an item, as a context manager with `with` or `async with`."""

    def __init__(self, slot: Slot[T]) -> None:
        self._slot = slot

    @property
    def item(self) -> T:
        """The item."""
        return self._slot.item

    @property
    def lost(self) -> bool:
        """Whether another consumer may have the item by now."""
        return False

    def begin(self) -> None:
        """Begins the use; an item in memory needs nothing for it."""

    def end(self) -> None:
        """Ends the use."""

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()


class RefSet(Generic[T]):
    """Items by ID. One that was never referred to stays; one that was goes with its last token."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, Slot[T]] = {}

    def add(self, item_id: Hashable, item: T) -> None:
        """Puts an item in. Raises AlreadyExists."""
        _check_id(item_id)
        self._add(Slot(item_id, lambda: item))

    def _add(self, slot: Slot[T]) -> None:
        if slot.item_id in self._slots:
            raise AlreadyExists("item", str(slot.item_id))
        self._slots[slot.item_id] = slot

    def upgrade(self, item_id: Hashable) -> RefToken[T] | None:
        """One more reference to an item; None when it is not in the set, or not any more."""
        _check_id(item_id)
        slot = self._slots.get(item_id)
        return None if slot is None else RefToken(self, slot)

    def lease(self, token: RefToken[T]) -> ItemLease[T]:
        """The use of the token's item. Raises FailedPrecondition (TOKEN_USED)."""
        check_kind("token", token, RefToken)
        token.check()
        return ItemLease(token._slot)

    def references(self, item_id: Hashable) -> int:
        """How many tokens there are of an item."""
        _check_id(item_id)
        slot = self._slots.get(item_id)
        return 0 if slot is None else slot.references

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._slots

    def _drop(self, slot: Slot[T]) -> None:
        slot.references -= 1
        if not slot.references and self._slots.get(slot.item_id) is slot:
            del self._slots[slot.item_id]


def _check_id(item_id: object) -> None:
    check_kind("item_id", item_id, Hashable, "hashable")


def used(what: str) -> FailedPrecondition:
    """The error about a token that is used a second time."""
    return FailedPrecondition("TOKEN_USED", f"{what} was used already")


@runtime_checkable
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
        check_kind("store", store, QueueStore)
        check_kind("refs", refs, RefSet)
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
        self._item_ids: deque[Hashable] = deque()
        for item_id in iterable("item_ids", "item IDs", item_ids):
            self.push(item_id)

    def push(self, item_id: Hashable) -> None:
        """Puts an ID at the end."""
        _check_id(item_id)
        self._item_ids.append(item_id)

    async def pop(self) -> Hashable | None:
        """Takes the ID at the front."""
        return self._item_ids.popleft() if self._item_ids else None

    async def len(self) -> int:
        """How many there are."""
        return len(self._item_ids)
