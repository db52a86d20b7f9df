"""What a queue by itself counts and allows."""

from __future__ import annotations

from collections.abc import Sequence

from libs.storage.records.queues import AvailableMessage
from services.broker.core.commands import Nack
from services.broker.core.queue import Choice, Queue, Selector
from tests.unit.broker.core.shards import Rig


class All(Selector):
    """Takes all that it is offered."""

    def capacity(self) -> int:
        return 100

    def offer(self, items: Sequence[AvailableMessage]) -> bool:
        return True

    def choose(self, item: AvailableMessage) -> Choice:
        return Choice.TAKE


def counted(queue: Queue) -> dict[str, int]:
    return {
        "claimed": queue.claimed_count,
        "acked": queue.acked_count,
        "nacked": queue.nacked_count,
        "ended": queue.ended_leases_count,
        "requeued": queue.requeued_count,
        "dead": queue.dead_letters_count,
    }


async def test_a_queue_counts_what_happens_to_its_messages_from_zero() -> None:
    rig = Rig()
    queue = rig.create(max_attempts=2)
    assert set(counted(queue).values()) == {0}
    await rig.route([1, 2, 3, 4])

    first, second, third, fourth = await rig.claim(4)
    rig.shard.leases.ack([first.token], rig.now_ms)
    await rig.nack(Nack(second.token), Nack(third.token, release=True))
    rig.now_ms = fourth.deadline_ms
    await rig.expire()
    assert counted(queue) == {
        "claimed": 4,
        "acked": 1,
        "nacked": 1,
        "ended": 1,
        "requeued": 3,
        "dead": 0,
    }

    again = {lease.message_id: lease for lease in await rig.claim(3)}
    await rig.nack(Nack(again[2].token))
    rig.now_ms = again[4].deadline_ms
    await rig.expire()
    assert counted(queue) == {
        "claimed": 7,
        "acked": 1,
        "nacked": 2,
        "ended": 3,
        "requeued": 4,
        "dead": 2,
    }


async def test_no_claim_gets_more_where_fewer_may_be_in_flight_than_are() -> None:
    rig = Rig()
    queue = rig.create()
    await rig.route(range(1, 11))
    await rig.claim(3)

    def claim() -> list[int]:
        claimed = rig.shard.leases.claim(queue, All(), 30_000, "worker", rig.now_ms)
        return [lease.message_id for lease in claimed.leases()]

    for max_in_flight in (1, 2, 3):
        rig.shard.update_queue(queue, queue.settings.changed(max_in_flight=max_in_flight))
        assert queue.capacity == 0
        assert await rig.run(claim) == []
    rig.shard.update_queue(queue, queue.settings.changed(max_in_flight=5))
    assert queue.capacity == 2
    assert await rig.run(claim) == [4, 5]


def test_a_queue_that_is_not_about_to_move_takes_commands() -> None:
    assert not Rig().create().is_leaving
