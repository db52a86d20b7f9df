"""What cannot be stored: its command fails, names the record, and has changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from libs.storage.database.clocks import LAST_MS
from libs.storage.errors import Unstorable
from libs.storage.records.queues import FailedAttempt
from libs.storage.records.redrive_records import RedriveRecord, RedriveState
from libs.storage.records.replay_records import ReplayRange
from libs.storage.records.states import LeaseOutcome
from services.broker.core.commands import Assignment, Range
from services.broker.core.lists.attempts import attempts_at
from services.broker.core.lists.outbox import Outbox
from services.broker.core.lists.replays import Replays
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Shard
from slatemq.errors import InvalidArgument
from tests.unit.broker.core.applied import assign_all
from tests.unit.broker.core.shards import START_MS, Rig

TOO_LONG = "x" * 65_536
"""One byte more than a text in a record may have."""


def redrive(**values: Any) -> RedriveRecord:
    numbers: list[Any] = [0, RedriveState.RUNNING, *[0] * 9]
    return RedriveRecord._make([*numbers, "q", "q", "", "", "", "", ()])._replace(**values)


def ranges(count: int) -> tuple[ReplayRange, ...]:
    return tuple(ReplayRange(0, 2 * n, 2 * n, 2 * n + 1) for n in range(count))


def quarantined(shard: Shard) -> None:
    shard.quarantine(shard.queues["q"], "slow", START_MS)


def create(shard: Shard) -> None:
    shard.create_queue("new", QueueSettings(TOO_LONG))


def create_with_a_replay(shard: Shard) -> None:
    shard.create_queue("new", QueueSettings("true"), ranges(65_536))


def update(shard: Shard) -> None:
    shard.update_queue(shard.queues["q"], QueueSettings("true", priority=TOO_LONG))


def quarantine(shard: Shard) -> None:
    shard.quarantine(shard.queues["q"], TOO_LONG, START_MS)


def lift(shard: Shard) -> None:
    shard.lift_quarantine(shard.queues["slow"], QueueSettings(TOO_LONG))


def start_redrive(shard: Shard) -> None:
    shard.redrives.start(redrive(filter=TOO_LONG))


def end_redrive(shard: Shard) -> None:
    shard.redrives.put(1, redrive(state=RedriveState.FAILED, error=TOO_LONG))


def replay(shard: Shard) -> None:
    shard.replays.begin("q", (ReplayRange(0, 1, 1, 2, done_count=1 << 64),))


COMMANDS: dict[Callable[[Shard], None], str] = {
    create: "config of queue 'new'",
    create_with_a_replay: "replay of queue 'new'",
    update: "config of queue 'q'",
    quarantine: "config of queue 'q'",
    lift: "config of queue 'slow'",
    start_redrive: "redrive 2",
    end_redrive: "redrive 1",
    replay: "replay of queue 'q'",
}


def facts(shard: Shard) -> object:
    """What memory has that these commands change."""
    queues = {
        queue_id: (queue.settings, queue.routing_revision, queue.live_revision)
        for queue_id, queue in shard.queues.items()
    }
    replays, redrives = dict(shard.replays.by_queue), dict(shard.redrives)
    return shard.revision, queues, replays, redrives, shard.take_config_changes()


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_command_whose_record_does_not_fit_changes_nothing(
    command: Callable[[Shard], None],
) -> None:
    rig = Rig()
    rig.create("q")
    slow = rig.create("slow")
    rig.shard.quarantine(slow, "took 9 ms", rig.now_ms)
    rig.shard.redrives.start(redrive())
    await rig.route([1], queue_id="q")
    rig.commit()
    rig.shard.take_config_changes()
    before = facts(rig.shard)

    with pytest.raises(InvalidArgument) as refused:
        command(rig.shard)

    assert refused.value.reason == "UNSTORABLE"
    assert COMMANDS[command] in refused.value.message
    assert facts(rig.shard) == before
    assert not rig.shard.has_changes
    # The process goes on, and so does its successor.
    assert rig.shard.redrives.start(redrive()) == 2
    rig.commit()
    await rig.restart()
    assert [one.message_id for one in await rig.claim(9, queue_id="q")] == [1]


async def test_a_range_that_would_leave_a_replay_too_long_is_refused_whole() -> None:
    rig = Rig()
    shard = rig.shard
    rig.create("live")
    before = shard.revision
    shard.create_queue("past", QueueSettings("true"), ranges(65_535))
    rig.commit()
    shard.take_config_changes()
    known = facts(shard)

    piece = Range(7, 0, 3, [Assignment("live", [2])], before)
    with pytest.raises(InvalidArgument, match="replay of queue 'past'"):
        assign_all(shard, [piece], rig.now_ms)

    assert (facts(shard), shard.has_changes, shard.cursors) == (known, False, {})
    assert rig.queue("live").waiting.ready_count == 0


def test_of_several_queues_whose_replays_change_together_all_change_or_none() -> None:
    replays = Replays({"fits": (), "full": ranges(65_535)})
    with pytest.raises(InvalidArgument, match="replay of queue 'full'"):
        replays.extend(["fits", "full"], 7, 5, 9)
    assert replays.of("fits") == ()
    assert not replays.has_changes


def test_a_refused_push_that_does_not_fit_stays_where_it_is() -> None:
    outbox = Outbox()
    outbox.push(3, b"value", START_MS)
    before = [*outbox.drain()]
    assert before
    with pytest.raises(InvalidArgument, match="refused push 1"):
        outbox.set_aside(3, b"value", "no", 1 << 63)
    assert (outbox.refused, outbox.has_changes) == ({}, False)


def poison_queue(shard: Shard) -> None:
    queue = shard.queues["q"]
    queue.created_revision = 1 << 64
    queue.touch()


def poison_cursor(shard: Shard) -> None:
    assign_all(shard, [Range(3, 0, 1 << 64, [])], START_MS)


def poison_attempts(shard: Shard) -> None:
    shard.attempts.add(attempts_at(shard.queues["q"], 1), FailedAttempt("c", 1 << 63, TOO_LONG))


def poison_finished(shard: Shard) -> None:
    shard.leases.finished.add([1 << 64], LeaseOutcome.ACKED)
    shard.queues["q"].touch()


def poison_outbox(shard: Shard) -> None:
    shard.outbox.push(0, b"value", START_MS)
    shard.outbox.renumber(0, 1 << 63)


def poison_executed(shard: Shard) -> None:
    shard.executed.add(TOO_LONG, bytes(16))


POISONS: dict[Callable[[Shard], None], str] = {
    poison_queue: "a record of queue 'q'",
    poison_cursor: "routing cursor of log 3",
    poison_attempts: "failed attempts",
    poison_finished: "finished leases",
    poison_outbox: "outbox",
    poison_executed: "executed request IDs",
}


@pytest.mark.parametrize("poison", POISONS)
def test_a_commit_that_cannot_be_encoded_names_the_record(
    poison: Callable[[Shard], None],
) -> None:
    rig = Rig()
    rig.create("q")
    poison(rig.shard)
    with pytest.raises(Unstorable, match=POISONS[poison]):
        rig.shard.drain(rig.now_ms)


async def test_at_the_last_time_of_the_clock_everything_can_be_stored() -> None:
    rig = Rig()
    rig.create("orders", max_attempts=1)
    rig.now_ms = LAST_MS
    await rig.route([1, 2, 3])
    await rig.route([4], visible_at_ms=(1 << 63) - 1, deadline_ms=(1 << 63) - 1)
    rig.commit()
    tokens = [lease.token for lease in await rig.claim(2)]
    rig.commit()
    rig.shard.leases.ack(tokens[:1], rig.now_ms)
    rig.commit()
    rig.now_ms += 30_000  # no clock gives it, but nothing would end where one did
    await rig.expire()
    rig.commit()
    await rig.restart()
    queue = rig.queue()
    counts = (
        queue.waiting.ready_count,
        queue.waiting.timed_count,
        queue.done.count,
        queue.failed.count,
    )
    assert counts == (1, 1, 1, 1)
