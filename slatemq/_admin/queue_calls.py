"""The client's calls about queues."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping

from slatemq._admin.admin import UNCHANGED, Admin, Start, Unchanged
from slatemq._admin.entry_models import EntryState, StateName
from slatemq._admin.instance_status import InstanceStatus, Status
from slatemq._admin.queue_models import Backoff, DeletedQueue, Queue
from slatemq.models import Duration, Explanation, Time


class QueueCalls:
    """Creating, reading, changing and repairing queues; a part of the client."""

    _admin: Admin
    _status: InstanceStatus

    async def create_queue(
        self,
        queue_id: str,
        *,
        filter: str | None = None,  # noqa: A002 - the RFC's word
        priority: str | None = None,
        max_attempts: int | None = None,
        lease: Duration | None = None,
        max_lease: Duration | None = None,
        done_retention: Duration | None = None,
        max_in_flight: int | None = None,
        default_delay: Duration | None = None,
        backoff: Backoff | None = None,
        fallback_priority: int | None = None,
        max_total_lease: Duration | None = None,
        failed_retention: Duration | None = None,
        with_queue: str = "",
        start_from: Start = "now",
    ) -> Queue:
        """Creates a queue; None means the default.

        `with_queue`: another queue whose shard it must share, so that commands on both can be
        executed together. `start_from`: a time, or "beginning": older messages are brought in, back
        to the beginning of the instance's replay window; `Queue.replay` tells how far. Raises
        AlreadyExists, InvalidArgument, NotFound (`with_queue`).
        """
        return await self._admin.create_queue(
            queue_id,
            with_queue,
            start_from,
            filter=filter,
            priority=priority,
            max_attempts=max_attempts,
            lease=lease,
            max_lease=max_lease,
            done_retention=done_retention,
            max_in_flight=max_in_flight,
            default_delay=default_delay,
            backoff=backoff,
            fallback_priority=fallback_priority,
            max_total_lease=max_total_lease,
            failed_retention=failed_retention,
        )

    async def get_queue(self, queue_id: str) -> Queue:
        """Reads a queue, with the counts of its messages. Raises NotFound."""
        return await self._admin.get_queue(queue_id)

    def list_queues(self, prefix: str = "") -> AsyncIterator[Queue]:
        """All queues whose ID begins with `prefix`, by ID.

        Raises Unavailable (INCOMPLETE) at the end when brokers did not answer: their queues are
        missing, `metadata["broker_shards"]` names them.
        """
        return self._admin.list_queues(prefix)

    async def update_queue(
        self,
        queue_id: str,
        *,
        etag: str = "",
        filter: str | Unchanged | None = UNCHANGED,  # noqa: A002 - the RFC's word
        priority: str | Unchanged | None = UNCHANGED,
        max_attempts: int | Unchanged | None = UNCHANGED,
        lease: Duration | Unchanged | None = UNCHANGED,
        max_lease: Duration | Unchanged | None = UNCHANGED,
        done_retention: Duration | Unchanged | None = UNCHANGED,
        max_in_flight: int | Unchanged | None = UNCHANGED,
        default_delay: Duration | Unchanged | None = UNCHANGED,
        backoff: Backoff | Unchanged | None = UNCHANGED,
        fallback_priority: int | Unchanged | None = UNCHANGED,
        max_total_lease: Duration | Unchanged | None = UNCHANGED,
        failed_retention: Duration | Unchanged | None = UNCHANGED,
    ) -> Queue:
        """Changes the settings given; None sets one back to its default.

        With the etag of a queue that was read before, nobody else's change is overwritten: raises
        Aborted instead.
        """
        return await self._admin.update_queue(
            queue_id,
            etag,
            filter=filter,
            priority=priority,
            max_attempts=max_attempts,
            lease=lease,
            max_lease=max_lease,
            done_retention=done_retention,
            max_in_flight=max_in_flight,
            default_delay=default_delay,
            backoff=backoff,
            fallback_priority=fallback_priority,
            max_total_lease=max_total_lease,
            failed_retention=failed_retention,
        )

    async def delete_queue(self, queue_id: str, *, etag: str = "") -> None:
        """Deletes a queue with everything in it. Raises NotFound, Aborted."""
        await self._admin.delete_queue(queue_id, etag)

    async def pause_queue(self, queue_id: str) -> Queue:
        """Stops the handing out of messages: consumers wait. Again is OK. Raises NotFound."""
        return await self._admin.pause_queue(queue_id)

    async def resume_queue(self, queue_id: str) -> Queue:
        """Ends a pause; again is OK. Raises NotFound."""
        return await self._admin.resume_queue(queue_id)

    async def lift_quarantine(self, queue_id: str) -> Queue:
        """Routes a queue again whose filter took too long; again is OK. Raises NotFound.

        What waited is judged, once. A change of the filter or priority ends a quarantine, too.
        """
        return await self._admin.lift_quarantine(queue_id)

    async def purge_queue(
        self, queue_id: str, states: Iterable[EntryState | StateName] = ()
    ) -> int:
        """Removes all messages of a queue in these states; returns how many.

        No states: available and delayed, which always go together; `in_flight` ends the leases.
        Messages that come while it is repeated may go, too. Raises NotFound, InvalidArgument.
        """
        return await self._admin.purge_queue(queue_id, states)

    def watch_queues(self, broker_shard: int = 0) -> AsyncIterator[Queue | DeletedQueue]:
        """The queues of a broker shard, then every change, without end."""
        return self._admin.watch_queues(broker_shard)

    async def explain(
        self,
        headers: Mapping[str, str],
        *,
        created_at: Time | None = None,
        received_at: Time | None = None,
        payload_bytes: int = 0,
        queue_ids: Iterable[str] = (),
        delay: Duration | None = None,
        visible_at: Time | None = None,
        retention: Duration = 0,
        message_id: int = 0,
    ) -> list[Explanation]:
        """Finds which queues such a message would reach, and why; stores nothing."""
        return await self._admin.explain(
            headers,
            created_at,
            received_at,
            payload_bytes,
            queue_ids,
            delay=delay,
            visible_at=visible_at,
            retention=retention,
            message_id=message_id,
        )

    async def status(self) -> Status:
        """Every process, route and queue, as far as they answer."""
        return await self._status.status()
