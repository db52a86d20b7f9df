"""What a system must do to carry events and write tasks.

Both are delivered at least once, always with the same ID. Nothing is buffered here: a call
returns when the backend has what it was given, and raises Unavailable when the backend cannot be
reached, so that the caller decides what waits and where.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from libs.events.tasks import FailedTask, UnreadableTask, WriteTask
from slatemq.events.envelope import Event

Handler = Callable[[Event], Awaitable[None]]
"""Gets one event at a time; acknowledges it through the backend once it is done with it."""

Config = TypeVar("Config", contravariant=True)


@dataclass(frozen=True, slots=True)
class BackendStats:
    """What waits in a backend.

    Attributes:
        pending_tasks: Tasks that are neither complete nor dead letters.
        dead_letter_count: Tasks and events in the dead-letter place.
    """

    pending_tasks: int
    dead_letter_count: int


class QueueBackend(Protocol[Config]):
    """A connection to one system, used by one event loop.

    Every method but `close` raises Unavailable while the system cannot be reached; the next call
    tries again, so a backend comes back by itself.
    """

    # --- Life cycle ---------------------------------------------------------

    async def connect(self, config: Config) -> None:
        """Connect, and create what is missing on the server.

        Raises InvalidArgument that names the key of a setting which the server refuses.
        """

    async def close(self) -> None:
        """Stop deliveries and disconnect; what is not acknowledged comes again, to others too."""

    async def health_check(self) -> bool:
        """Whether the system answers now, within a few seconds; never raises."""
        ...

    # --- Events -------------------------------------------------------------

    async def publish(self, event: Event) -> None:
        """Publish an event; returns once the system has it as durably as it is set up to."""

    async def publish_batch(self, events: Sequence[Event]) -> None:
        """Publish events in order.

        When it raises, any of them may have been published: publish all of them again.
        """

    async def subscribe(self, event_types: Sequence[str], handler: Handler) -> None:
        """Begin to deliver the events of these types; no types means all.

        Subscribers of one consumer group share the events, each group gets all that were published
        since its first subscription. An event that was not acknowledged when its handler returns
        or raises is delivered again after the retry delay, at most `max_retries` times, then it
        goes to the dead-letter place. At most one subscription for each backend object.
        """

    async def acknowledge(self, event_id: str) -> None:
        """Finish an event that the handler was given. Acknowledging again does nothing."""

    # --- Tasks --------------------------------------------------------------

    async def enqueue_task(self, task: WriteTask) -> str:
        """Store a task; returns its ID. Enqueueing one again may deliver it twice."""
        ...

    async def dequeue_task(self) -> WriteTask | None:
        """The next task that is due, or None when none comes within a second or so: ask again.

        Nobody else gets it until it is completed, failed, or the consumer that has it is gone.
        """

    async def complete_task(self, task_id: str) -> None:
        """Remove a task that was dequeued. Completing again does nothing."""

    async def fail_task(self, task_id: str, error: str) -> None:
        """Count a failed attempt of a task that was dequeued.

        It comes again after the retry delay, or goes to the dead-letter place with `error` when no
        retries are left.
        """

    async def retry_failed_tasks(self) -> int:
        """Move every task of the dead-letter place back, as if new; returns how many."""
        ...

    async def trim_tasks(self) -> bool:
        """Let the system remove the tasks that are finished, where it has not yet.

        Returns whether they cannot come again: also when the system forgets how far it was.
        """
        ...

    # --- What waits ---------------------------------------------------------

    async def stats(self) -> BackendStats:
        """How much waits; numbers that a moment later are others."""
        ...

    async def failed_tasks(self, limit: int) -> Sequence[FailedTask | UnreadableTask]:
        """The tasks of the dead-letter place, without payloads, the oldest first, at most `limit`.

        With them what lies there and is no task, so that somebody learns of it.
        """
        ...
