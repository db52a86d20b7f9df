"""Messages whose payloads cannot be had any more: they become dead letters, with the reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from libs.storage.records.queues import AvailableMessage
from services.broker.core.queue import Choice, Queue, Selector
from services.broker.shard.owner import ShardOwner

log = logging.getLogger(__name__)


async def fail_gone(owner: ShardOwner, queue: Queue, gone: Mapping[int, str]) -> None:
    """Moves those of a queue's next messages to failed that are not to be had, by their reasons."""
    for reason in set(gone.values()):
        ids = {one for one, why in gone.items() if why == reason}
        log.error("%d messages of %s: %s", len(ids), queue.queue_id, reason)
        await owner.run(partial(_fail_all, owner, queue, ids, reason))


def _fail_all(owner: ShardOwner, queue: Queue, ids: set[int], reason: str, now_ms: int) -> None:
    if owner.owns(queue):
        claimed = owner.shard.leases.claim(queue, _ByIds(ids), 0, "", now_ms)
        owner.shard.leases.fail(claimed.leases(), reason, now_ms)


class _ByIds(Selector):
    """Takes the messages of these IDs."""

    def __init__(self, ids: set[int]) -> None:
        self._left = set(ids)

    def choose(self, item: AvailableMessage) -> Choice:
        if not self._left:
            return Choice.STOP
        if item.message_id not in self._left:
            return Choice.SKIP
        self._left.discard(item.message_id)
        return Choice.TAKE
