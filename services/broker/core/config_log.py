"""The newest change of each queue's config, in the order of revisions.

The shard notes changes as commands make them. Routers and watchers read a second log, to which a
commit's changes are added once they are durable: so a revision is always reported with the configs
that the queues had at it, even if memory has changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from services.broker.core.lifecycle import DELETED_KEPT
from services.broker.core.settings import QueueSettings
from slatemq.errors import InvalidArgument


class ConfigChange(NamedTuple):
    """What a queue became at a revision of its shard.

    Attributes:
        queue_id: The queue.
        revision: The shard's revision with which it changed.
        settings: None if it was deleted.
        routing_revision: When something last changed that matters to routing: its existence,
            filter, priorities or delay. Never above `revision`.
    """

    queue_id: str
    revision: int
    settings: QueueSettings | None
    routing_revision: int


class ConfigLog:
    def __init__(
        self,
        changes: Iterable[ConfigChange] = (),
        *,
        forgotten_revision: int = 0,
        deleted_kept: int = DELETED_KEPT,
    ) -> None:
        """Start with these, in any order; remember `deleted_kept` deletions."""
        self.deleted_kept = deleted_kept
        self.forgotten_revision = forgotten_revision
        """Deletions up to this revision may be forgotten: readers behind it must start over."""
        self._newest: dict[str, ConfigChange] = {}
        self._deleted: dict[str, int] = {}  # by queue, the revision of its deletion, oldest first
        self.add(sorted(changes, key=_place))

    def add(self, changes: Iterable[ConfigChange]) -> None:
        """Add changes, ordered by revision, and by queue within one."""
        for change in changes:
            # Removed and added again, the dict stays in the order of revisions.
            self._newest.pop(change.queue_id, None)
            self._newest[change.queue_id] = change
            self._deleted.pop(change.queue_id, None)
            if change.settings is None:
                self._deleted[change.queue_id] = change.revision
        while len(self._deleted) > self.deleted_kept:
            queue_id = next(iter(self._deleted))
            revision = self._deleted.pop(queue_id)
            # After a start it may be a queue whose rows were swept later than those of newer ones.
            self.forgotten_revision = max(self.forgotten_revision, revision)
            del self._newest[queue_id]

    def after(self, revision: int, queue_id: str | None = None) -> list[ConfigChange]:
        """What changed after a revision, oldest first, in O(changes).

        With a queue, also what changed at that revision in queues that sort behind this one: after
        a start several may have one revision.
        """
        if queue_id is None:
            return list(self._newest_first((revision + 1, "")))[::-1]
        return list(self._newest_first((revision, f"{queue_id}\0")))[::-1]

    def check_remembered(self, revision: int, field: str) -> None:
        """Raises InvalidArgument (REVISION_FORGOTTEN) if deletions since may be forgotten.

        At 0 the caller knows no queue yet, and misses no deletion.
        """
        if 0 < revision < self.forgotten_revision:
            raise InvalidArgument(
                field,
                "queues deleted since then may be forgotten: start over from revision 0",
                reason="REVISION_FORGOTTEN",
            )

    def routes_differ(self, revision: int) -> bool:
        """Whether a judgement by the configs of this revision is wrong for an existing queue."""
        return any(
            change.settings is not None and change.routing_revision > revision
            for change in self._newest_first((revision + 1, ""))
        )

    def _newest_first(self, until: tuple[int, str]) -> Iterator[ConfigChange]:
        for change in reversed(self._newest.values()):
            if _place(change) < until:
                return
            yield change


def _place(change: ConfigChange) -> tuple[int, str]:
    return change.revision, change.queue_id
