"""Tasks that wait for nothing but their commit: most of them, so many share one coroutine.

All of them enter a commit as they come and end in steps, so that publishes are accepted between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from libs.events.tasks import WriteTask
from libs.storage.errors import StorageError, Unstorable
from services.ingest.batches import Accepted
from services.ingest.tasks.outcomes import TaskOutcomes, TaskWaiting
from services.ingest.write.publishing import Publisher
from slatemq.errors import ResourceExhausted

STEP: Final = 8
"""Tasks that end in one step of the event loop."""


class Alone(Protocol):
    def __call__(self, task: WriteTask, accepted: Accepted | None, error: Exception | None) -> None:
        """Apply a task by itself, or fail it with the error."""


class PlainTasks:
    """Puts new tasks into the commit that gathers."""

    def __init__(
        self,
        publisher: Publisher,
        outcomes: TaskOutcomes,
        complete: Callable[[WriteTask], None],
        alone: Alone,
    ) -> None:
        """`complete` is called with each task once it is applied durably."""
        self._publisher = publisher
        self._outcomes = outcomes
        self._complete = complete
        self._alone = alone
        self._commit: asyncio.Future[None] | None = None
        self._of_commit: list[tuple[WriteTask, TaskWaiting]] = []
        self._ending: asyncio.Task[None]

    def enqueue(self, task: WriteTask, accepted: Accepted) -> asyncio.Task[None] | None:
        """What ends the task; None, and nothing done, where it may have to wait for more.

        It must be the next one in its order, and its first attempt.
        """
        if not accepted.is_plain or self._outcomes.may_be_repeated(task.task_id, accepted):
            return None
        waiting = TaskWaiting(accepted, task.task_id, self._outcomes)
        try:
            if not self._publisher.enqueue(waiting):
                return None
        except (ResourceExhausted, StorageError):
            return None
        commit = self._publisher.commits.newest()
        assert commit is not None, "something was enqueued"
        if commit is not self._commit:
            self._commit, self._of_commit = commit, []
            self._ending = asyncio.create_task(self._end(commit, self._of_commit))
        self._of_commit.append((task, waiting))
        return self._ending

    async def _end(
        self, commit: asyncio.Future[None], given: list[tuple[WriteTask, TaskWaiting]]
    ) -> None:
        try:
            await asyncio.shield(commit)
        except StorageError as error:
            for task, waiting in given:  # at once: the process is about to end
                self._publisher.give_up(waiting)
                # The failure of another one's commit costs no attempt.
                is_why = isinstance(error, Unstorable) and waiting.was_drained
                self._alone(task, None if is_why else waiting.accepted, error if is_why else None)
            return
        for at, (task, waiting) in enumerate(given, 1):
            if waiting.refusal is not None:
                self._alone(task, None, waiting.refusal)
            else:
                assert waiting.outcome is not None, "its commit is durable"
                self._outcomes.settle(task.task_id, waiting.outcome)
                self._complete(task)
            if at % STEP == 0:
                await asyncio.sleep(0)
        given.clear()  # the last ones of a quiet shard are not kept
