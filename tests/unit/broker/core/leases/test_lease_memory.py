"""The memory of leases, against what README.md states."""

from __future__ import annotations

import tracemalloc

from libs.storage.records.queues import AvailableMessage
from services.broker.core.queue import Choice
from tests.unit.broker.core.shards import Each, Rig

LEASE_BYTES_MAX = 480
"""Of messages that are claimed one by one, by consumers of their own: those of a large claim share
most of it."""


async def test_a_lease_takes_no_more_memory_than_is_stated() -> None:
    # Given messages that wait, and claims of one message each, by consumers of their own
    rig, count = Rig(), 5_000
    queue = rig.create()
    await rig.route([*range(1, count + 1)])
    rig.commit()

    def claim(consumer: str) -> None:
        taken: list[int] = []

        def one(item: AvailableMessage) -> Choice:
            taken.append(item.message_id)
            return Choice.TAKE if len(taken) == 1 else Choice.STOP

        rig.shard.leases.claim(queue, Each(one), 30_000, consumer, rig.now_ms)

    # When these have been claimed and stored
    tracemalloc.start()
    try:
        for number in range(count):
            claim(f"consumer-{number:040}")
        rig.shard.drain(rig.now_ms)
        rig.shard.durable()
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert rig.shard.leases.in_flight_count == count
    assert taken_bytes / count < LEASE_BYTES_MAX
