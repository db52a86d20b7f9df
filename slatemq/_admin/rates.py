"""Rates of queues, from two samples at what has passed through them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # The help of a command loads this file, and does without protobuf.
    from slatemq._admin.instance import InstanceCalls, Status
    from slatemq._admin.queue_models import Queue
    from slatemq.models import RouteStatus


class Sample(NamedTuple):
    """The instance as it answered, and when, by a clock that never steps."""

    status: Status
    taken_s: float


@dataclass(frozen=True, slots=True)
class QueueRates:
    """Messages a second; None until there are two samples of the queue."""

    in_per_s: float | None = None
    claimed_per_s: float | None = None
    out_per_s: float | None = None
    retried_per_s: float | None = None


UNKNOWN = QueueRates()


async def take_sample(client: InstanceCalls) -> Sample:
    """Ask all processes once; no process reads the store for it."""
    return Sample(await client.status(settings=False), time.monotonic())


def rates_between(before: Sample | None, now: Sample) -> dict[str, QueueRates]:
    """The rates of each queue of `now`, by its ID.

    A queue that was made meanwhile, or whose broker was restarted, has none yet.
    """
    if before is None or now.taken_s <= before.taken_s:
        return {}
    seconds = now.taken_s - before.taken_s
    old = {queue.queue_id: queue for queue in before.status.queues}
    return {
        queue.queue_id: _rates(old.get(queue.queue_id), queue, seconds)
        for queue in now.status.queues
    }


def _rates(before: Queue | None, now: Queue, seconds: float) -> QueueRates:
    if before is None or before.created_at_ms != now.created_at_ms:
        return UNKNOWN
    pairs = zip(asdict(before.totals).values(), asdict(now.totals).values(), strict=True)
    grown = [after - earlier for earlier, after in pairs]
    if min(grown) < 0:
        return UNKNOWN
    entered, claimed, acked, requeued = (count / seconds for count in grown)
    return QueueRates(entered, claimed, acked, requeued)


def sum_rates(rates: Iterable[QueueRates]) -> QueueRates:
    """The rates of several queues together, of those that have any."""
    known = [astuple(one) for one in rates if one != UNKNOWN]
    return QueueRates(*map(sum, zip(*known, strict=True))) if known else UNKNOWN


def lag_by_broker(routes: Iterable[RouteStatus]) -> dict[int, int]:
    """Stored messages that are not yet routed to each broker shard."""
    lag: dict[int, int] = {}
    for route in routes:
        lag[route.broker_shard] = lag.get(route.broker_shard, 0) + route.pending_count
    return lag


def lag_of(queue: Queue, lag: Mapping[int, int]) -> int:
    """Of the broker shards that have a queue, the most that any of them lags."""
    return max(lag.get(shard, 0) for shard in queue.broker_shards)


def rate_fields(rates: QueueRates) -> dict[str, Any]:
    """Rates for programs."""
    return {
        name: None if value is None else round(value, 3) for name, value in asdict(rates).items()
    }
