"""A command that had to wait for a slow read: it is judged by the time when it runs again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from services.broker.core.batches.execute import Execution, Release, execute
from services.broker.core.leases import Lease
from services.broker.core.queue import Choice, NeedsLane
from services.broker.core.shard import Nack, Needs
from services.broker.requests.tokens import parse_token
from tests.integration.broker.rig import Rig, running
from tests.manual_clock import ManualClock
from tests.unit.broker.core.shards import Each

T = TypeVar("T")
READ_MS = 20_000


async def slowly(rig: Rig, command: Callable[[int], T]) -> tuple[T, int]:
    """Runs a command whose reads take long; gives how many there were, too."""
    reads = 0

    def run(now_ms: int) -> T:
        nonlocal reads
        try:
            return command(now_ms)
        except (NeedsLane, Needs):
            reads += 1
            rig.clock.advance(READ_MS)
            raise

    return await rig.owner.run(run), reads


async def claim(rig: Rig) -> list[Lease]:
    def take(now_ms: int) -> list[Lease]:
        shard = rig.owner.shard
        return shard.leases.claim(
            shard.queues["q"], Each(lambda _: Choice.TAKE), 1000, "w", now_ms
        ).leases()

    leases, reads = await slowly(rig, take)
    assert reads == 1
    return leases


async def test_a_lease_begins_when_its_message_has_been_read(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        await rig.assign([1])
    async with running(tmp_path, clock) as rig:
        (lease,) = await claim(rig)
        assert lease.deadline_ms == clock.now_ms() + 1000


async def test_a_message_whose_retention_ends_while_it_is_read_is_not_handed_out(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        await rig.assign([1, 2], retention_deadlines_ms=[clock.now_ms() + 1000, 0])
    async with running(tmp_path, clock) as rig:
        assert [lease.message_id for lease in await claim(rig)] == [2]


async def test_the_delay_of_a_nack_or_a_release_counts_from_when_it_came(tmp_path: Path) -> None:
    # Given two leases after a restart, whose delays need what is not in memory
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        due_ms = clock.now_ms() + 60_000
        await rig.assign([1, 2, 3, 4], visible_at_ms=[0, 0, due_ms, due_ms])
        claimed = await rig.claim(max_messages=2, lease_ms=600_000)
    tokens = [parse_token(one.lease_token, "")[1] for one in claimed]
    async with running(tmp_path, clock) as rig:
        shard = rig.owner.shard
        arrived_ms = clock.now_ms()

        # When they are given back, and every read takes long
        nack = Nack(tokens[0], "no", due_ms - arrived_ms)
        _, nack_reads = await slowly(
            rig, lambda now_ms: shard.leases.nack([nack], now_ms, arrived_ms)
        )
        came_later_ms = clock.now_ms()
        release = Execution([Release(tokens[1], due_ms - came_later_ms)])
        await slowly(rig, lambda now_ms: execute(shard, release, now_ms, came_later_ms))

        # Then one read was enough, and both wait as long as they were told to
        assert nack_reads == 1
        assert shard.queues["q"].waiting.timed_count == 4
        assert shard.queues["q"].waiting.next_due_ms() == due_ms
        clock.advance(due_ms - clock.now_ms())
        given = [one.message.message_id for one in await rig.claim(max_messages=10)]
        assert sorted(given) == [1, 2, 3, 4]
