"""Leases are found by their messages, of which several entries may be in flight."""

from __future__ import annotations

from services.broker.core.commands import Purge
from tests.unit.broker.core.shards import Rig


def found(rig: Rig, message_id: int) -> set[int]:
    return {lease.token for lease in rig.queue().leases.of_message(message_id)}


async def test_every_lease_is_found_by_its_message_for_as_long_as_it_runs() -> None:
    rig = Rig()
    rig.create()
    for ids in ([1, 2], [1], [1, 3]):
        await rig.route(ids)
    leases = await rig.claim(5)
    of_one = {lease.token for lease in leases if lease.message_id == 1}
    assert len(of_one) == 3
    assert found(rig, 1) == of_one
    assert len(found(rig, 2)) == len(found(rig, 3)) == 1
    assert found(rig, 4) == set()
    rig.commit()
    await rig.restart()
    assert found(rig, 1) == of_one

    # Whichever ends first, the others are found.
    left = set(of_one)
    for token in sorted(of_one):
        rig.shard.leases.ack([token], rig.now_ms)
        left.discard(token)
        assert found(rig, 1) == left
    assert len(found(rig, 2)) == 1

    # One that is claimed again is found, and after a purge none is.
    await rig.route([1])
    [again] = await rig.claim(1)
    assert found(rig, 1) == {again.token}
    rig.shard.purge(rig.queue(), [Purge.IN_FLIGHT])
    assert found(rig, 1) == found(rig, 2) == set()
