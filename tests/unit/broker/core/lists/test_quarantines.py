"""Quarantines of a shard: every part of every log is judged once, live or by the replay."""

from __future__ import annotations

import random

import pytest

from libs.storage.records.replay_records import OPEN_END, ReplayRange
from services.broker.core.commands import Assignment, Range
from services.broker.core.lists.replays import Counts, Replays
from services.broker.core.queue import Queue
from services.broker.core.settings import QueueSettings
from tests.forms import seeds
from tests.unit.broker.core.applied import assign_all, backfill_whole
from tests.unit.broker.core.shards import Rig


def made(rig: Rig, queue_id: str = "slow") -> Queue:
    return rig.shard.create_queue(queue_id, QueueSettings("true"))


def assign(rig: Rig, previous: int, last: int, *ids: int, revision: int, log: int = 0) -> bool:
    matches = [Assignment("slow", ids)] if ids else []
    piece = Range(log, previous, last, matches, revision)
    return assign_all(rig.shard, [piece], rig.now_ms) == [True]


def backfill(rig: Rig, previous: int, last: int, *ids: int, log: int = 0) -> bool:
    queue = rig.shard.queues["slow"]
    piece = Range(log, previous, last, [Assignment("slow", ids)] if ids else [])
    return backfill_whole(rig.shard, queue, piece, Counts(0, 0), rig.now_ms)


async def waiting(rig: Rig) -> list[int]:
    return sorted(one.message_id for one in await rig.claim(99, queue_id="slow"))


async def test_what_comes_during_a_quarantine_is_left_to_a_replay_up_to_its_end() -> None:
    rig = Rig()
    queue = made(rig)
    assert assign(rig, 0, 4, 3, 4, revision=rig.shard.revision)
    rig.shard.quarantine(queue, "took 9 ms", rig.now_ms)
    assert rig.shard.replays.of("slow") == (ReplayRange(0, 4, 4, OPEN_END),)
    assert assign(rig, 4, 9, revision=rig.shard.revision)
    rig.commit()
    await rig.restart()

    queue = rig.shard.queues["slow"]
    assert (queue.settings.quarantine, queue.settings.quarantined_at_ms) == (
        "took 9 ms",
        rig.now_ms,
    )
    rig.shard.lift_quarantine(queue, queue.settings)
    assert rig.shard.replays.of("slow") == (ReplayRange(0, 4, 4, 9),)
    assert assign(rig, 9, 12, 10, revision=rig.shard.revision)
    assert backfill(rig, 4, 9, 6)
    rig.commit()
    assert (queue.settings.quarantine, queue.settings.quarantined_at_ms) == ("", 0)
    assert await waiting(rig) == [3, 4, 6, 10]


async def test_matches_judged_before_it_and_applied_in_it_are_left_to_the_replay() -> None:
    rig = Rig()
    queue = made(rig)
    before = rig.shard.revision
    rig.shard.quarantine(queue, "slow", rig.now_ms)

    assert assign(rig, 0, 4, 3, 4, revision=before)

    assert await waiting(rig) == []
    rig.shard.lift_quarantine(queue, queue.settings)
    assert backfill(rig, 0, 4, 3, 4)
    assert await waiting(rig) == [3, 4]


@pytest.mark.parametrize("judged", ["before it", "during it"])
async def test_a_range_judged_earlier_and_applied_after_the_end_is_left_to_the_replay(
    judged: str,
) -> None:
    rig = Rig()
    queue = made(rig)
    before = rig.shard.revision
    rig.shard.quarantine(queue, "slow", rig.now_ms)
    during = rig.shard.revision
    assert assign(rig, 0, 4, revision=during)
    rig.shard.lift_quarantine(queue, queue.settings)

    if judged == "before it":
        assert assign(rig, 4, 9, 6, revision=before)
    else:
        assert assign(rig, 4, 9, revision=during)

    assert rig.shard.replays.of("slow") == (ReplayRange(0, 0, 0, 9),)
    assert assign(rig, 9, 12, 11, revision=rig.shard.revision)
    assert rig.shard.replays.of("slow") == (ReplayRange(0, 0, 0, 9),)
    assert await waiting(rig) == [11]


async def test_a_log_that_comes_up_during_a_quarantine_is_replayed_from_its_beginning() -> None:
    rig = Rig()
    queue = made(rig)
    assert assign(rig, 0, 4, 3, revision=rig.shard.revision)
    rig.shard.quarantine(queue, "slow", rig.now_ms)
    first = 1 << 48
    assert assign(rig, 0, first + 5, revision=rig.shard.revision, log=1)

    rig.shard.lift_quarantine(queue, queue.settings)

    assert rig.shard.replays.of("slow") == (
        ReplayRange(0, 4, 4, 4),
        ReplayRange(1, 0, 0, first + 5),
    )


async def test_a_replay_under_way_goes_on_after_the_quarantine() -> None:
    replays = Replays({"slow": [ReplayRange(0, 0, 3, 10), ReplayRange(1, 0, 7, 7)]})
    replays.open("slow", {0: 25, 1: 30})
    assert replays.of("slow") == (
        ReplayRange(0, 0, 3, 10),
        ReplayRange(0, 25, 25, OPEN_END),
        ReplayRange(1, 30, 30, OPEN_END),
    )
    replays.close("slow", {0: 40, 1: 30})
    assert replays.range_of("slow", 0) == ReplayRange(0, 0, 3, 10)
    replays.move("slow", 0, 10, Counts(4, 0))
    assert replays.range_of("slow", 0) == ReplayRange(0, 25, 25, 40)
    replays.extend(["slow"], 0, 40, 50)
    assert replays.range_of("slow", 0) == ReplayRange(0, 25, 25, 50)
    replays.extend(["slow"], 0, 70, 80)
    replays.move("slow", 0, 50, Counts(2, 0))
    assert replays.range_of("slow", 0) == ReplayRange(0, 70, 70, 80)
    replays.move("slow", 0, 80, Counts(3, 0))
    assert not replays.is_running("slow")


async def test_quarantines_one_after_the_other_leave_one_part_to_replay() -> None:
    replays = Replays()
    for _ in range(9):
        replays.open("slow", {0: 5})
        replays.close("slow", {0: 5})
    replays.open("slow", {0: 5})
    replays.close("slow", {0: 9})
    replays.open("slow", {0: 9})
    assert replays.of("slow") == (ReplayRange(0, 5, 5, OPEN_END),)


@pytest.mark.parametrize("seed", seeds(30, 10))
async def test_in_random_histories_each_message_comes_once(seed: int) -> None:
    """Every entry is one message that matches; some ranges are judged by what was known before."""
    chance, rig = random.Random(seed), Rig()
    queue = made(rig)
    known: list[tuple[int, bool]] = [(rig.shard.revision, True)]
    end = 0
    for _ in range(60):
        match chance.choice(("assign", "assign", "assign", "backfill", "turn", "restart")):
            case "assign":
                revision, is_judged = known[-1] if chance.random() < 0.6 else chance.choice(known)
                last = end + chance.randint(1, 4)
                ids = range(end + 1, last + 1) if is_judged else ()
                assert assign(rig, end, last, *ids, revision=revision)
                end = last
            case "backfill" if not queue.settings.quarantine:
                part = rig.shard.replays.range_of("slow", 0)
                if part is not None and part.cursor < part.end:
                    last = chance.randint(part.cursor + 1, part.end)
                    ids = range(part.cursor + 1, last + 1)
                    assert backfill(rig, part.cursor, last, *ids)
            case "turn":
                if queue.settings.quarantine:
                    rig.shard.lift_quarantine(queue, queue.settings)
                else:
                    rig.shard.quarantine(queue, "slow", rig.now_ms)
                known.append((rig.shard.revision, not queue.settings.quarantine))
            case "restart":
                rig.commit()
                await rig.restart()
                queue = rig.shard.queues["slow"]
                known = [(rig.shard.revision, not queue.settings.quarantine)]
    if queue.settings.quarantine:
        rig.shard.lift_quarantine(queue, queue.settings)
    while (part := rig.shard.replays.range_of("slow", 0)) and part.cursor < part.end:
        assert backfill(rig, part.cursor, part.end, *range(part.cursor + 1, part.end + 1))
    rig.commit()
    got: list[int] = []
    while some := await rig.claim(99, queue_id="slow"):
        got += [one.message_id for one in some]
    assert sorted(got) == list(range(1, end + 1))
