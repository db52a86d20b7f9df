"""The depth, age or rate of a queue, and whether it has work.

What is not known is an error, never zero: KEDA then leaves the replicas as they are.

::

    queue is paused           FAILED_PRECONDITION: no worker could claim anything
    queue is in quarantine    what is in it counts; where that is nothing, FAILED_PRECONDITION,
                              since messages wait outside of it
    broker does not answer    UNAVAILABLE, be it that of one partition; a queue is active where the
                              other partitions have work
"""

from __future__ import annotations

import asyncio
import time

from services.scaler.rates import RATE_S_MIN, Rates, Sample
from services.scaler.triggers import Trigger
from slatemq._admin.queue_models import Queue
from slatemq.client import Client
from slatemq.errors import (
    INCOMPLETE,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unauthenticated,
    Unavailable,
)


class Readings:
    def __init__(self, client: Client) -> None:
        """Read by this client."""
        self._client = client
        self._rates = Rates()

    async def is_active(self, trigger: Trigger) -> bool:
        """Whether there is work: something to claim or in flight, or in mode `rate` a rate.

        Raises:
            SlateMQError: That is not known; InvalidArgument names a key of the metadata.
        """
        queue = await self._read(trigger, is_work_enough=True)
        if backlog(queue):
            return True
        return trigger.mode == "rate" and await self._rate(trigger) > 0

    async def value(self, trigger: Trigger) -> float:
        """Messages, seconds, or messages a second, as the mode says. Raises as `is_active`."""
        queue = await self._read(trigger)
        if trigger.mode == "depth":
            return backlog(queue)
        if trigger.mode == "age":
            return (queue.counts.oldest_claimable_age_ms or 0) / 1000
        if queue.quarantine is not None:
            raise _quarantined(queue)
        return await self._rate(trigger)

    async def _read(self, trigger: Trigger, *, is_work_enough: bool = False) -> Queue:
        """The queue, whole; or with `is_work_enough` as much of it as has work."""
        began_s = time.monotonic()
        try:
            queue = await self._client.get_queue(trigger.queue_id)
        except NotFound as error:
            raise InvalidArgument("queue", error.message, reason=error.reason) from error
        except InvalidArgument as error:
            raise InvalidArgument("queue", error.description, reason=error.reason) from error
        except Unauthenticated as error:
            # Of the scaler, not of KEDA.
            problem = f"the instance does not know the scaler: {error.message}"
            raise FailedPrecondition("SCALER_UNAUTHENTICATED", problem) from error
        except DeadlineExceeded as error:
            raise Unavailable(error.message) from error
        if queue.missing_partitions and not (is_work_enough and backlog(queue)):
            raise _incomplete(queue)
        if trigger.mode == "rate" and not queue.missing_partitions:
            sample = Sample(began_s, queue.created_at_ms, queue.totals.entered_count)
            self._rates.add(trigger.queue_id, sample)
        if queue.paused:
            problem = f"queue {queue.queue_id!r} is paused: resume it to have its workers scaled"
            raise FailedPrecondition("QUEUE_PAUSED", problem, subject=queue.queue_id)
        if queue.quarantine is not None and not backlog(queue):
            raise _quarantined(queue)
        return queue

    async def _rate(self, trigger: Trigger) -> float:
        """The rate of a queue that was read just now; reads it again if it was read only once."""
        while (rate := self._rates.rate(trigger.queue_id)) is None:
            await asyncio.sleep(RATE_S_MIN)
            await self._read(trigger)
        return rate


def backlog(queue: Queue) -> int:
    """The messages that are claimable or in flight: those that workers are needed for."""
    return queue.counts.available_count + queue.counts.in_flight_count


def _incomplete(queue: Queue) -> Unavailable:
    missing = ", ".join(map(str, queue.missing_partitions))
    return Unavailable(
        f"partition {missing} of queue {queue.queue_id!r} does not answer", reason=INCOMPLETE
    )


def _quarantined(queue: Queue) -> FailedPrecondition:
    reason = queue.quarantine.reason if queue.quarantine is not None else ""
    return FailedPrecondition(
        "QUEUE_QUARANTINED",
        f"queue {queue.queue_id!r} is not routed ({reason}), so what waits for it is not known: "
        "change its filter",
        subject=queue.queue_id,
    )
