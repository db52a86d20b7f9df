"""What must hold in a broker's memory between any two steps of it."""

from __future__ import annotations

from collections.abc import Sequence

from services.broker.core.shard import Shard
from services.broker.core.waiting.bucket import Bucket
from services.broker.core.waiting.lane import Lane
from tests.simulation.judge import Violated


def check_shard(name: str, shard: Shard) -> None:
    """Raises Violated where the state of a broker contradicts itself."""
    in_flight = 0
    for queue in shard.queues.values():
        where = f"{name}: {queue.queue_id}"
        leased = [one for bucket in queue.leases._buckets.values() for one in bucket.message_ids()]
        _equal(f"{where}: leases counted", queue.leases.count, len(leased))
        in_flight += len(leased)
        waiting: list[int] = []
        for lane in queue.waiting.by_name.values():
            waiting += _messages(f"{where}: lane {lane.priority}", lane)
        both = waiting + leased
        if len(both) > len(set(both)):
            twice = sorted({one for one in both if both.count(one) > 1})
            raise Violated(f"{where} has messages twice: {twice}")
        for label, finished in (("done", queue.done), ("failed", queue.failed)):
            if finished.stored_count < 0 or bool(finished.stored_count) != bool(
                finished.oldest_order
            ):
                raise Violated(
                    f"{where}: {label} counts {finished.count}, {finished.stored_count} of them "
                    f"stored, the first row {finished.oldest_order}"
                )
    _equal(f"{name}: messages in flight", shard.leases.in_flight_count, in_flight)


def _messages(where: str, lane: Lane) -> list[int]:
    """The messages of a lane that are in memory: all that it counts, where nothing is left out."""
    found = [one for bucket in lane.in_memory() for one in _message_ids(bucket)]
    if lane.complete:
        _equal(f"{where} counts", lane.count, len(found))
    elif lane.count < len(found):
        raise Violated(f"{where} counts {lane.count}, and has {len(found)} in memory")
    return found


def _message_ids(bucket: Bucket) -> Sequence[int]:
    """Of a bucket, without making objects of what it has in columns."""
    if bucket._columns is not None:
        return bucket._columns.message_ids[bucket.start :]
    return [item.message_id for item in bucket._items[bucket.start :]]


def _equal(what: str, counted: int, found: int) -> None:
    if counted != found:
        raise Violated(f"{what}: {counted}, and there are {found}")
