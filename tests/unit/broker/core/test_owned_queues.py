"""What queues of an owner add up to, through changes, deletions and restarts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.broker.core.lifecycle import new_state
from services.broker.core.queue import Queue
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Shard

NAMES = st.sampled_from(["a", "b", "c"])


@given(steps=st.lists(st.tuples(NAMES, st.sampled_from(["", "x", "y"]), st.integers(-1, 5))))
def test_the_sums_are_those_of_the_queues_that_exist(steps: list[tuple[str, str, int]]) -> None:
    shard = Shard()
    for queue_id, owner, cost in steps:
        settings = QueueSettings("true", owner=owner, filter_cost=cost, priority_cost=2 * cost)
        queue = shard.queues.get(queue_id)
        if queue is None and cost >= 0 and shard.epoch_is_free(queue_id):
            shard.create_queue(queue_id, settings)
        elif queue is not None and cost < 0:
            shard.delete_queue(queue)
        elif queue is not None and cost == 0 and not queue.settings.quarantine:
            shard.quarantine(queue, "slow", 1)
        elif queue is not None:
            shard.update_queue(queue, settings)
        check(shard)

    # As after a restart, with what was stored
    restored = Shard()
    for queue in shard.queues.values():
        stored = QueueSettings.from_record(queue.settings.record())
        restored.restore_queue(Queue(queue.queue_id, stored, new_state(None, 1), restored.notes))
    check(restored)


def check(shard: Shard) -> None:
    counts, costs = Counter[str](), Counter[str]()
    for queue in shard.queues.values():
        counts[queue.settings.owner] += 1
        costs[queue.settings.owner] += queue.settings.cost
    for owner in ("x", "y"):
        assert shard.owned.totals(owner) == (counts[owner], costs[owner])
    assert shard.owned.totals("") == (0, 0)
