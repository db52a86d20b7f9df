"""Lists of commands: what each does, and that a refused list does nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from libs.storage.layout.own_keys import MINUTE_MS, executed_range, outbox_key, outbox_range
from libs.storage.records.execution_records import OutboxCounter, OutboxRecord, encode_outbox
from services.broker.core.batches.execute import (
    Command,
    Complete,
    Execution,
    Extend,
    Fail,
    Push,
    Release,
    Transfer,
    execute,
)
from services.broker.core.commands import Finish, Nack, Needs
from services.broker.core.leases import Lease
from services.broker.core.lists import executed
from services.broker.core.lists.executed import WINDOW_MINUTES
from slatemq.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SlateMQError,
)
from tests.unit.broker.core.shards import Rig
from tests.unit.broker.core.stored import StoredQueue, stored_attempts, stored_queue

VALUE = encode_outbox(OutboxRecord(1, "orders", b"new", 3, {}))
INGEST = 4


async def run(rig: Rig, *commands: Command, request_id: str = "", mark: bytes = b"1") -> list[int]:
    elsewhere = frozenset({"far"})
    execution = Execution(commands, request_id, mark * 16, INGEST, elsewhere)
    return await rig.run(lambda: execute(rig.shard, execution, rig.now_ms))


async def rig_with(count: int, *others: str, priority: int = 0) -> tuple[Rig, list[Lease]]:
    """A shard with messages 1 to `count` claimed from `orders`, all of it stored."""
    rig = Rig()
    for queue_id in ("orders", *others):
        rig.create(queue_id)
    await rig.route(range(1, count + 1), priority=priority)
    leases = await rig.claim(count)
    rig.commit()
    return rig, leases


def stored(rig: Rig, queue_id: str = "orders") -> StoredQueue:
    rig.commit()
    found = stored_queue(rig.store.rows, queue_id)
    assert found is not None
    return found


def outbox_rows(rig: Rig) -> list[bytes]:
    span = outbox_range(INGEST, 0)
    return [key for key in sorted(rig.store.rows) if span.start <= key < span.end]


def executed_rows(rig: Rig) -> list[bytes]:
    span = executed_range(0, (1 << 32) - 1)
    return [key for key in rig.store.rows if span.start <= key < span.end]


async def test_each_command_does_what_it_says_in_one_commit() -> None:
    rig, leases = await rig_with(5, "next")
    tokens = [lease.token for lease in leases]

    ends = await run(
        rig,
        Complete(tokens[0]),
        Fail(tokens[1], "bad address"),
        Release(tokens[2]),
        Extend(tokens[3], 90_000),
        Transfer(tokens[4], "next", priority=7),
        Push("far", VALUE),
    )

    orders, following = stored(rig), stored(rig, "next")
    assert ends == [0, 0, 0, rig.now_ms + 90_000, 0, 0]
    assert {m: done.transferred_to for m, done in orders.done.items()} == {1: "", 5: "next"}
    assert orders.failed[2].reason == "fail: bad address"
    assert [one[2] for one in stored_attempts(rig.store.rows, "orders", 2)] == ["fail: bad address"]
    assert orders.waiting[3].attempts == 0
    assert orders.held[4].lease_deadline_ms == rig.now_ms + 90_000
    assert (following.waiting[5].priority, following.waiting[5].attempts) == (7, 0)
    assert outbox_rows(rig) == [outbox_key(INGEST, 1)]
    assert rig.queue().acked_count == 2


REFUSED: list[tuple[str, Callable[[int], Command], type[SlateMQError], str]] = [
    ("an unknown lease", lambda _: Complete(99), NotFound, "LEASE_UNKNOWN"),
    ("a finished lease", lambda done: Release(done), FailedPrecondition, "LEASE_ENDED"),
    ("an unknown target", lambda _: Transfer(2, "none"), NotFound, "QUEUE_NOT_FOUND"),
    ("a target elsewhere", lambda _: Transfer(2, "far"), FailedPrecondition, "OTHER_SHARD"),
    ("a push to no queue", lambda _: Push("none", VALUE), NotFound, "QUEUE_NOT_FOUND"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
async def test_a_list_with_one_refused_command_changes_nothing(
    case: tuple[str, Callable[[int], Command], type[SlateMQError], str],
) -> None:
    _, make, kind, reason = case
    rig, leases = await rig_with(3, "next")
    rig.shard.leases.ack([leases[0].token], rig.now_ms)
    rig.commit()
    bad = make(leases[0].token)
    if isinstance(bad, Transfer):
        bad = Transfer(leases[1].token, bad.target)
    before = dict(rig.store.rows)

    good = (Transfer(leases[2].token, "next"), Push("orders", VALUE))
    with pytest.raises(kind) as refused:
        await run(rig, *good, bad, request_id="r")

    assert (refused.value.reason, refused.value.metadata["command"]) == (reason, "2")
    assert not rig.shard.has_changes
    assert rig.store.rows == before
    await run(rig, Complete(leases[2].token), request_id="r", mark=b"2")


async def test_a_lease_stands_in_one_command_only() -> None:
    rig, leases = await rig_with(1)
    token = leases[0].token

    with pytest.raises(InvalidArgument) as refused:
        await run(rig, Extend(token), Complete(token))

    assert refused.value.field == "commands[1].complete.lease_token"
    assert refused.value.metadata["command"] == "1"
    assert not rig.shard.has_changes


@pytest.mark.parametrize(
    ("make", "acked", "nacked"),
    [
        (Complete, Finish.OK, Finish.ENDED),
        (Fail, Finish.ENDED, Finish.OK),
        (Release, Finish.ENDED, Finish.OK),
        (lambda token: Transfer(token, "next"), Finish.OK, Finish.ENDED),
    ],
)
async def test_a_lease_that_a_command_ended_is_known_by_how_it_ended_also_after_a_restart(
    make: Callable[[int], Command], acked: Finish, nacked: Finish
) -> None:
    rig, [lease] = await rig_with(1, "next")

    await run(rig, make(lease.token))

    for _ in range(2):
        assert rig.shard.leases.ack([lease.token], rig.now_ms) == [acked]
        assert await rig.nack(Nack(lease.token)) == [nacked]
        assert stored(rig).held == {}
        await rig.restart()


async def test_a_message_past_its_retention_is_not_transferred_back_to_life() -> None:
    rig, _ = await rig_with(0, "next")
    await rig.route([1], deadline_ms=rig.now_ms + 1000)
    leases = await rig.claim(1)
    rig.now_ms += 1000

    await run(rig, Transfer(leases[0].token, "next", delay_ms=50))

    assert stored(rig).done[1].transferred_to == "next"
    assert stored(rig, "next").waiting == {}
    assert rig.queue("next").waiting.expired_count == 1


async def test_retention_is_judged_by_the_latest_time_at_which_anybody_looked() -> None:
    rig, _ = await rig_with(0, "next")
    await rig.route([1], deadline_ms=rig.now_ms + 1000)
    [lease] = await rig.claim(1)
    rig.now_ms += 1000
    await rig.claim(1, queue_id="next")
    rig.now_ms -= 500

    await run(rig, Transfer(lease.token, "next", delay_ms=100))

    assert stored(rig, "next").waiting == {}
    assert rig.queue("next").waiting.expired_count == 1


@pytest.mark.parametrize("given_back", [False, True])
async def test_what_leaves_at_the_end_of_its_retention_joins_those_that_leave_then(
    given_back: bool,
) -> None:
    # Given messages that leave in the same millisecond, not in memory any more
    rig, _ = await rig_with(0, "next")
    ends_ms = rig.now_ms + 500
    await rig.route([1], deadline_ms=ends_ms)
    await rig.claim(1)
    queue_id = "orders" if given_back else "next"
    await rig.route([8, 9], visible_at_ms=ends_ms, queue_id=queue_id)
    rig.commit()
    await rig.restart()

    # When one more comes whose delay ends after its retention
    [lease] = rig.queue().leases
    later = 2000
    await run(
        rig, Release(lease.token, later) if given_back else Transfer(lease.token, "next", 0, later)
    )

    # Then all are there
    assert stored(rig, queue_id).waiting.keys() == {1, 8, 9}


async def test_a_transfer_keeps_the_retention_and_waits_for_its_delay() -> None:
    rig, _ = await rig_with(0, "next")
    deadline_ms = rig.now_ms + 60_000
    await rig.route([1], deadline_ms=deadline_ms)
    leases = await rig.claim(1)

    await run(rig, Transfer(leases[0].token, "next", delay_ms=500))

    waiting = stored(rig, "next").waiting[1]
    assert waiting.visible_at_ms == rig.now_ms + 500
    assert waiting.retention_deadline_ms == deadline_ms
    assert rig.queue("next").waiting.next_due_ms() == rig.now_ms + 500


async def test_without_a_priority_a_transfer_takes_the_fallback_of_its_target() -> None:
    rig, leases = await rig_with(1, "next", priority=3)
    following = rig.queue("next")
    following.settings = following.settings.changed(fallback_priority=9)

    await run(rig, Transfer(leases[0].token, "next"))

    assert stored(rig, "next").waiting[1].priority == 9


@pytest.mark.parametrize(("own_ms", "waits_ms"), [(None, 700), (500, 500), (0, 0)])
async def test_without_a_delay_a_transfer_takes_the_default_of_its_target(
    own_ms: int | None, waits_ms: int
) -> None:
    rig, leases = await rig_with(1, "next")
    following = rig.queue("next")
    following.settings = following.settings.changed(default_delay_ms=700)

    await run(rig, Transfer(leases[0].token, "next", delay_ms=own_ms))

    visible_at_ms = stored(rig, "next").waiting[1].visible_at_ms
    assert visible_at_ms == (waits_ms and rig.now_ms + waits_ms)


async def test_nothing_changes_before_everything_cold_is_read() -> None:
    # Given messages that are due in the same millisecond, not in memory any more
    rig, _ = await rig_with(2, "next")
    due_ms = rig.now_ms + 500
    await rig.route([8, 9], visible_at_ms=due_ms, queue_id="next")
    rig.commit()
    await rig.restart()
    leases = list(rig.queue().leases)
    commands = (Complete(leases[0].token), Transfer(leases[1].token, "next", 0, 500))

    # When a list completes one message, and adds another to them
    with pytest.raises(Needs):
        execute(rig.shard, Execution(commands), rig.now_ms)
    changed = rig.shard.has_changes
    await run(rig, *commands)

    # Then it waited for them before it did anything, and all are there
    assert not changed
    assert stored(rig, "next").waiting.keys() == {8, 9, leases[1].message_id}
    assert stored(rig).done.keys() == {1, 2}


async def test_a_message_may_be_transferred_to_where_it_is_and_to_its_own_queue() -> None:
    rig, leases = await rig_with(1, "next")
    await rig.route([1], queue_id="next")

    await run(rig, Transfer(leases[0].token, "next"))
    assert rig.queue("next").waiting.ready_count == 2
    rig.commit()
    await rig.restart()
    assert rig.queue("next").waiting.ready_count == 2

    await rig.route([2])
    [own] = await rig.claim(1)
    await run(rig, Transfer(own.token, "orders"))
    again = await rig.claim(5)
    assert [(lease.message_id, lease.attempts) for lease in again] == [(2, 1)]


async def test_the_failed_attempts_of_two_entries_of_a_message_are_one_history() -> None:
    rig, leases = await rig_with(1, "next")
    await run(rig, Transfer(leases[0].token, "next"))
    await rig.route([1], queue_id="next")

    for reason in ("one", "two"):
        rig.commit()
        await rig.restart()
        [lease] = await rig.claim(1, queue_id="next")
        assert lease.attempts == 1
        await run(rig, Fail(lease.token, reason))
    rig.commit()

    outcomes = [one[2] for one in stored_attempts(rig.store.rows, "next", 1)]
    assert outcomes == ["fail: one", "fail: two"]


# --- Request IDs ------------------------------------------------------------


async def test_a_repeat_is_ok_and_does_nothing_over_restarts_for_ten_minutes() -> None:
    rig, leases = await rig_with(2)
    commands = (Complete(leases[0].token), Extend(leases[1].token), Push("orders", VALUE))
    await run(rig, *commands, request_id="r")
    rig.commit()
    await rig.restart(away_ms=(WINDOW_MINUTES - 1) * MINUTE_MS)

    rig.shard.executed.forget(rig.now_ms)
    ends = await run(rig, *commands, request_id="r")

    [lease] = rig.queue().leases
    assert ends[1] == lease.deadline_ms
    assert not rig.shard.outbox.has_changes
    assert rig.shard.outbox.counter(INGEST).last_number == 1


async def test_a_repeat_says_that_a_lease_which_it_extended_has_ended() -> None:
    rig, leases = await rig_with(2)
    commands = (Extend(leases[0].token), Extend(leases[1].token))
    first = await run(rig, *commands, request_id="r")
    rig.shard.leases.ack([leases[0].token], rig.now_ms)

    assert await run(rig, *commands, request_id="r") == [0, first[1]]


async def test_the_same_request_id_with_other_commands_is_refused() -> None:
    rig, leases = await rig_with(1)
    await run(rig, Push("orders", VALUE), request_id="r")

    with pytest.raises(InvalidArgument) as refused:
        await run(rig, Complete(leases[0].token), request_id="r", mark=b"2")

    assert (refused.value.field, refused.value.reason) == ("request_id", "REQUEST_ID_REUSED")
    assert rig.queue().leases.count == 1


async def test_request_ids_go_with_their_rows_when_their_time_is_over() -> None:
    rig, _ = await rig_with(0)
    for n in range(3):
        await run(rig, Push("orders", VALUE), request_id=f"r{n}")
        rig.commit()
        rig.now_ms += MINUTE_MS
    rig.now_ms += (WINDOW_MINUTES - 1) * MINUTE_MS
    await rig.restart()

    rig.shard.executed.forget(rig.now_ms)
    rig.commit()

    known = [n for n in range(3) if rig.shard.executed.fingerprint(f"r{n}")]
    assert 2 in known
    assert 0 not in known
    assert len(executed_rows(rig)) == len(known)
    rig.now_ms += 2 * MINUTE_MS
    rig.shard.executed.forget(rig.now_ms)
    rig.commit()
    assert executed_rows(rig) == []


async def test_no_more_request_ids_are_taken_than_can_be_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executed, "REQUEST_IDS_MAX", 2)
    rig, _ = await rig_with(0)
    for n in range(2):
        await run(rig, Push("orders", VALUE), request_id=f"r{n}")

    with pytest.raises(ResourceExhausted):
        await run(rig, Push("orders", VALUE), request_id="r2")

    assert rig.shard.outbox.counter(INGEST).last_number == 2
    await run(rig, Push("orders", VALUE), request_id="r1")
    await run(rig, Push("orders", VALUE))
    assert rig.shard.outbox.counter(INGEST).last_number == 3


# --- The outbox -------------------------------------------------------------


async def test_numbers_go_on_after_a_restart_though_every_row_was_sent() -> None:
    rig, _ = await rig_with(0)
    await run(rig, Push("orders", VALUE), Push("orders", VALUE))
    rig.commit()
    rig.shard.outbox.sent(INGEST, 2, 2 * len(VALUE))
    rig.commit()
    assert outbox_rows(rig) == []
    await rig.restart()

    await run(rig, Push("orders", VALUE))
    rig.commit()

    assert outbox_rows(rig) == [outbox_key(INGEST, 3)]
    assert rig.shard.outbox.counter(INGEST) == OutboxCounter(3, 3, len(VALUE))


@pytest.mark.parametrize("limits", [(3, 1 << 20), (100, 3 * len(VALUE))], ids=["rows", "bytes"])
async def test_a_full_outbox_refuses_the_whole_list(limits: tuple[int, int]) -> None:
    rig, leases = await rig_with(1)
    rig.shard.outbox.rows_max, rig.shard.outbox.bytes_max = limits
    await run(rig, Push("orders", VALUE), Push("orders", VALUE))
    rig.commit()

    with pytest.raises(ResourceExhausted) as refused:
        await run(rig, Complete(leases[0].token), Push("orders", VALUE), Push("orders", VALUE))

    assert refused.value.reason == "OUTBOX_FULL"
    assert not rig.shard.has_changes
    await rig.restart()
    assert rig.shard.outbox.waiting_count(INGEST) == 2
    await run(rig, Push("orders", VALUE))


async def test_the_age_of_the_oldest_push_is_known_until_all_are_sent() -> None:
    rig, _ = await rig_with(0)
    items: list[int] = []
    rig.shard.outbox.on_push = items.append
    first_ms = rig.now_ms
    await run(rig, Push("orders", VALUE))
    rig.now_ms += 1000
    await run(rig, Push("orders", VALUE))

    assert rig.shard.outbox.oldest_ms(INGEST) == first_ms
    assert items == [INGEST, INGEST]
    rig.shard.outbox.sent(INGEST, 1, len(VALUE))
    rig.shard.outbox.seen(INGEST, first_ms + 1000)
    assert rig.shard.outbox.oldest_ms(INGEST) == first_ms + 1000
    rig.shard.outbox.sent(INGEST, 1, len(VALUE))
    assert rig.shard.outbox.oldest_ms(INGEST) is None
    assert rig.shard.outbox.counter(INGEST) == OutboxCounter(2, 3, 0)
