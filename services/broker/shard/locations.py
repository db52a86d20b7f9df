"""On which broker shards a queue is: what the claim of its name says, and some of that remembered.

A claim may be older or newer than the queue: what it says is where to ask, not that the queue is
there. So may what is remembered: who was sent to the wrong shard asks again, for a fresh answer. A
claim whose shards were all removed is left of a queue that was deleted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, NamedTuple

from libs.access.current import may_some
from libs.access.verbs import Verb
from libs.serving.requests.partitions import named_partition
from libs.storage.errors import StorageError
from libs.storage.objects.queue_names import QueueNames, named_shards
from slatemq.errors import SHARD, WRONG_SHARD, InvalidArgument, NotFound

log = logging.getLogger(__name__)

REMEMBERED_S: Final = 60.0
"""How old an answer may be that is not fresh; a queue moves, or is created elsewhere, rarely."""

ABSENT_S: Final = 1.0
"""The same for a name that no shard has. It bounds what calls about absent queues cost the store,
but for clients, commands and redrives, which have the claim read before they say so."""

NAMES_MAX: Final = 10_000
"""Names that are remembered: a megabyte."""

SEEING: Final[Sequence[Verb]] = ("consume", "inspect", "edit", "administer")
"""Who may do any of these with a queue may know where it is."""


class _Remembered(NamedTuple):
    broker_shards: tuple[int, ...]
    read_at: float
    removed: frozenset[int]
    """Those that were removed before it was read: what is left of them in a claim may stay."""


@dataclass(eq=False)
class Locations:
    """`_is_removed` says of a broker shard whether it was removed for ever."""

    _names: QueueNames
    _is_removed: Callable[[int], Awaitable[bool]]
    _clock: Callable[[], float] = time.monotonic
    _known: dict[str, _Remembered] = field(default_factory=dict, init=False)
    _reading: dict[str, asyncio.Future[tuple[int, ...]]] = field(default_factory=dict, init=False)

    async def of(self, queue_id: str, *, fresh: bool = False) -> tuple[int, ...]:
        """The shards that the queue's name is claimed for, by partition.

        None if it is free, or if all of them were removed.

        A remembered answer may be a minute old, unless one of its shards was removed since; that a
        name is free, a second. `fresh` reads the claim. Raises StoreUnavailable where nothing is
        remembered, CorruptRecord.
        """
        known = self._known.get(queue_id)
        if known is not None and not fresh and await self._is_valid(known):
            return known.broker_shards
        if fresh:
            return await self._read(queue_id)
        reading = self._reading.get(queue_id)
        if reading is None:
            reading = self._reading[queue_id] = asyncio.ensure_future(self._read(queue_id))
            reading.add_done_callback(lambda _: self._reading.pop(queue_id, None))
        try:
            return await asyncio.shield(reading)
        except StorageError as error:
            if known is None or not known.broker_shards:
                raise
            log.warning("where queue %s is cannot be read, taking the last: %s", queue_id, error)
            return known.broker_shards

    async def _is_valid(self, known: _Remembered) -> bool:
        lasts_s = REMEMBERED_S if known.broker_shards else ABSENT_S
        if self._clock() - known.read_at >= lasts_s:
            return False
        try:
            for shard in known.broker_shards:
                if shard not in known.removed and await self._is_removed(shard):
                    return False
        except StorageError:
            return False  # The claim cannot be read either, and the last answer is taken.
        return True

    async def _read(self, queue_id: str) -> tuple[int, ...]:
        removed = frozenset[int]()
        while True:
            read_at = self._clock()
            shards = (await self._names.get(queue_id)).broker_shards
            are_removed = await asyncio.gather(*map(self._is_removed, shards))
            before, removed = removed, frozenset(compress(shards, are_removed))
            if removed <= before:
                break
            # A queue may have left a shard since, and that been removed: read it once more.
        if all(are_removed):
            shards = ()
        self.note(queue_id, shards, read_at, removed)
        return shards

    def note(
        self,
        queue_id: str,
        shards: tuple[int, ...],
        read_at: float,
        removed: frozenset[int] = frozenset(),
    ) -> None:
        """Remembers where a queue was at this time; `removed`: the shards that were, before."""
        self._known.pop(queue_id, None)
        while len(self._known) >= NAMES_MAX:
            del self._known[next(iter(self._known))]
        self._known[queue_id] = _Remembered(shards, read_at, removed)

    async def directed(self, error: NotFound, shard: int) -> NotFound:
        """An error of this shard as its caller gets it: with which other one has the queue.

        Without that, where the caller may not know of the queue, or while the store is down.
        """
        queue_id = error.resource_name
        if error.resource_type != "queue" or not may_some(SEEING, queue_id):
            return error
        is_other = error.reason == WRONG_SHARD
        try:
            named = named_partition(queue_id)
            shards = await self.of(queue_id)
            if is_other and shard in _places(shards, named):
                shards = await self.of(queue_id, fresh=True)  # What is remembered is older.
        except (StorageError, InvalidArgument) as failed:
            log.warning("where queue %s is cannot be read: %s", queue_id, failed)
            return error
        if not shards or shard in _places(shards, named):
            return error
        return NotFound(
            "queue",
            queue_id,
            error.message
            if is_other
            else f"queue {queue_id!r} is not on broker {shard}: ask {named_shards(shards)}",
            reason=WRONG_SHARD,
            metadata={SHARD: ",".join(map(str, shards))},
        )


def _places(shards: tuple[int, ...], partition: int | None) -> tuple[int, ...]:
    """The shards of a queue, or the one of this partition; none where it has no such."""
    return shards if partition is None else shards[partition : partition + 1]
