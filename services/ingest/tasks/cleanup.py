"""Removes what tasks leave behind: bodies that no task names, records that no task needs."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Final

from libs.storage.errors import StorageError
from libs.storage.objects.task_folders import task_of_body
from libs.storage.records.task_records import AppliedTask
from services.ingest.shard import Shard
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.bodies import TaskBodies
from services.ingest.tasks.consumer import TaskConsumer
from services.ingest.tasks.outcomes import TaskOutcomes
from slatemq._admin.task_ids import is_task_id
from slatemq.errors import SlateMQError

log = logging.getLogger(__name__)

LOOK_S: Final = 60.0

LOOKS_PER_SWEEP: Final = 60
"""Records are swept each hour, beginning with the second look."""


class TaskCleanup:
    """Cleans up behind one shard's tasks; `run` works until it is cancelled."""

    def __init__(
        self,
        shard: Shard,
        backend: TaskBackend,
        bodies: TaskBodies,
        outcomes: TaskOutcomes,
        consumer: TaskConsumer,
    ) -> None:
        self._shard = shard
        self._backend = backend
        self._bodies = bodies
        self._outcomes = outcomes
        self._consumer = consumer
        self._answered: set[str] = set()

    async def run(self) -> None:
        """Look every minute; wait for a store or a backend that is down."""
        for look in itertools.count():
            try:
                await self.remove_orphans()
                if look % LOOKS_PER_SWEEP == 1:
                    await self.sweep()
            except (SlateMQError, StorageError) as error:
                log.info("the cleanup of tasks waits: %s", error)
            await asyncio.sleep(LOOK_S)

    async def sweep(self) -> int:
        """Remove records of applied tasks that cannot come again; returns how many."""
        finished_ms = self._consumer.finished_ms
        # A backend that keeps what is finished may give all of it out again, of any age.
        if not await self._backend.connected.trim_tasks():
            return 0
        return await self._outcomes.sweep(finished_ms)

    async def remove_orphans(self) -> int:
        """Remove bodies of publishes that were never answered; returns how many.

        A publish that was answered has a record, and its body stays whatever the backend reports.
        Other bodies stay for as long as their task may be in the backend.
        """
        old = await self._bodies.old(self._shard.clock.now_ms())
        self._answered.intersection_update(old)
        orphans = [path for path in old if await self._is_orphan(path)]
        if not orphans:
            return 0
        # An owner that has replaced this one may have noted answers that are not seen here.
        await self._shard.prove_ownership()
        count = await self._bodies.remove_orphans(orphans)
        if count:
            log.info("removed %d bodies that no task needs", count)
        return count

    async def _is_orphan(self, path: str) -> bool:
        task_id = task_of_body(path)
        if path in self._answered or not is_task_id(task_id) or self._consumer.is_running(task_id):
            return False
        record = await self._outcomes.find(task_id)
        if record is not None and not isinstance(record, AppliedTask):
            self._answered.add(path)
            return False
        return record is not None or await self._consumer.has_passed(task_id)
