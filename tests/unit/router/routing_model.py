"""What lies between the real shard of a broker and real routes: calls and commits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.broker.core.commands import Needs, Range
from services.broker.core.config_log import ConfigChange, ConfigLog
from services.broker.core.lists.replays import Ranges
from services.broker.core.queue import Choice, NeedsLane
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Shard
from services.broker.shard.loading import Loader, load_shard
from services.router.pieces import Piece, PieceLimits, Seen
from services.router.route import Route
from services.router.routing import BrokerRules
from slatemq._byte_budget import ByteBudget
from tests.unit.broker.core.shards import START_MS, Each
from tests.unit.broker.core.stores import DictStore

LIMITS = PieceLimits(messages_max=6, matches_max=100, step_max=3, hold_ms=0)
LETTERS = "abc"
QUEUES = ["x", "y", "z"]
LOG = 0


def source(dead_letter: str) -> str:
    return f'headers["letter"] == "{dead_letter}"'


@dataclass
class Report:
    """What routers may learn once a commit is durable."""

    revision: int
    cursor: int
    replays: Any
    changes: Sequence[ConfigChange]


@dataclass(eq=False)
class Version:
    """What a queue was from the moment on at which its change could be answered."""

    since: int
    created: int
    dead_letter: str | None
    starts_in_past: bool


class Broker:
    """The real shard and its commits; a commit is durable some time after it was written."""

    def __init__(self) -> None:
        self.store = DictStore()
        self.shard = Shard()
        self.incarnation = 1
        self.reports: list[Report] = []
        self.durable = Report(0, 0, {}, ())
        self.configs = ConfigLog()
        self.past: set[int] = set()
        """The revisions at which queues were created that start in the past."""

    def commit(self) -> None:
        shard = self.shard
        rows = shard.drain(START_MS)
        if rows:
            self.store.write(rows, START_MS)
            self.reports.append(
                Report(
                    shard.revision,
                    shard.cursors.get(LOG, 0),
                    shard.replays.by_queue,
                    shard.take_config_changes(),
                )
            )

    def make_durable(self) -> Sequence[ConfigChange]:
        """The oldest commit is durable; gives what changed with it."""
        if not self.reports:
            return ()
        self.store.make_durable()
        self.shard.durable()
        self.durable = self.reports.pop(0)
        self.configs.add(self.durable.changes)
        return self.durable.changes

    def crash(self) -> None:
        self.store, self.reports = self.store.crash(0), []
        self.shard = asyncio.run(load_shard(self.store, START_MS))
        self.incarnation += 1
        self.configs = ConfigLog(
            self.shard.stored_configs(), forgotten_revision=self.shard.forgotten_revision
        )
        assert self.shard.revision == self.durable.revision
        assert self.shard.cursors.get(LOG, 0) == self.durable.cursor

    def sweep(self) -> None:
        for queue_id, state in list(self.shard.deleted.items()):
            for epoch in state.garbage_epochs:
                self.shard.swept(queue_id, epoch)


@dataclass(eq=False)
class Call:
    """An Assign on its way: what it says, and the answer."""

    piece: Range
    seen: Seen | None
    answer: tuple[bool, int, int, int] | None = None
    """Whether the range is outdated, the cursor, the revision, the incarnation."""


@dataclass(eq=False)
class Router:
    route: Route
    budget: ByteBudget
    rules: BrokerRules = field(default_factory=BrokerRules)
    configs: dict[str, QueueSettings] = field(default_factory=dict)
    replays: dict[str, Ranges] = field(default_factory=dict)
    """As they were when a change of their queue was reported."""
    tail_position: int = 0
    call: Call | None = None
    sent: Piece | None = None


async def drained(broker: Broker, queue_id: str) -> list[int]:
    """The messages of a queue after a restart."""
    shard, loader = broker.shard, Loader(broker.store, broker.shard)
    queue = shard.queues.get(queue_id)
    found: list[int] = []
    while queue is not None:
        try:
            claimed = shard.leases.claim(queue, Each(lambda _: Choice.TAKE), 1000, "", START_MS)
        except (NeedsLane, Needs) as need:
            await loader.answer(need)
            continue
        if not claimed.items:
            break
        found += [item.message_id for item in claimed.items]
    return found
