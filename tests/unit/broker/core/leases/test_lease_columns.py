"""Leases of a large claim are columns until one is needed: no one can tell the difference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from libs.storage.records.queues import AvailableMessage, DoneMessage
from services.broker.core import leases
from services.broker.core.commands import Nack
from services.broker.core.leases import Claimed
from services.broker.core.waiting.scan import Choice, Selector
from tests.unit.broker.core.shards import START_MS, Rig

IDS = range(1, 301)


class All(Selector):
    """Takes everything at once."""

    def capacity(self) -> int:
        return len(IDS)

    def offer(self, items: Sequence[AvailableMessage]) -> bool:
        return True

    def choose(self, item: AvailableMessage) -> Choice:
        return Choice.TAKE


async def claimed_rig(monkeypatch: pytest.MonkeyPatch, *, columns: bool) -> tuple[Rig, Claimed]:
    """A claim of 300: two buckets of 250 and 50, as columns or not."""
    monkeypatch.setattr(leases, "PACKED_MIN", 50 if columns else 1000)
    rig = Rig()
    rig.create()
    await rig.route(IDS[:100])
    await rig.route(IDS[100:], priority=0, deadline_ms=START_MS + 90_000)
    rig.shard.leases._blocks = iter(range(1001, 2000))
    claimed = rig.shard.leases.claim(rig.queue(), All(), 30_000, "worker", rig.now_ms)
    return rig, claimed


async def both(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Rig, Claimed]]:
    return [await claimed_rig(monkeypatch, columns=columns) for columns in (True, False)]


async def test_their_rows_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for rig, claimed in await both(monkeypatch):
        first = rig.shard.drain(rig.now_ms)
        rig.now_ms += 10
        rig.shard.leases.ack(claimed.tokens[50:270], rig.now_ms)
        rows.append((first, rig.shard.drain(rig.now_ms)))
    assert rows[0] == rows[1]


async def test_what_is_acked_is_reported_with_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, claimed = await claimed_rig(monkeypatch, columns=True)
    rig.now_ms += 10
    rig.shard.leases.ack([claimed.tokens[7], claimed.tokens[249]], rig.now_ms)
    done = [DoneMessage._make(one) for one in rig.queue().done._new]
    assert done == [
        DoneMessage(8, rig.now_ms, 1, "worker", START_MS, claimed.tokens[7]),
        DoneMessage(250, rig.now_ms, 1, "worker", START_MS, claimed.tokens[249]),
    ]


async def test_each_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for rig, claimed in await both(monkeypatch):
        tokens = claimed.tokens
        rig.shard.leases.ack(tokens[:10], rig.now_ms)
        await rig.nack(Nack(tokens[20], "no", 0))
        rig.shard.leases.extend([tokens[30]], 60_000, rig.now_ms)
        rig.shard.leases.release(tokens[45:50])
        rig.shard.leases.release([*tokens[40:45], *tokens[:10]])  # those that are acked stay acked
        left = {lease.token: lease for lease in rig.queue().leases}

        assert left.keys() == set(tokens) - {*tokens[:10], tokens[20], *tokens[40:50]}
        assert {one.message_id for one in left.values()} == {
            *IDS[10:20], *IDS[21:40], *IDS[50:]
        }  # fmt: skip
        assert left[tokens[30]].deadline_ms == START_MS + 60_000
        assert left[tokens[31]].deadline_ms == START_MS + 30_000
        assert [left[tokens[at]].retention_deadline_ms for at in (99, 100)] == [
            0,
            START_MS + 90_000,
        ]
        assert await rig.ids(20) == [*IDS[40:50], IDS[20]]  # back in their place, uncounted


async def test_they_end_together_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for rig, claimed in await both(monkeypatch):
        rig.shard.leases.extend([claimed.tokens[3]], 60_000, rig.now_ms)
        rig.now_ms += 30_000
        ended = 0
        while rig.shard.leases.deadlines.next_ms() == START_MS + 30_000:
            await rig.expire(500)
            ended += 1
        assert ended
        assert [lease.token for lease in rig.queue().leases] == [claimed.tokens[3]]


async def test_they_are_found_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for rig, claimed in await both(monkeypatch):
        assert rig.queue().leases.message_ids() == set(IDS)
        assert [one.token for one in rig.queue().leases.of_message(77)] == [claimed.tokens[76]]
        running = rig.shard.leases.running(claimed.tokens[76])
        assert running is not None
        assert running is rig.queue().leases.of_message(77)[0]
        rig.shard.delete_queue(rig.queue())
        assert rig.shard.leases.running(claimed.tokens[0]) is None
        assert rig.shard.leases.running(claimed.tokens[249]) is None


async def test_they_come_back_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, claimed = await claimed_rig(monkeypatch, columns=True)
    rig.shard.leases.ack(claimed.tokens[100:150], rig.now_ms)
    rig.commit()
    await rig.restart()
    left = [*claimed.tokens[:100], *claimed.tokens[150:]]
    assert [lease.token for lease in rig.queue().leases] == left
    assert {lease.consumer for lease in rig.queue().leases} == {"worker"}
    assert {lease.attempts for lease in rig.queue().leases} == {1}
