"""Rates of queues, from two samples at what has passed through them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # The help of a command loads this file, and does without protobuf.
    from slatemq._admin.instance import InstanceCalls, Status
    from slatemq._admin.queue_models import Queue


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


Lags = Mapping[tuple[str, int], "int | None"]
"""Stored messages that are not yet routed, by service and shard; None: not known."""


def lags_of(status: Status) -> Lags:
    """Of a broker shard what all ingests have for it; of an ingest what its slowest broker lacks.

    What one route lacks is unknown where its router does not answer, the caller may not see it, or
    its ingest is down. Then so are both lags.
    """
    shards: dict[str, list[int]] = {"ingest": [], "broker": []}
    for one in status.services:
        shards.setdefault(one.service, []).append(one.shard)
    pending = {
        (route.ingest_shard, route.broker_shard): route.pending_count
        for route in status.routes
        if route.is_current
    }
    of_brokers: dict[tuple[str, int], int | None] = {
        ("broker", broker): _unless_unknown(
            sum, [pending.get((ingest, broker)) for ingest in shards["ingest"]]
        )
        for broker in shards["broker"]
    }
    return of_brokers | {
        ("ingest", ingest): _unless_unknown(
            max, [pending.get((ingest, broker)) for broker in shards["broker"]]
        )
        for ingest in shards["ingest"]
    }


def whole_lag(lags: Lags) -> int | None:
    """Of all broker shards together."""
    return _unless_unknown(sum, [lag for (service, _), lag in lags.items() if service == "broker"])


def lag_of(queue: Queue, lags: Lags) -> int | None:
    """Of the broker shards that have a queue, the most that any of them lags."""
    return _unless_unknown(max, [lags.get(("broker", shard)) for shard in queue.broker_shards])


def _unless_unknown(
    together: Callable[[Iterable[int]], int], counts: Sequence[int | None]
) -> int | None:
    known = [count for count in counts if count is not None]
    return together(known) if known and len(known) == len(counts) else None


def rate_fields(rates: QueueRates) -> dict[str, Any]:
    """Rates for programs."""
    return {
        name: None if value is None else round(value, 3) for name, value in asdict(rates).items()
    }
